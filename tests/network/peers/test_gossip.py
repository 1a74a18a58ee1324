"""Copies over real TLS on loopback: what is new is pushed, what was missed is mended, and strangers get nothing."""

import math
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import tomli_w
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.network.http_client import HttpAnswer
from fedkseed.network.limits import Quota
from fedkseed.network.peers import FILE, app, gossip, tls
from fedkseed.network.peers.app import application, path_of, serving_uploads
from fedkseed.network.peers.gossip import ComparisonPace, Gossip, PeerRequests
from fedkseed.network.peers.roster import PeerAddresses, load_roster
from fedkseed.network.peers.signed_upload import framed, unframed
from fedkseed.network.peers.store import UploadStore
from fedkseed.network.protocol.certs import add, make, sign
from fedkseed.network.protocol.signatures import _key_of_a_server, certificate

from ..ports import free_port, wait_for
from .synthetic import PEERS, ROUNDS, Federation, line, roster, secret

LARGEST = 1000
LISTED = b"\x01\0\0\0" + bytes(32) + bytes(12)  # names of four rounds: one, and none of the others


@dataclass
class One:
    """A peer without a model: its store, its server, its gossip."""

    store: UploadStore
    gossip: Gossip
    said: list[str]
    port: int


@dataclass
class Place:
    """Peers 0, 1 and 2 of five, and a stranger who has a certificate of the same authority."""

    federation: Federation
    keys: Path
    peers: list[One]
    contexts: dict[int, ssl.SSLContext]

    def ask(self, who: int, whom: int, method: str, path: str, body: bytes = b"") -> httpx.Response:
        with httpx.Client(verify=self.contexts[who], timeout=20, trust_env=False) as http:
            run = path_of(self.federation.rule.run)
            return http.request(method, f"https://localhost:{self.peers[whom].port}{run}{path}", content=body or None)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    """Certificates for the keys of `synthetic`, and for number 5, which is no peer's."""
    folder = tmp_path_factory.mktemp("keys")
    make(folder, 0, ["localhost"], 2)
    for number in range(PEERS + 1):
        (folder / f"{number}.pub").write_text(line(number))
        add(folder, folder / f"{number}.pub")
        sign(folder, number, [], 2)
        form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (folder / f"{number}.key").write_bytes(secret(number).private_bytes(serialization.Encoding.PEM, form, none))
    return folder


@contextmanager
def place(keys: Path, folder: Path, quick: float = 0.05) -> Iterator[Place]:
    federation, ports = Federation.of(), [free_port() for _ in range(3)]
    table = roster().model_dump()
    for number, port in enumerate(ports):
        table["peers"][number]["address"] = f"https://localhost:{port}"
    table["peers"] = [{k: v for k, v in peer.items() if v} for peer in table["peers"]]
    (folder / "peers.toml").write_text(tomli_w.dumps(table))
    made, servers, contexts = list[One](), [], dict[int, ssl.SSLContext]()
    for number in range(PEERS + 1):
        files = keys / f"{number}.key", keys / f"client-{number}.pem", keys / "ca.pem"
        server, contexts[number] = tls.contexts(*files, folder)
        if number > 2:
            continue
        store, said = UploadStore(folder / f"{number}.{FILE}", federation.rule), list[str]()
        addresses = PeerAddresses(folder / "peers.toml", load_roster(folder / "peers.toml"), said.append)
        rule, pace = federation.rule, ComparisonPace(quick, 4 * quick)
        requests = PeerRequests(rule, addresses, contexts[number], LARGEST)
        one = Gossip(store, requests, number, lambda: ROUNDS, 3, pace, said.append)
        answering = application(store, lambda: ROUNDS, LARGEST, one.heard)
        servers.append(serving_uploads(answering, store, "127.0.0.1", ports[number], server))
        made.append(One(store, one, said, ports[number]))
    with ExitStack() as stack:
        for one, server in zip(made, servers, strict=True):
            stack.callback(one.store.close)
            stack.enter_context(server)
        for one in made:
            stack.callback(one.gossip.close)
        yield Place(federation, keys, made, contexts)


@pytest.fixture(scope="module")
def quiet(keys, tmp_path_factory) -> Iterator[Place]:
    """Peers that do nothing by themselves; peer 0 has everything."""
    with place(keys, tmp_path_factory.mktemp("quiet")) as made:
        made.peers[0].store.add(made.federation.everything(), ROUNDS)
        yield made


def test_uploads_that_three_peers_are_given_apart_reach_all_of_them(keys, tmp_path):
    with place(keys, tmp_path) as made:
        stores = [one.store for one in made.peers]
        for number, data in enumerate(made.federation.everything()):
            stores[number % 3].add([data], ROUNDS)
        for one in made.peers:
            one.gossip.start()
        wait_for(lambda: len({store.digest() for store in stores}) == 1)
        own = made.federation.entry(0, 2, draw=9)
        (header,), _ = stores[0].add([own.encoded], ROUNDS)
        made.peers[0].gossip.push(header.name)
        wait_for(lambda: all((0, 2) in store.contradictions() for store in stores))
        assert not any(one.said for one in made.peers)


