"""The SuperLink under fire from a registered client: Flower's own program and database, asked in one process."""

import asyncio
import hashlib
import json
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)  # fmt: skip
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    NOOP_FEDERATION_ID,
    TaskType,
)  # fmt: skip
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedkseed.network.flower import compat
from fedkseed.network.flower.messages import packed
from fedkseed.network.flower.server import superlink
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.server.request_limits import BURST, RATE

# Flower's own configuration of alembic
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found in configuration:DeprecationWarning")

LARGEST = 1 << 15


@dataclass
class Member:
    """A client with a registered key, and all that it may do with it."""

    link: "Link"
    key: ec.EllipticCurvePrivateKey
    node: int = 0

    @property
    def public(self) -> bytes:
        return public_key_to_bytes(self.key.public_key())

    def ask(self, path: str, request: Any, answer: type | None = None, **more: str) -> Any:
        """The status of a request, or the answer in it."""
        when = now().isoformat()
        headers = {
            "content-type": "application/protobuf", "flwr-timestamp": when,
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self.public).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(self.key, when.encode())).decode(), **more,
        }  # fmt: skip
        got = self.link.post(f"/v1/fleet/{path}", content=request.SerializeToString(), headers=headers)
        if got.status_code != 200 or answer is None:
            return got.status_code
        return answer.FromString(got.content)

    def connect(self) -> Any:
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=30)
        return self.ask("activate-node", request, ActivateNodeResponse)

    def pull(self) -> Any:
        (message,) = self.ask(
            "pull-messages", PullMessagesRequest(node=Node(node_id=self.node)), PullMessagesResponse
        ).messages_list
        return message.metadata

    def push(self, message: Message, tree: ObjectTree | None = None) -> Any:
        request = PushMessagesRequest(
            node=Node(node_id=self.node),
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[tree or get_object_tree(message)],
        )
        return self.ask("push-messages", request, PushMessagesResponse)

    def push_parts(self, message: Message, session: str) -> None:
        for key, part in get_all_nested_objects(message).items():
            request = PushObjectRequest(
                node=Node(node_id=self.node), run_id=self.link.run, object_id=key, object_content=part.deflate(),
                session_id=session,
            )  # fmt: skip
            assert self.ask("push-object", request, PushObjectResponse).stored


@dataclass
class Link:
    """A SuperLink with a run and two members."""

    app: Any
    state: Any
    run: int
    folder: Path
    members: list[Member]

    def post(self, path: str, **request: Any) -> httpx.Response:
        async def post() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://superlink") as http:
                return await http.post(path, **request)

        return asyncio.run(post())

    def ask(self, member: Member) -> str:
        """Send a member a task, as the ServerApp does; returns the id of the message."""
        message = named(Message(packed(b"a task"), member.node, "train", ttl=600.0))
        session = self.state.start_session(self.run)
        stored, missing = self.state.store_message_and_object_tree(message, get_object_tree(message), session)
        assert stored
        parts = get_all_nested_objects(message)
        assert all(self.state.store_object(self.run, session, key, parts[key].deflate()) for key in missing)
        return message.metadata.message_id

    def rows(self) -> dict[str, int]:
        """The rows of the tables that pushes fill."""
        from sqlalchemy import text

        tables = ("message_ins", "message_res", "objects", "object_push_sessions")
        with self.state.session() as session:
            return {table: session.scalar(text(f"select count(*) from {table}")) for table in tables}  # noqa: S608


def named(message: Message) -> Message:
    compat.name_message(message)
    return message


def reply(asked: Any, link: Link, **changes: object) -> Message:
    """A reply to what a member pulled; `changes` are of its metadata."""
    fields = {
        "run_id": link.run, "message_id": "", "src_node_id": asked.dst_node_id, "dst_node_id": 1,
        "reply_to_message_id": asked.message_id, "group_id": "1", "created_at": now().timestamp(), "ttl": 60.0,
        "message_type": "train",
    }  # fmt: skip
    return named(make_message(Metadata(**{**fields, **changes}), content=packed(b"an answer")))


