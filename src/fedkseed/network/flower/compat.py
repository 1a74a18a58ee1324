"""Workarounds for Flower, each with its reason and the version of Flower that needs it.

No other file names a version. For an upgrade: change TESTED, run tests/network/flower/test_compat.py, which looks
for each place in the Flower that is installed, mend here what the test does not find, and run `make test-faults`.

Two properties of 1.41 shape whole modules. It starts a new process for every message: therefore a worker keeps the
model (client/worker.py). And one port of the SuperLink serves clients, users and executors alike: therefore nginx
stands before it (server/processes.py).
"""

import os
import subprocess
import sys
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...errors import FedKSeedError

if TYPE_CHECKING:  # `fedkseed --help` needs no Flower
    from flwr.app import Message
    from flwr.clientapp import ClientApp

# Both sides

# 1.41: parties of different minor versions refuse each other, and all notes of this file are about this version.
TESTED = ("1.41.",)

# 1.41: Flower and its libraries send usage data, ask for updates and install packages that an app names. Some of these
# variables are read when `flwr` is imported, so they are set before.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds a message may wait; 1.41: the default is 1
    "PYTHONUNBUFFERED": "1",  # else lines reach the logs, which are watched, too late
}

# Seconds. 1.41: for twice 30 s after its last heartbeat a SuperNode counts as connected, and its key is refused to the
# same client, started again. An earlier attempt to connect is in vain.
CONNECTED = 60.0


def require_flower() -> None:
    """Refuse to go on without Flower, or with a version that was not tested.

    Raises:
        FedKSeedError: a tested version is not installed; the message says what to install.
    """
    install = "install it with: pip install 'fedkseed[flower]'"
    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise FedKSeedError(f"a federation over a network needs Flower; {install}") from error
    if not found.startswith(TESTED):
        wanted = " or ".join(f"{prefix}*" for prefix in TESTED)
        raise FedKSeedError(f"Flower {found} is installed, fedkseed was tested with {wanted}; {install}")


def _place(name: str, *functions: str) -> Any:
    """A module of Flower's in which functions are to be replaced.

    Raises:
        FedKSeedError: the module lacks one of the functions; a replacement that is never called would be no workaround.
    """
    module = import_module(name)
    if not all(callable(getattr(module, function, None)) for function in functions):
        raise FedKSeedError(f"{name} has no {' or '.join(functions)}: this version of Flower was not tested")
    return module


# 1.41: an executor writes the token of a task into the command of the process that it starts, where every user of the
# machine can read it, and with it act as that process: swallow a client's tasks, or speak to clients as the server.
STARTS, TOKEN, TOKEN_FLAG = "flwr.supercore.superexec.executor.subprocess_executor", "FEDKSEED_TASK_TOKEN", "--token"


def hide_tokens() -> None:
    """Let `flower-superexec`, in this process, hand tokens on in the environment, which other users can't read.

    Raises:
        FedKSeedError: this version of Flower lacks the functions to replace.
    """
    theirs = _place(STARTS, "SubprocessExecutor")

    def start(command: list[str], **options: Any) -> subprocess.Popen:
        at = command.index(TOKEN_FLAG)
        shown, token = [*command[:at], *command[at + 2 :]], command[at + 1]
        return subprocess.Popen(shown, env={**os.environ, TOKEN: token}, **options)  # noqa: S603 - Flower's own command

    theirs.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)


def take_token() -> None:
    """Give this process its token, and let no process that it starts have it."""
    if token := os.environ.pop(TOKEN, None):
        sys.argv += [TOKEN_FLAG, token]  # the command in the system's table of processes stays as it is


# The server's side

# 1.40 and 1.41: one port of the SuperLink serves clients, the commands that start runs, and executors; anyone who
# reaches it can start programs on all clients, without a credential. This is the path that clients need.
FLEET = "/v1/fleet/"

# Seconds. 1.41: the SuperLink closes a connection after this time without requests. nginx has to close it earlier: a
# request on a connection that is being closed is lost.
KEEP_ALIVE = 5

# 1.41: the SuperLink's error for a key that is registered already, which does not name the key's node. By this error a
# server that was killed before it wrote the node down can begin again.
REGISTERED = "already in use"

# 1.41: the same for a node that is unregistered already. Its next request is refused; the row of its key stays, so that
# the key can't be registered a second time.
UNREGISTERED = "Node ID not found"

# 1.41: an error is a number and a reason in Flower's terms; these words come first for whoever runs a server.
GONE = 5
ERRORS = {
    1: "its ClientApp can't be loaded",
    2: "its ClientApp failed",
    3: "its reply is missing, or its message",
    4: "its reply was lost",
    GONE: "it is gone",
    8: "its ClientApp was killed",
}

PULLS, PULL, INFLATE = "flwr.superlink.grid.http_grid", "pull_objects", "inflate_object_from_contents"
PARTS = 3  # of a reply (messages.py): the message, its record of records, and the record with its bytes
PULL_SMALL = 20.0  # seconds for the parts of a reply of kilobytes, plus up to 10; no other reply is read meanwhile
PULL_LARGE = 180.0  # the same for a reply that holds weights