def test_what_a_peer_gives_is_checked_and_the_rest_of_it_taken(quiet):
    federation, store = quiet.federation, quiet.peers[2].store
    good, bad = federation.entry(1, 2).encoded, federation.entry(0, 0, signer=4).encoded
    assert not store.has(1, 2)
    found = quiet.ask(4, 2, "POST", "/give", framed([bad, good]))
    assert found.status_code == 422
    assert "not signed with the key of peer 0" in found.text
    assert store.has(1, 2)
    assert not store.has(0, 0)


def test_a_peer_pays_for_its_work_alone(keys, tmp_path, monkeypatch):
    work = Quota(0.1, 0.001)
    monkeypatch.setattr(app, "Quota", lambda rate, burst: work)
    with place(keys, tmp_path) as made:
        slot = [made.federation.entry(1, 1, draw=k).encoded for k in range(64)]
        assert made.ask(4, 0, "POST", "/give", framed(slot)).status_code == 204
        assert work.wait(4) > 0
        work.charge(4, 0.1)
        begin = time.monotonic()
        assert made.ask(1, 0, "GET", "/set?digest=").status_code == 200
        assert work.wait(4) > 0, "it was answered at once"
        assert made.ask(4, 0, "GET", "/set?digest=").status_code == 200
        assert time.monotonic() - begin > 0.5, "and this one later"


def test_one_comparison_makes_two_copies_one_both_ways(quiet):
    here, there = quiet.peers[0], quiet.peers[1]
    own = quiet.federation.entry(3, 3, draw=7)
    there.store.add([own.encoded], ROUNDS)
    assert here.gossip.meet_all() == 2
    assert here.store.digest() == there.store.digest() == quiet.peers[2].store.digest()
    assert (3, 3) in here.store.contradictions()
    assert quiet.ask(1, 0, "GET", f"/set?digest={here.store.digest().hex()}").status_code == 204


def test_a_peer_that_was_away_is_left_alone_and_back_when_it_is(keys, tmp_path, monkeypatch):
    with place(keys, tmp_path) as made:
        first, stores = made.peers[0], [one.store for one in made.peers]
        stores[0].add(made.federation.everything(), ROUNDS)
        whole = dict(first.gossip.requests.addresses.current())
        now = {**whole, 1: f"https://localhost:{free_port()}"}
        monkeypatch.setattr(first.gossip.requests.addresses, "current", lambda: now)
        assert first.gossip.meet_all() == 1
        assert first.said == [f"peer 1 is away: nothing listens at {now[1].removeprefix('https://')}"]
        assert first.gossip.standings[1].again > 0
        first.gossip.standings[1].again = math.inf  # however slow this machine is
        assert first.gossip._others() == [2]
        assert stores[2].digest() == stores[0].digest() != stores[1].digest()
        now[1] = whole[1]
        first.gossip.standings[1].again = 0.0
        assert first.gossip.meet_all() == 2
        assert first.said[-1] == "peer 1 is back"
        assert stores[1].digest() == stores[0].digest()


def test_a_peer_that_shows_the_key_of_another_is_refused(quiet, monkeypatch):
    second, said = quiet.peers[1], quiet.peers[1].said
    address = f"https://localhost:{quiet.peers[0].port}"
    monkeypatch.setattr(second.gossip.requests.addresses, "current", lambda: {2: address})
    assert second.gossip.meet_all() == 0
    assert "shows the key of somebody else" in said[-1]


def test_a_stranger_is_not_answered_and_nobody_without_a_certificate(quiet):
    """The stranger's certificate is good, of the same authority; its key is none of the run's."""
    with pytest.raises(httpx.TransportError):
        quiet.ask(PEERS, 0, "GET", "/set?digest=")
    context = ssl.create_default_context(cafile=str(quiet.keys / "ca.pem"))
    with httpx.Client(verify=context) as http, pytest.raises(httpx.TransportError):
        http.get(f"https://localhost:{quiet.peers[0].port}{path_of(quiet.federation.rule.run)}/set")
    assert quiet.ask(4, 0, "GET", "/set?digest=").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/set?digest=xyz", b"", 400), ("GET", "/names?rounds=", b"", 400),
        ("GET", "/names?rounds=1,x", b"", 400), ("GET", f"/names?rounds={','.join('1' * 65)}", b"", 400),
        ("GET", "/names?rounds=-1,99999999999999999999", b"", 200), ("POST", "/want", b"x", 400),
        ("POST", "/want", bytes(65 * 32), 413), ("POST", "/want", bytes(64 * 32), 200),
        ("POST", "/give", b"junk", 400), ("POST", "/give", (5).to_bytes(4, "little") + b"junk!", 422),
        ("POST", "/give", b"\xff\xff\xff\xff" + bytes(10), 400), ("POST", "/give", bytes(4) * 65, 400),
        ("POST", "/give", bytes(64 * 1004 + 1), 413), ("GET", "/give", b"", 405), ("GET", "/", b"", 404),
        ("GET", "/set/../../x", b"", 404),
    ],
)  # fmt: skip
def test_requests_that_are_none_are_refused_and_change_nothing(quiet, method, path, body, status):
    before = quiet.peers[0].store.digest()
    assert quiet.ask(4, 0, method, path, body).status_code == status
    assert quiet.peers[0].store.digest() == before