@pytest.fixture
def link(monkeypatch, tmp_path) -> Link:
    places = (compat.MIDDLEWARES, compat.MIDDLEWARE), (compat.NODES, compat.AUTHENTICATE), (
        compat.HANDLERS, compat.PUSH), (compat.HANDLERS, compat.ACTIVATE)  # fmt: skip
    for module, function in places:  # all are put back after the test
        monkeypatch.setattr(import_module(module), function, getattr(import_module(module), function))
    state = import_module(compat.STATE).SqlLinkState
    monkeypatch.setattr(state, compat.REPLIES, getattr(state, compat.REPLIES))
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(import_module("flwr.supercore.task_identity").TaskIdentity, name, None)
    make(tmp_path / "keys", 2, ["localhost"], 2)
    keys = tmp_path / "keys"
    command = [
        "superlink", str(LARGEST), str(tmp_path / "notices"), "--ssl-ca-certfile", str(keys / "ca.pem"),
        "--ssl-certfile", str(keys / "server.pem"), "--ssl-keyfile", str(keys / "server.key"),
        "--enable-supernode-auth", "--isolation", "process", "--database", str(tmp_path / "state.db"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    made = []
    program = import_module("flwr.superlink.cli.flower_superlink")
    monkeypatch.setattr(program.uvicorn, "run", lambda app, **_: made.append(app))  # served by the client below
    for name in ("event", "warn_if_flwr_update_available"):  # go out
        monkeypatch.setattr(program, name, lambda *_, **__: None)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    superlink.main()
    state = made[0].state.linkstate_factory.state()
    link = Link(made[0], state, begun(state), tmp_path, [])
    compat.name_task()
    import_module("flwr.supercore.task_identity").TaskIdentity.run_id = link.run
    for number in range(2):
        member = Member(link, ec.generate_private_key(ec.SECP256R1()))
        member.node = state.create_node("", f"owner {number}", member.public, 0)
        assert member.connect().node_id == member.node
        link.members.append(member)
    return link


def begun(state: Any) -> int:
    """A run whose ServerApp is at work."""
    run = state.create_run("", "", "", {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP)
    (found,) = state.get_run_info(run_ids=[run])
    assert state.claim_task(found.primary_task_id)
    assert state.activate_task(found.primary_task_id)
    return run


def test_a_member_answers_what_it_was_sent_and_the_server_gets_the_answer(link):
    """Else the tests below could not fail."""
    member, _ = link.members
    key = link.ask(member)
    asked = member.pull()
    answer = reply(asked, link)
    pushed = member.push(answer)
    assert {*pushed.objects_to_push} == {*get_all_nested_objects(answer)}
    member.push_parts(answer, pushed.session_id)
    (got,) = link.state.get_message_res({key}, link.run)
    assert got.metadata.message_id == answer.metadata.message_id


def test_a_push_that_announces_100_000_objects_is_refused_before_the_database(link):
    member, _ = link.members
    link.ask(member)
    answer = reply(member.pull(), link)
    ids = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(100_000)]
    tree = ObjectTree(object_id=answer.metadata.message_id, children=[ObjectTree(object_id=key) for key in ids])
    before = link.rows()
    assert member.push(answer, tree) == 413, "it has 6 MB"
    few = ObjectTree(object_id=answer.metadata.message_id, children=[ObjectTree(object_id=key) for key in ids[:200]])
    assert member.push(answer, few) == 400, "it is small enough"
    deep = ObjectTree(object_id=ids[0])
    for key in ids[1:50]:
        deep = ObjectTree(object_id=key, children=[deep])
    assert member.push(answer, deep) == 400
    assert link.rows() == before


def test_a_member_can_neither_send_tasks_nor_be_another_nor_speak_unasked(link):
    member, other = link.members
    link.ask(member)
    link.ask(other)
    asked, before = member.pull(), link.rows()
    as_the_server = {"src_node_id": 1, "reply_to_message_id": ""}
    assert member.push(reply(asked, link, **as_the_server, dst_node_id=other.node)) == 400, "a task for another member"
    assert member.push(reply(asked, link, **as_the_server)) == 400, "a message that the ServerApp would wait for"
    assert member.push(reply(asked, link, reply_to_message_id="")) == 400
    assert member.push(reply(other.pull(), link)) == 400, "in the name of another"
    for unasked in ("0" * 64, asked.message_id[::-1]):
        pushed = member.push(reply(asked, link, reply_to_message_id=unasked))
        assert (list(pushed.objects_to_push), pushed.session_id) == ([], "")
    assert link.rows() == before


def test_a_member_that_answers_again_and_again_fills_no_table(link):
    member, _ = link.members
    link.ask(member)
    asked = member.pull()
    for number in range(4 * compat.PUSHES):
        member.push(reply(asked, link, group_id=str(number)))
    rows = link.rows()
    assert rows["message_res"] == 1
    assert rows["object_push_sessions"] <= compat.PUSHES


def test_a_reply_whose_parts_never_come_is_not_handed_out_and_holds_nobody_up(link):
    member, other = link.members
    keys = {link.ask(member), link.ask(other)}
    assert not isinstance(member.push(reply(member.pull(), link)), int)
    honest = reply(other.pull(), link)
    pushed = other.push(honest)
    other.push_parts(honest, pushed.session_id)
    (got,) = link.state.get_message_res(keys, link.run)
    assert got.metadata.message_id == honest.metadata.message_id
    assert link.state.get_message_res(keys - {got.metadata.reply_to_message_id}, link.run) == []


def test_requests_that_are_too_large_or_do_not_say_how_large_they_are_are_not_read(link):
    async def body() -> AsyncIterator[bytes]:
        yield bytes(LARGEST)

    for path in ("push-object", "push-messages", "activate-node"):
        content = bytes(LARGEST + 1)
        assert link.post(f"/v1/fleet/{path}", content=content).status_code == 413
        assert link.post(f"/v1/fleet/{path}", content=bytes(LARGEST)).status_code != 413
        assert link.post(f"/v1/fleet/{path}", content=body()).status_code == 411
    assert link.post("/v1/runtime/push-object", content=bytes(LARGEST + 1)).status_code != 413, "the server's own"


def test_a_member_that_asks_without_end_is_put_off_and_the_others_are_not(link):
    member, other = link.members
    request = PullMessagesRequest(node=Node(node_id=member.node))
    begin, got = time.monotonic(), []
    while got.count(503) < 20:  # on a slow machine the allowance grows while it is used up
        got.append(member.ask("pull-messages", request))
        assert len(got) < 20 * BURST, "it is never put off"
    assert 0.9 * BURST <= got.count(200) <= BURST + RATE * (time.monotonic() - begin) + 1
    assert {*got} == {200, 503}, "a SuperNode that is told 503 asks again later"
    assert other.ask("pull-messages", PullMessagesRequest(node=Node(node_id=other.node))) == 200


def test_a_second_use_of_a_key_is_noticed(link):
    member, other = link.members
    thief = Member(link, member.key, member.node)
    assert isinstance(thief.connect(), int), "Flower refuses it"
    assert isinstance(thief.connect(), int)
    for address in ("192.0.2.1", "192.0.2.1", "198.51.100.7", "192.0.2.1"):
        assert thief.ask("pull-messages", PullMessagesRequest(node=Node(node_id=member.node)), **{"x-real-ip": address})
    stranger = Member(link, ec.generate_private_key(ec.SECP256R1()))
    assert isinstance(stranger.connect(), int)
    assert other.ask("pull-messages", PullMessagesRequest(node=Node(node_id=other.node)), **{"x-real-ip": "192.0.2.9"})
    notices = [json.loads(line) for line in (link.folder / "notices").read_text().splitlines()]
    assert [notice["node"] for notice in notices] == [member.node, member.node]
    assert "wanted to connect while it is connected" in notices[0]["text"]
    assert "from 192.0.2.1 and 198.51.100.7 in turn" in notices[1]["text"]


def test_a_key_that_is_unregistered_is_refused_at_its_next_request(link):
    member, _ = link.members
    request = PullMessagesRequest(node=Node(node_id=member.node))
    assert member.ask("pull-messages", request) == 200
    link.state.delete_node("", member.node)
    assert member.ask("pull-messages", request) == 401
    assert isinstance(member.connect(), int)
