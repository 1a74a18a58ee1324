"""The state of a server's connections: sessions, tasks, replies, keys."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from tempfile import SpooledTemporaryFile

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedkseed.network.https.connections import AWAY, FRESH, Connections, RequestError
from fedkseed.network.https.task_files import KEY, Stub
from fedkseed.network.protocol.carrier import Parcel
from fedkseed.network.protocol.signatures import fingerprint, proof_of

from ..audiences import AUDIENCES
from ..protocol.vectors import certificate
from .test_task_files import task

KEYS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(clock) -> Connections:
    return Connections(AUDIENCES, [key.public_key() for key in KEYS], clock)


def proof(hub: Connections, key: ec.EllipticCurvePrivateKey, challenge: bytes = b"") -> bytes:
    return proof_of(key, hub.audiences.authority, "localhost", challenge or hub.challenge())


def begun(hub: Connections, number: int) -> str:
    got, token = hub.session(proof(hub, KEYS[number]))
    assert got == number
    return token


def refused(status: int, call: Callable[[], object]) -> None:
    with pytest.raises(RequestError) as refusal:
        call()
    assert refusal.value.status == status, str(refusal.value)


def waits(hub: Connections, token: str, seconds: float = 0.0, after: bytes = b"") -> bytes | None:
    return asyncio.run(hub.next(token, after, seconds))


def parcel(client: int, seconds: float = 60.0) -> Parcel:
    return Parcel(client, task(client).encode(), 0, seconds)


@pytest.mark.parametrize(("most", "turns"), [(100, [3]), (3, [1, 1, 1]), (4, [2, 1])])
def test_large_replies_wait_as_files_for_their_turn(hub, monkeypatch, most, turns):
    monkeypatch.setattr("fedkseed.network.https.connections.AT_ONCE", most)
    tokens = [begun(hub, number) for number in range(3)]
    keys = hub.send(parcel(number) for number in range(3))
    with ExitStack() as files:
        for number, key in enumerate(keys):
            body = files.enter_context(SpooledTemporaryFile(1))
            body.write(bytes([number] * 3))
            hub.answer(tokens[number], bytes.fromhex(key or ""), body)
        came = [hub.arrived([key or "" for key in keys]) for _ in range(4)]
        assert [len(turn) for turn in came if turn] == turns
        assert [one.data for turn in came for one in turn] == [bytes([number] * 3) for number in range(3)]


def test_a_task_goes_to_its_client_and_the_reply_back(hub):
    token, other = begun(hub, 1), begun(hub, 2)
    (key,) = hub.send([parcel(1)])
    stub = Stub.decode(waits(hub, token) or b"")
    assert stub.key.hex() == key
    assert stub.task(hub.file) == task(1).encode()
    assert waits(hub, other) is None
    assert waits(hub, token, after=stub.key) is None, "it has this one already"
    assert hub.arrived([key]) == []
    hub.answer(token, stub.key, b"a reply")
    (arrival,) = hub.arrived([key])
    assert (arrival.key, arrival.node, arrival.data, arrival.trouble) == (key, 1, b"a reply", None)
    assert hub.arrived([key]) == [], "it was taken"
    assert waits(hub, token) is None, "it was answered"


def test_a_client_that_waits_gets_its_task_at_once(hub):
    token = begun(hub, 0)

    async def both() -> bytes | None:
        waiting = asyncio.create_task(hub.next(token, b"", 3600))
        while 0 not in [n for n, seat in hub._clients.items() if seat.wake]:
            await asyncio.sleep(0)
        await asyncio.to_thread(hub.send, [parcel(0)])  # as by the thread of the rounds
        return await asyncio.wait_for(waiting, 30)

    assert Stub.decode(asyncio.run(both()) or b"").task(hub.file) == task(0).encode()


def test_the_last_of_several_tasks_counts_and_an_answer_to_an_earlier_one_too(hub):
    token = begun(hub, 0)
    first, second = hub.send([parcel(0), parcel(0)])
    assert Stub.decode(waits(hub, token) or b"").key.hex() == second
    hub.answer(token, bytes.fromhex(first or ""), b"to the first")
    assert [arrival.data for arrival in hub.arrived([first or "", second or ""])] == [b"to the first"]


def test_a_task_whose_time_is_over_is_not_handed_out(hub, clock):
    token = begun(hub, 0)
    hub.send([parcel(0, seconds=5)])
    clock.now += 6
    assert waits(hub, token) is None


def test_files_of_tasks_that_are_over_are_forgotten(hub, clock):
    hub.send([parcel(0, seconds=5)])
    stub, _ = Stub.of(bytes(KEY), task(0).encode())
    assert hub.file(stub.names[2]) == task(0).message
    clock.now += 6
    hub.send([])
    refused(404, lambda: hub.file(stub.names[2]))


def test_an_answer_is_taken_once_and_from_its_client_alone(hub, clock):
    token, other = begun(hub, 1), begun(hub, 2)
    (key,) = hub.send([parcel(1)])
    name = bytes.fromhex(key or "")
    refused(410, lambda: hub.answer(other, name, b"by another"))
    refused(410, lambda: hub.answer(token, bytes(KEY), b"to no task"))
    hub.answer(token, name, b"a reply")
    refused(410, lambda: hub.answer(token, name, b"once more"))
    assert [arrival.data for arrival in hub.arrived([key or ""])] == [b"a reply"]


def test_a_challenge_is_signed_once_soon_and_with_a_registered_key(hub, clock):
    challenge = hub.challenge()
    good = proof(hub, KEYS[0], challenge)
    refused(421, lambda: hub.session(good[:-1]))
    refused(401, lambda: hub.session(bytes(129)))
    refused(400, lambda: hub.session(good[:128]))
    refused(401, lambda: hub.session(bytes([good[0] ^ 1]) + good[1:]))
    refused(403, lambda: hub.session(good[:127] + bytes([good[127] ^ 1]) + good[128:]))
    refused(403, lambda: hub.session(proof(hub, ec.generate_private_key(ec.SECP256R1()))))
    stolen = good[:32] + fingerprint(KEYS[1].public_key()) + good[64:]
    refused(403, lambda: hub.session(stolen))
    assert hub.session(good)[0] == 0
    refused(401, lambda: hub.session(good))
    late = proof(hub, KEYS[0])
    clock.now += FRESH
    refused(401, lambda: hub.session(late))
    refused(401, lambda: Connections(AUDIENCES, [KEYS[0].public_key()], clock).session(proof(hub, KEYS[0])))


def test_a_challenge_that_another_server_relays_proves_nothing(clock):
    """The attack: server B hands out A's challenge, and sits at A as the client that has signed it for B."""
    names = ("a.example.org", "10.0.0.1", "2001:db8::7", "*.example.net")
    victim, key = Connections(replace(AUDIENCES, names=frozenset(names)), [KEYS[0].public_key()], clock), KEYS[0]
    elsewhere = x509.load_der_x509_certificate(certificate("another authority", "another authority"))
    renewed = x509.load_der_x509_certificate(certificate("authority", "authority", until=2050))
    dialled = (*names[:3], "b.example.net")
    for name in dialled:
        assert victim.session(proof_of(key, AUDIENCES.authority, name, victim.challenge()))[0] == 0
        assert victim.dialled(0) == name
    assert victim.session(proof_of(key, renewed, dialled[0], victim.challenge()))[0] == 0
    for name in dialled:  # of another federation
        refused(403, lambda name=name: victim.session(proof_of(key, elsewhere, name, victim.challenge())))
    for name in ("b.example.org", "A.example.org", "a.b.example.net", "example.net", "", "*.example.net.", "x" * 253):
        refused(
            421 if name else 400, lambda name=name: victim.session(proof_of(key, renewed, name, victim.challenge()))
        )
    signed = proof_of(key, AUDIENCES.authority, "b.example.org", victim.challenge())  # B is of the same authority
    for name in dialled:
        refused(403, lambda name=name: victim.session(signed[:128] + name.encode()))


