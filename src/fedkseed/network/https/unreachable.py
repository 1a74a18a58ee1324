"""The reason why a server is not reached, in a sentence that says what to do, and whether it may pass by itself."""

import socket
import ssl
from datetime import UTC, datetime
from typing import NamedTuple

import httpx

# OpenSSL's numbers of what is wrong with a certificate.
DATES, NAMES = (9, 10), (62, 64)  # not valid yet, or any more; for another name, or another address
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")


class Unreachable(NamedTuple):
    """The reason of an error of a connection."""

    text: str
    passes: bool = True  # whether waiting may help


def reason_of(error: Exception, url: str, proxy: str = "") -> Unreachable:
    """The reason why there is no answer.

    Args:
        error: of httpx.
        url: of the server.
        proxy: HOST:PORT of the proxy on the way; empty: there is none.
    """
    parsed, causes = httpx.URL(url), list[BaseException]()
    while (cause := causes[-1].__cause__ or causes[-1].__context__ if causes else error) is not None:
        causes.append(cause)
    host, server = parsed.host, f"{parsed.host}:{parsed.port or 443}"
    if isinstance(error, httpx.ProxyError):
        return _refusal_of_proxy(str(error), server, proxy)
    wrong = next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None)
    if isinstance(wrong, ssl.SSLCertVerificationError):
        return Unreachable(_certificate(wrong, host, server), passes=False)
    if wrong is not None:
        if wrong.reason in NO_TLS:
            return Unreachable(f"what listens at {server} speaks no TLS, so it is no such server: mend the port", False)
        return Unreachable(f"{server} breaks off the beginning of TLS ({wrong.reason or wrong})")
    at, what = (f"the proxy {proxy}", "HTTPS_PROXY") if proxy else (server, "the address")
    lookup = next((cause for cause in causes if isinstance(cause, socket.gaierror)), None)
    if lookup is not None:
        name = httpx.URL(f"//{proxy}").host if proxy else host
        if lookup.errno == socket.EAI_AGAIN:
            return Unreachable(f"the name {name} can't be looked up now ({lookup.strerror}); is the network up?")
        return Unreachable(f"no machine is called {name} ({lookup.strerror}): mend {what}", passes=False)
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        hint = "" if proxy or parsed.port else " (the address names no port; serve's own is 8443)"
        return Unreachable(f"nothing listens at {at}{hint}")
    if isinstance(error, httpx.TimeoutException):
        return Unreachable(f"{at} does not answer: is it the right address, and does a firewall let it pass?")
    return Unreachable(f"the connection to {at} failed ({error or type(error).__name__})")


def _certificate(wrong: ssl.SSLCertVerificationError, host: str, server: str) -> str:
    """The sentence on a certificate that is not taken."""
    if wrong.verify_code in DATES:
        return (
            f"the certificate of {server} is refused ({wrong.verify_message}), and the clock here says "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: set the clock right, or let the server's owner make another"
        )
    if wrong.verify_code in NAMES:
        return (
            f"the certificate of {server} is for other names than {host}: connect to a name that its owner gave "
            f"`fedkseed certs` as --host, or let the owner make one with --host {host}"
        )
    return (
        f"the certificate of {server} is not by the authority of --ca ({wrong.verify_message}): get ca.pem of this "
        "very server from its owner, or mend the address"
    )


def _refusal_of_proxy(refusal: str, server: str, proxy: str) -> Unreachable:
    """The reason of a proxy that makes no tunnel; `refusal` begins with its status."""
    if refusal.startswith("407"):
        wanted = "wants a name and a password: HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT has them"
        return Unreachable(f"the proxy {proxy} {wanted} ({refusal})", passes=False)
    passes = refusal[:1] == "5" and not refusal.startswith("501")
    remedy = "it may not reach it yet" if passes else "let its owner allow that, or put the host into NO_PROXY"
    return Unreachable(f"the proxy {proxy} makes no tunnel to {server} ({refusal}): {remedy}", passes)
