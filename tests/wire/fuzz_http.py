"""Requests and answers of HTTP for the campaign: what servers decode from clients, and clients from servers.

They go through the real functions, without sockets. A request is `WHOM METHOD TARGET`, headers, an empty line and the
body, to a server, a peer, or the guard of `watch --serve` and `serve-model`. Answers are a letter for the dialogue, and
of each answer its status (u16), length (u32) and body. A task of the dialogue `r` is signed anew by its server, so that
what follows its signature is reached.
"""

import asyncio
import json
import re
import ssl
import struct
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedkseed.errors import FedKSeedError
from fedkseed.network.http_client import DONE, AnswerError, HttpAnswer
from fedkseed.network.http_server import Doorkeeper
from fedkseed.network.https import app
from fedkseed.network.https.connections import Connections, OfferedTask
from fedkseed.network.https.join import ServerSession
from fedkseed.network.https.task_files import KEY, Stub
from fedkseed.network.limits import REFUSAL, Quota
from fedkseed.network.peers.app import application, path_of
from fedkseed.network.peers.gossip import PeerRequests
from fedkseed.network.peers.signed_upload import framed
from fedkseed.network.peers.store import UploadStore
from fedkseed.network.protocol.envelope import Reply, Status, Task
from fedkseed.network.protocol.run_history import RunHistory
from fedkseed.network.protocol.signatures import Audiences, ClientSigning, fingerprint, proof_of, sign, task_statement

from ..network.peers.synthetic import Federation

VECTORS = json.loads((files("fedkseed.network.protocol") / "vectors.json").read_text())
CERTIFICATES = {one["name"]: bytes.fromhex(one["bytes"]) for one in VECTORS["certificates"]}
AUTHORITY, SERVER = (x509.load_der_x509_certificate(CERTIFICATES[name]) for name in ("authority", "server"))
SERVER_KEY, CLIENT_KEY = (ec.derive_private_key(number, ec.SECP256R1()) for number in (12, 13))  # of the vectors
HOST, TOKEN, NAME, NOW = "fl.example.org", "t" * 22, b"k" * KEY, 1000.0
LARGEST = 1 << 16  # bytes of a body
TARGET = re.compile(rb"[\x21-\x7e]+")  # the parser of HTTP lets nothing else pass
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([\x21-\x7e\x80-\xff][\t\x20-\x7e\x80-\xff]*)")
ANSWER = struct.Struct("<HI")


@cache
def federation() -> Federation:
    return Federation.of()


@cache
def uploads() -> UploadStore:
    return UploadStore(Path(":memory:"), federation().rule)


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def stub() -> tuple[Stub, dict[bytes, bytes]]:
    made, parts = Stub.of(NAME, bytes.fromhex(VECTORS["tasks"][0]["bytes"]))
    return made, dict(parts)


def connections() -> Connections:
    """The state of a server with one client, which has a session, a task and the task's files."""
    hub = Connections(Audiences(AUTHORITY, frozenset({HOST})), [CLIENT_KEY.public_key()], lambda: NOW)
    hub._secret, end = bytes(32), NOW + 60
    client = hub._clients[0]
    client.token, hub._sessions[TOKEN] = TOKEN, client
    client.task = hub._tasks[NAME.hex()] = OfferedTask(0, NAME, stub()[0].encode(), end)
    hub._files = {digest: (part, end) for digest, part in stub()[1].items()}
    return hub


def requests() -> list[bytes]:
    """Specimens of each request, the same in each process but for signatures."""
    head = int(NOW * 1000).to_bytes(8, "big") + bytes(8)
    proof = proof_of(CLIENT_KEY, AUTHORITY, HOST, head + connections()._tag(head))
    shown = f"authorization: Bearer {TOKEN}\n".encode()
    reply, of_run = Reply(Status.DONE, b"answer").encode(), path_of(federation().rule.run).encode()
    entries, names = federation().everything()[:3], bytes(64)
    digest = next(iter(stub()[1])).hex().encode()
    to_server = [b"GET /v1/challenge\n\n", b"POST /v1/session\n\n" + proof,
                 b"GET /v1/task?wait=0&after=\n" + shown + b"\n", b"GET /v1/file/" + digest + b"\n" + shown + b"\n",
                 b"POST /v1/task/" + NAME.hex().encode() + b"\n" + shown + b"\n" + reply]  # fmt: skip
    to_peer = [b"GET " + of_run + b"/set?digest=" + b"00" * 32 + b"\n\n",
               b"GET " + of_run + b"/names?rounds=0,1,2\n\n",
               b"POST " + of_run + b"/want\n\n" + names,
               b"POST " + of_run + b"/give\n\n" + framed(entries)]  # fmt: skip
    to_guard = [b"POST /v1/chat\nhost: localhost:8000\n" + shown + b'\n{"model": "tuned"}',
                b"GET /" + TOKEN.encode() + b"/data\nhost: 127.0.0.1\norigin: http://127.0.0.1\n\n"]  # fmt: skip
    whom = ((b"server ", to_server), (b"peer ", to_peer), (b"guard ", to_guard))
    return [begin + request for begin, some in whom for request in some]