def test_a_new_session_ends_the_one_before(hub):
    old, new = begun(hub, 0), begun(hub, 0)
    refused(409, lambda: hub.client(old))
    refused(409, lambda: waits(hub, old))
    assert hub.client(new).number == 0


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (lambda hub: begun(hub, 0), "another session of this key has begun"),
        (lambda hub: hub.close(), "about to end"),
        (lambda hub: hub.close(run_is_over=True), "the run is over"),
    ],
    ids=["session", "server", "run"],
)
def test_a_request_that_waits_ends_with_its_session_and_with_the_server(hub, ending, text):
    token = begun(hub, 0)

    async def both() -> None:
        waiting = asyncio.create_task(hub.next(token, b"", 3600))
        await asyncio.sleep(0.05)
        ending(hub)
        with pytest.raises(RequestError, match=text):
            await asyncio.wait_for(waiting, 30)

    asyncio.run(both())


def test_session_after_session_of_one_key_is_refused_and_shown(hub):
    for _ in range(10):
        begun(hub, 0)
    assert {leaked for *_, leaked in hub.notices} == {False}, "none of them waits"
    hub.notices.clear()
    refused(429, lambda: begun(hub, 0))
    assert hub.notices.popleft() == (0, "begins session after session", True)
    begun(hub, 1)


