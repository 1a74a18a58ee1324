"""Which entries are taken, which count, and the model that follows: the engine's own, whatever came in which order."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from tomllib import loads

import numpy as np
import pytest

from fedkseed import FedKSeedError
from fedkseed.network.peers.merge_rule import MergeRule, counting, model_of, with_headers
from fedkseed.network.peers.peer import _shared
from fedkseed.network.peers.signed_upload import SignedUpload
from fedkseed.network.protocol.signatures import sign
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.recipe.rules import checked_algorithm
from fedkseed.round import run_round
from fedkseed.run.store import pack
from fedkseed.strategies.uploads import wire_of
from fedkseed.wire.codec import decode, encode
from fedkseed.wire.records import Run, Upload

from .synthetic import BASE, PEERS, RECIPE, ROUNDS, TRUST, Federation, roster, secret

PLUS = RECIPE.replace('"fedkseed"', '"fedkseed-plus"')


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.of()


@pytest.mark.parametrize("text", [RECIPE, RECIPE + TRUST, PLUS + TRUST], ids=["mean", "agreement", "plus"])
def test_the_model_of_a_set_is_that_of_the_engine_that_gets_the_same_uploads(text):
    """`run_round`, as `fedkseed run` calls it: late ones with the state that their clients began with."""
    made = Federation.of(text)
    entries = [made.entry(c, r, late=(c + r) % 4 == 0 and r + 1 < ROUNDS) for c in range(PEERS) for r in range(ROUNDS)]
    strategy, states = made.rule.strategy, [made.rule.strategy.server.init()]
    for step in range(ROUNDS):
        due = [one for one in entries if one.step == step]
        uploads = [(decode(one.upload, *strategy.aggregator.replies), one.upload) for one in due]
        # One of a client at a time goes into an engine's round: a client that is late is not drawn again.
        last = {upload.client: (upload, data) for upload, data in uploads}
        if len(last) < len(uploads):
            states.append(strategy.aggregate(states[-1], [upload for upload, _ in uploads]))
            continue
        earlier = {c: states[upload.round] for c, (upload, _) in last.items() if upload.round < step}
        answers = {c: data for c, (_, data) in last.items()}
        state, report = run_round(strategy, states[-1], sorted(last), lambda _, own=answers: own.items(), earlier)
        assert report.clients == tuple(sorted(last))
        states.append(state)
    assert pack(model_of(made.rule, [one.encoded for one in entries])) == pack(states[-1])


def test_the_order_of_entries_and_repeated_ones_make_no_difference(federation):
    data = federation.everything()
    whole = pack(model_of(federation.rule, data))
    rng = np.random.default_rng(5)
    for _ in range(5):
        order = rng.permutation(len(data))
        assert pack(model_of(federation.rule, [data[k] for k in (*order, *order[:7])])) == whole


def test_of_a_peer_that_contradicts_itself_neither_upload_counts_whichever_two_of_many_are_known(federation):
    rule = federation.rule
    honest = [federation.entry(client, 0).encoded for client in (0, 1)]
    lies = [federation.entry(3, 0, draw=draw).encoded for draw in range(4)]
    alone = pack(model_of(rule, honest))
    for pair in itertools.combinations(lies, 2):
        assert pack(model_of(rule, [*honest, *pair])) == alone
    assert pack(model_of(rule, [*honest, lies[0]])) != alone
    headers = [rule.header(SignedUpload.decode(one), ROUNDS) for one in lies]
    for order in itertools.permutations(headers):  # one after the other, as they come
        slots: dict = {}
        for header in order:
            slots |= with_headers(slots, [header])
        assert slots == {(3, 0): sorted(headers)[:2]} == with_headers({}, order)
    assert counting({(3, 0): sorted(headers)[:2], (1, 0): [headers[0]]}) == [headers[0]]


def test_another_good_signature_of_the_same_upload_is_the_same_entry(federation):
    """Whoever passes an upload on can make one: s and n - s are both good."""
    entry, order = federation.entry(1, 0), int("ffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551", 16)
    r, s = entry.signature[:32], int.from_bytes(entry.signature[32:], "big")
    other = replace(entry, signature=r + (order - s).to_bytes(32, "big"))
    assert federation.rule.header(entry, 0) == federation.rule.header(other, 0)
    assert other.encoded != entry.encoded


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda f: f.entry(1, 0, signer=2), "not signed with the key of peer 1"),
        (lambda f: replace(f.entry(1, 0), base=bytes(32)[:-1] + b"x"), "not signed with the key of peer 1"),
        (lambda f: replace(f.entry(1, 0), step=1), "not signed with the key of peer 1"),
        (lambda f: f.entry(1, 0, late=2), "it may be 1 rounds late"),
        (lambda f: f.entry(1, ROUNDS - 1, late=1), "the run has 4"),
        (lambda f: f.entry(1, ROUNDS), "does not take part in round 5 of 4"),
        (lambda f: f.entry(PEERS, 0), f"peer {PEERS} does not take part"),
        (lambda f: f.entry(1, 3), "is not open by this peer's clock"),
    ],
    ids=["key", "base", "step", "late", "after the end", "round", "stranger", "early"],
)  # fmt: skip
def test_an_entry_that_does_not_belong_to_the_set_is_refused(federation, make, text):
    with pytest.raises(FedKSeedError, match=text):
        federation.rule.header(make(federation), 2)


def test_an_entry_of_another_run_is_refused(federation):
    for other in (Federation.of(seconds=61.0), Federation.of(RECIPE)):
        with pytest.raises(FedKSeedError, match="not signed with the key of peer 1"):
            federation.rule.header(other.entry(1, 0), 0)
    assert Federation.of().rule.run == federation.rule.run


def test_an_upload_that_the_strategy_could_not_add_up_is_refused_alone_and_not_with_the_others(federation):
    """Of another size, and above the clip: each would keep a whole round from being added up."""
    strategy = federation.rule.strategy
    for scalars, text in ((np.zeros(7), "7 scalars, 8 were asked for"), (np.full(8, 1000.0), "at most 100 is allowed")):
        upload = Upload(strategy.run, 0, 1, 5, 1.0, scalars.astype(np.float32), wire_of(strategy.settings))
        made = replace(federation.entry(1, 0), upload=encode(upload))
        made = replace(made, signature=sign(secret(1), made.statement(federation.rule.run)))
        with pytest.raises(FedKSeedError, match=text):
            federation.rule.header(made, 0)


def test_every_prefix_and_every_flipped_bit_of_an_entry_is_refused(federation):
    data = federation.entry(0, 0).encoded
    for end in range(0, len(data), 7):
        with pytest.raises(FedKSeedError):
            federation.rule.header(SignedUpload.decode(data[:end]), 0)
    for bit in range(0, 8 * len(data), 37):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FedKSeedError):
            federation.rule.header(SignedUpload.decode(bytes(broken)), 0)


def test_a_round_without_uploads_leaves_the_model_as_it_is(federation):
    made = model_of(federation.rule, [federation.entry(0, 1).encoded])
    assert made.round == ROUNDS
    np.testing.assert_array_equal(model_of(federation.rule, []).coefficients, 0)
    assert np.any(made.coefficients)


def test_an_algorithm_without_coefficients_has_no_rule():
    recipe = parse(loads(RECIPE.replace('"fedkseed"', '"fedavg"')))
    strategy = checked_algorithm(recipe).make(recipe, Run(checked_algorithm(recipe).pool(recipe), BASE))
    with pytest.raises(FedKSeedError, match="a model of K coefficients, got the strategy Averaging"):
        MergeRule.of(b"", recipe, strategy, roster())


def test_peers_with_another_tokenizer_are_another_run_and_with_another_chat_template_the_same(recipe_file, tmp_path):
    """The recipe's text is in the digest of a run, and peers with other digests give each other nothing."""

    def shared(change, **data: str) -> bytes:
        folder = tmp_path / f"{change.__name__}{len(data)}{len([*tmp_path.iterdir()])}"
        shutil.copytree(load_recipe(recipe_file).model.name, folder)
        change(folder)
        return _shared(load_recipe(recipe_file).having(model={"name": str(folder)}, data=data), 3)

    def nothing(folder: Path) -> None: ...

    def merges(folder: Path) -> None:
        table = json.loads((folder / "tokenizer.json").read_text())
        table["model"]["merges"] = table["model"]["merges"][:9]
        (folder / "tokenizer.json").write_text(json.dumps(table))

    def template(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
        )

    assert shared(nothing) == shared(nothing) == shared(template)
    assert shared(nothing) != shared(merges)
    assert shared(nothing, template="chat") != shared(template, template="chat")