def as_request(path: Path) -> None:
    head, _, body = path.read_bytes().partition(b"\n\n")
    line, *fields = head.split(b"\n")
    whom, method, target, *more = line.split(b" ") + [b""] * 2
    headers = [match for match in map(FIELD.fullmatch, filter(None, fields)) if match]
    if (
        more != [b"", b""]
        or not TARGET.fullmatch(target)
        or not method.isalpha()
        or len(headers) < len([*filter(None, fields)])
    ):
        raise FedKSeedError("no request of HTTP")
    where, _, query = target.partition(b"?")
    connection = SimpleNamespace(token="", owner=0, asking=None, belongs=lambda owner, token: None)
    scope = {
        "type": "http", "http_version": "1.1", "method": method.decode(), "path": unquote(where.decode()),
        "scheme": "https", "raw_path": where, "query_string": query, "client": ("127.0.0.1", 1),
        "server": (HOST, 443), "root_path": "",
        "headers": [(match[1].lower(), match[2]) for match in headers if match[1].lower() != b"content-length"],
        "state": {"connection": connection},
    }  # fmt: skip
    scope["headers"].append((b"content-length", b"%d" % len(body)))
    status, text = loop().run_until_complete(_answered(whom, scope, body))
    if status >= 500:
        raise AssertionError(f"answered with {status} {text}")
    if status >= 400:
        raise FedKSeedError(text)


async def _answered(whom: bytes, scope: Any, body: bytes) -> tuple[int, str]:
    """The status and the text of the answer to a request."""
    sent, parts = list[Any](), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    if whom == b"peer":
        asked: Any = application(uploads(), lambda: 3, LARGEST, lambda: None)
    elif whom == b"guard":
        asked = Doorkeeper(inner, "127.0.0.1", TOKEN)
    else:
        asked = app.application(connections(), LARGEST, Quota(1.0, 100.0), None, None)
    with patch.object(app, "LONGEST", 0.0):  # seconds for which a request waits
        await asked(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])[:200].decode(errors="replace")


class Answers:
    """A client of HTTP to which some answers come, held to the limits of the real one."""

    url = f"https://{HOST}:8443"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def ask(self, method: str, path: str, most: int, **options: Any) -> HttpAnswer:
        if len(self.data) < ANSWER.size:
            raise httpx.ConnectError("no more answers")
        status, size = ANSWER.unpack_from(self.data)
        body, self.data = self.data[ANSWER.size : ANSWER.size + size], self.data[ANSWER.size + size :]
        if len(body) > (most if status in DONE else REFUSAL):
            raise AnswerError("the answer has more bytes than were asked for")
        return HttpAnswer(status, body)


def answers() -> list[bytes]:
    """Specimens of each dialogue."""
    begun = json.dumps({"client": 0, "token": TOKEN, "wait": 240.0}).encode()
    made, parts = stub()
    task = [(200, made.encode()), *((200, parts[name]) for name in made.names if name in parts)]
    entries = federation().everything()[:3]
    peer = [(200, bytes(64)), (200, b"\2\0\0\0" + bytes(64) + bytes(4)), (200, framed(entries))]
    dialogues = ((b"b", [(200, bytes(32)), (200, begun)]), (b"b", [(403, b"the key is not registered")]), (b"t", task),
                 (b"r", task), (b"p", peer), (b"p", [(204, b""), *peer[1:]]))  # fmt: skip
    return [letter + b"".join(ANSWER.pack(s, len(body)) + body for s, body in some) for letter, some in dialogues]


def as_answers(path: Path) -> None:
    data = path.read_bytes()
    http: Any = Answers(data[1:])
    try:
        if data[:1] == b"p":
            _as_peer(http)
        elif data[:1] == b"b":
            ServerSession(http, CLIENT_KEY, AUTHORITY).begin()
        else:
            _as_client(http, data[:1] == b"r", path.parent)
    except (AnswerError, httpx.TransportError) as error:
        raise FedKSeedError(str(error)) from error


def _as_client(http: Any, is_signed_anew: bool, directory: Path) -> None:
    session = ServerSession(http, CLIENT_KEY, AUTHORITY)
    if (coming := session.next_task(b"", True)) is None:
        return
    task = Task.decode(coming.task(session.file))
    signing = ClientSigning(CLIENT_KEY, AUTHORITY, RunHistory(directory), HOST)
    if is_signed_anew:
        statement = task_statement(signing.audience, task, fingerprint(CLIENT_KEY.public_key()))
        task = replace(task, signature=sign(SERVER_KEY, statement))
    if (reply := signing.refusal(task, SERVER.not_valid_before_utc + timedelta(days=1))) is not None:
        raise FedKSeedError(reply.text or reply.status.name)


def _as_peer(http: Any) -> None:
    addresses: Any = SimpleNamespace(current=lambda: {1: "https://b"})
    asked = PeerRequests(federation().rule, addresses, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), LARGEST)
    asked.http.close()
    asked.http = http
    asked.digests(1, bytes(32))
    [*asked.names(1, [0, 1])]
    entries: Iterable[bytes] = asked.want(1, [bytes(32)])
    _, refused = uploads().add(entries, 3)
    if refused:
        raise FedKSeedError(refused[0])