def test_a_request_of_another_run_is_named_as_one(quiet):
    with httpx.Client(verify=quiet.contexts[1]) as http:
        found = http.get(f"https://localhost:{quiet.peers[0].port}/v1/0000000000000000/set?digest=")
    assert found.status_code == 409
    assert "compare recipe, base model, tokenizer, keys and times" in found.text


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({"set": b"x" * 33}, "digests of rounds have 32 bytes"),
        ({"set": bytes(1 << 21)}, "has more than 1,048,576 bytes"),
        ({"set": bytes(32), "names": b"\xff" * 8}, "a peer's list of names is cut short"),
        ({"set": bytes(32), "names": bytes(16)}, None),
        ({"set": bytes(32), "names": LISTED, "want": b"\x01\0\0\0\0"}, "more than 106 bytes"),
        ({"set": bytes(32), "names": LISTED, "want": b"\x05\0\0\0\0"}, "cut short or has more"),
    ],
    ids=["digests", "too much", "names", "nothing", "an entry", "a frame"],
)
def test_answers_of_a_peer_that_lies_are_refused(quiet, monkeypatch, answers, text):
    """The bytes come from a stand-in for the connection; the checks are those of any answer."""
    store, requests, sent = quiet.peers[1].store, quiet.peers[1].gossip.requests, []

    @contextmanager
    def stream(method, url, **request):
        sent.append(url)
        kind = url.rsplit("/", 1)[1].partition("?")[0]
        body = httpx.ByteStream(answers.get(kind, b""))
        yield httpx.Response(200, stream=body, extensions={"network_stream": Shown()})

    class Shown:
        def get_extra_info(self, name: str) -> object:
            return self

    monkeypatch.setattr(requests.http.http, "stream", stream)
    monkeypatch.setattr(gossip.tls, "fingerprint_shown", lambda connection: requests.fingerprints[0])
    before = store.digest()
    with nullcontext() if text is None else pytest.raises(FedKSeedError, match=text):
        quiet.peers[1].gossip.compare(0)
    assert store.digest() == before
    assert sent


@given(st.dictionaries(st.sampled_from(["set", "names", "want", "give"]), st.binary(max_size=300) | st.just(LISTED)))
def test_generated_answers_of_a_peer(quiet, answers):
    """They are refused in words, and nothing of them is kept."""
    one, asked = quiet.peers[1], quiet.peers[1].gossip.requests.http.ask
    before = one.store.digest()

    def ask(method, address, most, **options):
        return HttpAnswer(200, answers.get(address.rsplit("/", 1)[1].partition("?")[0], b""))

    one.gossip.requests.http.ask = ask
    try:
        with suppress(FedKSeedError):
            one.gossip.compare(0)
    finally:
        one.gossip.requests.http.ask = asked
    assert one.store.digest() == before


def test_frames_are_whole_or_refused():
    data = framed([b"a", b"", b"bcd"])
    assert unframed(data, 3) == [b"a", b"", b"bcd"]
    for wrong in (data[:-1], data + b"\x01", data + bytes(4)):
        with pytest.raises(FedKSeedError, match="cut short or has more"):
            unframed(wrong, 3)


def test_a_certificate_for_another_key_or_of_another_authority_or_an_old_one_is_refused(keys, tmp_path):
    with pytest.raises(FedKSeedError, match="is not for the key"):
        tls.contexts(keys / "0.key", keys / "client-1.pem", keys / "ca.pem", tmp_path)
    make(tmp_path / "other", 0, ["localhost"], 2)
    with pytest.raises(FedKSeedError, match="is not signed by the authority"):
        tls.contexts(keys / "0.key", keys / "client-0.pem", tmp_path / "other" / "ca.pem", tmp_path)
    (tmp_path / "other" / "client-0.pub").write_text(line(0))
    old = sign(tmp_path / "other", 0, [], -0.02)
    with pytest.raises(FedKSeedError, match=r"client-0.pem is valid from"):
        tls.contexts(keys / "0.key", old, tmp_path / "other" / "ca.pem", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"], "the copy of the key is gone"


def test_a_peers_certificate_is_none_of_a_server_that_hands_out_tasks(keys, tmp_path):
    with pytest.raises(FedKSeedError, match="is not one of a server"):
        _key_of_a_server(certificate(keys / "client-0.pem"), certificate(keys / "ca.pem"), datetime.now(UTC))