def guard_pulls(seconds: float) -> None:
    """Let no client's reply hold up the replies of the others for long, or end this process.

    1.41: while replies are pulled, Flower waits for a reply that is still being sent, for two hours if its parts keep
    coming; and a reply that can't be read raises an error for all replies. Here both become the error that this one
    reply is missing.

    Args:
        seconds: time limit for the parts of one reply.

    Raises:
        FedKSeedError: this version of Flower lacks the functions to replace.
    """
    from flwr.app import Message

    theirs = _place(PULLS, PULL, INFLATE)
    pull, inflate = getattr(theirs, PULL), getattr(theirs, INFLATE)

    def whole(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        if len(object_ids) > PARTS:
            raise theirs.ObjectPullError(object_ids[-1], f"a reply has {PARTS} parts, this one {len(object_ids)}")
        contents = pull(object_ids, pull_object_fn, max_time=seconds)
        try:
            found = inflate(object_ids[-1], dict(contents))  # the last is made of the others
            if not isinstance(found, Message):
                raise TypeError(f"a message was expected, it is a {type(found).__name__}")
        except Exception as error:  # Protobuf's, Flower's own, an IndexError: a client wrote these bytes
            raise theirs.ObjectPullError(object_ids[-1], f"it can't be read: {error}") from error
        return contents

    setattr(theirs, PULL, whole)


# The SuperLink's process. 1.41: a registered key opens more than a client needs. A push may hold any number of objects,
# which are written in one transaction (100,000 lock the database for good), and any message: with the SuperLink's
# number as its source, it is a task for another client, or a message that the ServerApp waits for.
HANDLERS, PUSH, ACTIVATE = "flwr.superlink.servicer.fleet.fleet_handlers", "push_messages", "activate_node"
MIDDLEWARES, MIDDLEWARE = "flwr.superlink.extensions", "get_middleware"
NODES, AUTHENTICATE = "flwr.superlink.routers.fleet.node_auth", "authenticate_node"
STATE, REPLIES = "flwr.server.superlink.linkstate.sql_linkstate", "get_message_res"
PUSHES = 4  # of one reply: a SuperNode that lost the answer to a push repeats it
ADDRESS = "x-real-ip"  # the header in which nginx names a client's address


def guard_fleet(
    largest: int,
    requests: Callable[[bytes], bool],
    seen: Callable[[int, str], None],
    refused: Callable[[int], None],
) -> None:
    """Let clients, in this SuperLink's process, do no more than answer the messages that they were sent.

    Args:
        largest: bytes of the largest request.
        requests: counts a request of a public key, and says whether it is to be answered.
        seen: takes note of a node and of the address from which its key was used, where nginx names it.
        refused: takes note of a node that wanted to connect while it is connected.

    Raises:
        FedKSeedError: this version of Flower lacks the functions to replace.
    """
    from fastapi import HTTPException
    from starlette.middleware import Middleware

    middlewares, nodes = _place(MIDDLEWARES, MIDDLEWARE), _place(NODES, AUTHENTICATE)
    handlers, state = _place(HANDLERS, PUSH, ACTIVATE), _place(STATE, "SqlLinkState").SqlLinkState
    before, authenticate = getattr(middlewares, MIDDLEWARE), getattr(nodes, AUTHENTICATE)

    def counted(request: Any) -> None:
        authenticate(request)  # raises, unless the key in the header has signed the request
        key = b64decode(request.headers[nodes.FLEET_HTTP_PUBLIC_KEY_HEADER])
        if not requests(key):
            raise HTTPException(503, "too many requests of one key")  # a SuperNode asks again later, after a 503
        sent, address = request.state.protobuf_request, request.headers.get(ADDRESS)
        node = getattr(getattr(sent, "node", sent), "node_id", 0)  # none in a request to be connected
        if node and address:
            seen(node, address)

    setattr(middlewares, MIDDLEWARE, lambda: (Middleware(Small, largest=largest), *before()))
    setattr(nodes, AUTHENTICATE, counted)
    setattr(handlers, PUSH, _answers_alone(getattr(handlers, PUSH)))
    setattr(handlers, ACTIVATE, _one_connection(getattr(handlers, ACTIVATE), refused))
    setattr(state, REPLIES, _whole_alone(getattr(state, REPLIES)))


class Small:
    """The SuperLink without the requests of clients that are too large: they are refused before they are read."""

    def __init__(self, app: Any, largest: int) -> None:
        self.app, self.largest = app, largest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if not length.isdigit():  # uvicorn reads no more than was announced
            await PlainTextResponse("announce the size of the request", 411)(scope, receive, send)
        elif int(length) > self.largest:
            await PlainTextResponse(f"requests have at most {self.largest} bytes", 413)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _answers_alone(push: Callable[..., Any]) -> Callable[..., Any]:
    """`push_messages` for whole replies to what the sender was asked; others never reach the database."""
    from fastapi import HTTPException
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.proto.fleet_pb2 import PushMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    pushed: Counter[str] = Counter()

    def answer(request: Any, state: Any) -> Any:
        if (len(request.messages_list), len(request.message_object_trees)) != (1, 1):
            raise HTTPException(400, "a push has one message")
        (message,), (tree,) = request.messages_list, request.message_object_trees
        about, node = message.metadata, request.node.node_id
        if (about.src_node_id, about.dst_node_id) != (node, SUPERLINK_NODE_ID) or not about.reply_to_message_id:
            raise HTTPException(400, "a client sends replies, in its own name")
        if len([*islice(iterate_object_tree(tree), PARTS + 1)]) > PARTS:
            raise HTTPException(400, f"a reply has at most {PARTS} objects")
        asked = state.get_valid_message_ins(about.reply_to_message_id)
        if asked is None or asked["dst_node_id"] % (1 << 64) != node or pushed[about.reply_to_message_id] >= PUSHES:
            # A SuperNode that is late is in this place, too. The answer to an error would be its end.
            return PushMessagesResponse(results={about.message_id: 0})
        pushed[about.reply_to_message_id] += 1
        while len(pushed) > 1 << 16:  # the oldest, whose time is over
            del pushed[next(iter(pushed))]
        return push(request=request, state=state)

    return answer


def _one_connection(activate: Callable[..., Any], refused: Callable[[int], None]) -> Callable[..., Any]:
    """`activate_node` that reports a key that wants to connect a second time. 1.41: it is refused in silence."""
    from flwr.supercore.error import FlowerError

    def connect(request: Any, state: Any) -> Any:
        try:
            return activate(request=request, state=state)
        except FlowerError:
            if (node := state.get_node_id_by_public_key(request.public_key)) is not None:
                refused(node)
            raise

    return connect


def _whole_alone(replies: Callable[..., Any]) -> Callable[..., Any]:
    """`get_message_res` for replies that are there to their last object.

    1.41: a reply is handed out while its objects may still come, and the ServerApp waits for them. A client that never
    sends them holds up the replies of all others. Flower forgets such a reply 180 s after its last object.
    """
    from flwr.supercore.date import now
    from flwr.supercore.state.schema.corestate_models import ObjectPushSession as Session
    from flwr.supercore.state.schema.corestate_models import ObjectPushSessionRoot as Root
    from flwr.supercore.state.schema.linkstate_models import MessageRes as Res
    from sqlalchemy import select

    def whole(self: Any, message_ids: set[str], run_id: int) -> Any:
        with self.session() as session:
            coming = session.scalars(
                select(Res.reply_to_message_id)
                .join(Root, Root.root_object_id == Res.message_id)
                .join(Session, Session.session_id == Root.session_id)
                .where(Res.reply_to_message_id.in_(message_ids), Session.pending_count > 0, Session.expires_at > now())
            )
            left = message_ids - {*coming}
        return replies(self, left, run_id)

    return whole


# The client's side

# Lines of a SuperNode's log. 1.41: after these the SuperNode stands still or ends; only a new one connects again.
STUCK = ("SSL/TLS handshake error detected", "Giving up reconnection")
# 1.41: the SuperNode held a reply to a run of the server's that was ended. From then on it sends each reply only when
# the next message has come, and so does not answer in time. A new SuperNode does.
LEFT_OVER = "Ignoring reply message"
# 1.41: the SuperNode was refused, and ends. If started again at once it is refused again: see CONNECTED.
NO_ENTRY = "Exit Code: 305"
# 1.41: Python's words in the log beside the first line of STUCK, which alone would be reported as a lost connection.
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"

# Seconds that a client's clock may be ahead of the server's, and behind it. 1.41: the SuperLink refuses the signature
# of a request beyond that, and the SuperNode ends with code 0 and without a word: only comparing the clocks shows why.
AHEAD, BEHIND = 5.0, 300.0

CLIENTAPP = "flwr-clientapp"  # of `task_programs`, the one that runs a message
INSTALLS, INSTALL, LOAD = "flwr.supernode.runtime.run_clientapp", "install_from_fab", "get_load_client_app_fn"


def task_programs() -> Iterable[str]:
    """All programs that a SuperNode's executor starts, by name, from its path.

    1.41: the server chooses the type of a run, and the type decides which program is started. A program that was left
    out here would install and run code that the server sends.
    """
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    return TASK_TYPE_TO_COMMAND.values()


def run_only(app: "ClientApp") -> None:
    """Let `flwr-clientapp`, in this process, run a given app and no other.

    1.41: the program installs and loads the app of the server's run, so whoever controls the server could run any code
    here.

    Raises:
        FedKSeedError: this version of Flower lacks the functions to replace.
    """
    theirs = _place(INSTALLS, INSTALL, LOAD)
    setattr(theirs, INSTALL, lambda *_, **__: None)
    setattr(theirs, LOAD, lambda *_, **__: lambda *_: app)


# One process, for tests and measurements


def name_task() -> None:
    """Set the task of this process to number 1.

    1.41: a process keeps its task in the attributes of a class; without a task, no message can be made.
    """
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def name_message(message: "Message") -> str:
    """Give a message its id, and return the id.

    1.41: only Flower's own Grids do so, past the read-only property; without an id, no reply can name the message that
    it answers.
    """
    key = message.metadata.__dict__["_message_id"] = message.object_id
    return key
