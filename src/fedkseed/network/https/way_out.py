"""The way out of this machine: direct, or through the proxy of HTTPS_PROXY, which sees whom one talks to and no more.

What is said stays under TLS to the server, by the authority that it was given: the proxy is asked for a tunnel.
"""

import ipaddress
import os
import ssl
from contextlib import suppress
from urllib.request import (
    getproxies_environment,
    proxy_bypass_environment,  # pyright: ignore[reportAttributeAccessIssue] — unknown to its types
)

import httpx

from ...errors import FedKSeedError
from ..protocol.addresses import is_loopback

NAMES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # the first that is not empty


def proxy_of(url: httpx.URL | str) -> httpx.Proxy | None:
    """The proxy of requests to an address; None: they go straight.

    It is that of HTTPS_PROXY, else ALL_PROXY, but for this machine and for what NO_PROXY names: hosts, endings of
    hosts, addresses, networks, or *.

    Raises:
        FedKSeedError: the variable names no proxy of HTTP.
    """
    proxies, host, at = getproxies_environment(), httpx.URL(url).host, httpx.URL(url).netloc.decode()
    value = proxies.get("https") or proxies.get("all")
    if not value or is_loopback(host) or proxy_bypass_environment(at, proxies) or _in_networks(host, proxies):
        return None
    name = next((name for name in NAMES if os.environ.get(name)), NAMES[1])
    kind, _, _ = value.rpartition("://")
    with suppress(httpx.InvalidURL, ValueError):
        proxy = httpx.URL(value if kind else f"http://{value}")
        if proxy.scheme == "http" and proxy.host:
            return httpx.Proxy(proxy)
    begins = f"begins with {kind[:10]}" if kind else "is none"  # and no more of it, which may have a password
    raise FedKSeedError(
        f"{name} {begins}; the way out is a proxy of HTTP, as http://proxy.example.org:3128: name one, put {host} into "
        f"NO_PROXY, or leave {name} out"
    )


def through(url: httpx.URL | str) -> str:
    """The words that say by which proxy an address is reached; empty: by none."""
    at = proxy_at(url)
    return f" through the proxy {at}" if at else ""


def proxy_at(url: httpx.URL | str) -> str:
    """HOST:PORT of the proxy by which an address is reached; empty: by none."""
    proxy = proxy_of(url)
    return "" if proxy is None else proxy.url.netloc.decode()  # which has no password


def _in_networks(host: str, proxies: dict[str, str]) -> bool:
    for network in proxies.get("no", "").split(","):
        with suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(network.strip(), strict=False):
                return True
    return False


class WayOut(httpx.BaseTransport):
    """Connections that stay open, each request by the way that its address has."""

    def __init__(self, tls: ssl.SSLContext, limits: httpx.Limits) -> None:
        self._tls, self._limits = tls, limits
        self._ways: dict[str, httpx.HTTPTransport] = {}  # by the proxy's address; empty: straight

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = proxy_of(request.url)
        name = "" if proxy is None else str(proxy.url)
        way = self._ways.get(name) or httpx.HTTPTransport(self._tls, trust_env=False, limits=self._limits, proxy=proxy)
        return self._ways.setdefault(name, way).handle_request(request)  # peers ask on two threads

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