def test_a_client_that_has_connected_again_is_asked_again_and_an_older_process_of_it_is_shown(hub):
    old = begun(hub, 0)
    (key,) = hub.send([parcel(0)])
    begun(hub, 0)
    (arrival,) = hub.arrived([key])
    assert (arrival.key, arrival.node, arrival.trouble) == (key, 0, "it has connected again")
    assert not hub.notices, "the round says so"
    refused(410, lambda: hub.answer(begun(hub, 0), bytes.fromhex(key or ""), b"to the task that it has lost"))
    assert hub.notices.popleft() == (0, "has connected again", False)
    refused(409, lambda: hub.client(old))
    assert hub.notices.popleft() == (0, "is in two processes at once", True)
    refused(401, lambda: hub.client("no token of ours"))
    assert not hub.notices


def test_what_a_client_s_checks_have_found_is_told_once_a_session_and_in_words(hub):
    token = begun(hub, 1)
    for failed in (b"Step", b"step,", b"step,memory", b"a" * 21, b"step\n", "größe".encode()):
        refused(400, lambda failed=failed: hub.checked(token, failed))
    refused(401, lambda: hub.checked("other", b""))
    hub.checked(token, b"")
    refused(409, lambda: hub.checked(token, b"step"))
    hub.checked(begun(hub, 1), b"memory, step")
    told = [(number, text) for number, text, _ in hub.notices if "checks" in text]
    assert told == [
        (1, "has passed all checks of its machine"), (1, "has failed checks of its machine: memory, step"),
    ]  # fmt: skip


def test_clients_count_as_connected_while_they_wait_and_a_little_after(hub, clock):
    assert hub.nodes() == []
    token = begun(hub, 1)
    assert hub.nodes() == [], "it has not asked for a task yet"
    assert waits(hub, token) is None
    assert hub.nodes() == [1]
    clock.now += AWAY
    assert hub.nodes() == []

    async def both() -> list[int]:
        waiting = asyncio.create_task(hub.next(token, b"", 3600))
        await asyncio.sleep(0.05)
        clock.now += 10 * AWAY
        found = hub.nodes()
        waiting.cancel()
        return found

    assert asyncio.run(both()) == [1]
    assert hub.nodes() == [], "its request is gone"


def test_a_key_that_is_taken_away_or_replaced_is_refused_at_once(hub):
    tokens = [begun(hub, number) for number in range(3)]
    assert [waits(hub, token) for token in tokens] == [None] * 3
    (key,) = hub.send([parcel(1)])
    another = ec.generate_private_key(ec.SECP256R1())
    hub.take([KEYS[0].public_key(), None, another.public_key()])
    assert hub.nodes() == [0]
    assert hub.client(tokens[0]).number == 0
    refused(401, lambda: hub.answer(tokens[1], bytes.fromhex(key or ""), b"a reply"))
    for number in (1, 2):
        refused(401, lambda number=number: hub.client(tokens[number]))
        refused(403, lambda number=number: begun(hub, number))
    assert hub.send([parcel(1)]) == [None], "nobody is there to take it"
    assert hub.session(proof(hub, another))[0] == 2


def test_answers_to_tasks_of_before_other_keys_are_not_kept(hub):
    """The rounds begin again with new keys, and nobody would ask for them: with weights each is up to a gigabyte."""
    tokens = [begun(hub, number) for number in range(2)]
    keys = hub.send(parcel(number) for number in range(2))
    with SpooledTemporaryFile(1) as body:
        body.write(b"xyz")
        hub.answer(tokens[0], bytes.fromhex(keys[0]), body)
        hub.take([key.public_key() for key in KEYS])
        assert body.closed
    assert not hub._arrivals
    refused(410, lambda: hub.answer(tokens[1], bytes.fromhex(keys[1]), b"xyz"))
    assert not hub._arrivals
    (again,) = hub.send([parcel(1)])
    hub.answer(tokens[1], bytes.fromhex(again), b"xyz")
    assert [*hub._arrivals] == [again]
