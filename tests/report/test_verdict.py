"""The verdict: no claim within the noise or on training rows, and the same sentence wherever a run is shown."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkseed.data.held_out import FEWEST
from fedkseed.evaluation.statistics import Estimate, Evaluation, Gain, paired_change
from fedkseed.recipe.reading import load_recipe
from fedkseed.report.page import page
from fedkseed.report.verdict import RunVerdict, compared, without
from fedkseed.run.start_and_resume import start
from fedkseed.run.store import DIVERGED, GAINS, NOTES, STOPPED, Store

from ..commands import documented, fedkseed
from ..conftest import recipe_text

NOISE = np.random.default_rng(7).normal(0, 0.1, 64)
NOISE -= NOISE.mean()
BASE = 4 + 10 * NOISE


def scored(change: float = 0.0, right: float | None = None, says: str | None = None, count: int = 64) -> Evaluation:
    """Scores whose loss differs from that of `scored()` by `change`; a share is `right`, or all `says` one label."""
    losses, choices = (BASE + change * (1 + NOISE))[:count].tolist(), []
    if right is not None:
        true = [("yes", "no")[k % 2] for k in range(count)]
        wrong = {"yes": "no", "no": "yes"}
        choices = [(text, text if k < right * count else wrong[text]) for k, text in enumerate(true)]
        choices = [(text, says or chosen) for text, chosen in choices]
    scores = {"choice": [float(a == b) for a, b in choices]} if choices else {}
    return Evaluation(losses, scores=scores, choices=choices)


@pytest.mark.parametrize(
    ("base", "tuned", "kind", "begin"),
    [
        (scored(), scored(-0.5), "better", "Better: held-out loss 4.00 → 3.50 (-0.50 ± 0.01), on 64 held-out rows"),
        (scored(right=0.25), scored(-0.5, 0.75), "better",
         "Better: held-out loss 4.00 → 3.50 (-0.50 ± 0.01) and choice accuracy 25.0 % → 75.0 % (+50.0 ± 6.3 points)"),
        (scored(right=0.5), scored(-0.5, 0.5), "mixed",
         "The loss fell, choice accuracy did not rise by more than the noise: held-out loss 4.00"),
        (scored(right=0.75), scored(-0.5, 0.25), "mixed", "The loss fell, and choice accuracy fell, too"),
        (scored(right=0.0), scored(-0.5, 0.5, says="no"), "mixed", "Without regard to the rows, choice accuracy rose"),
        (scored(right=0.25), scored(0.5, 0.75), "mixed", "The loss rose, and choice accuracy rose, too"),
        (scored(right=0.25), scored(0.0, 0.75), "better", "Better"),
        (scored(), scored(0.5), "worse", "Not better: held-out loss 4.00 → 4.50"),
        (scored(right=0.75), scored(0.0, 0.25), "worse", "Not better"),
        (scored(right=0.5), scored(0.5, 0.5), "worse", "Not better"),
        (scored(), Evaluation((BASE + NOISE).tolist()), "unresolved", "Not resolved"),
        (scored(count=8), scored(-0.5, count=8), "unknown", "Can't say: 8 held-out rows are too few"),
    ],
)  # fmt: skip
def test_the_kind_and_the_sentence_follow_from_paired_changes(base, tuned, kind, begin):
    found, text = compared(base, tuned, tune=": TUNE")
    assert found == kind
    assert text.startswith(begin)
    assert text.endswith(": TUNE") == (kind in ("unresolved", "worse") or "The loss fell" in text or "regard" in text)


def test_the_cause_names_the_one_answer_that_all_rows_get():
    _, text = compared(scored(right=0.5), scored(-0.5, 0.5, says="no"))
    assert "It chooses 'no' for 100 % of the rows, and it is right for 50 %" in text


def test_a_run_for_accuracy_may_raise_the_loss():
    assert compared(scored(right=0.25), scored(0.5, 0.75), by_loss=False)[0] == "better"


def test_few_written_answers_say_nothing_and_rouge_counts_where_no_answer_is_the_same():
    base, tuned = scored(), scored(-0.5)
    base.rouge[:], tuned.rouge[:] = [0.5] * 3, [0.1] * 3
    assert compared(base, tuned) == compared(scored(), scored(-0.5))
    base.rouge[:], tuned.rouge[:] = [0.1, 0.2] * 8, [0.5] * 16
    base.scores["exact match"] = tuned.scores["exact match"] = [0.0] * 16
    kind, text = compared(base, tuned)
    assert (kind, "Rouge-L 0.15 → 0.50 (+0.35 ± 0.01, 16 written answers)" in text) == ("better", True)
    tuned.rouge[:] = [0.1, 0.2] * 8
    assert compared(base, tuned)[0] == "mixed"


numbers = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=40)


@given(numbers)
def test_no_claim_is_within_two_standard_errors_or_on_few_rows(pairs):
    before, after = ([pair[k] for pair in pairs] for k in (0, 1))
    change = paired_change(before, after)
    sure = len(pairs) >= FEWEST and abs(change.mean) > 2 * change.error
    kind, _ = compared(Evaluation(before), Evaluation(after))
    unsure = "unknown" if len(pairs) < FEWEST else "unresolved"
    assert kind == (("better" if change.mean < 0 else "worse") if sure else unsure)


@given(numbers, st.sets(st.integers(0, 39)))
def test_rows_that_are_left_out_have_no_influence(pairs, rows):
    before, after = ([pair[k] for pair in pairs] for k in (0, 1))
    choices = [("a", "b")] * len(pairs)
    scores = [Evaluation(each, scores={"choice": each[:]}, choices=choices) for each in (before, after)]
    kept = [k for k in range(len(pairs)) if k not in rows]
    for scored_, each in zip(scores, (before, after), strict=True):
        rest = without(scored_, rows)
        assert rest.losses == rest.scores["choice"] == [each[k] for k in kept]
        assert len(rest.choices) == len(kept)


# ------------------------------------------------------------------------------------------------ of a run


@pytest.fixture(scope="module")
def measured(tmp_path_factory, model_folder, data_file) -> Path:
    """A run with 12 evaluated rows."""
    folder = tmp_path_factory.mktemp("verdict")
    changes = {"cohort": "cohort = 4", "examples": "every = 1\nexamples = 12", "max_new_tokens": "max_new_tokens = 8"}
    text = recipe_text(model_folder, data_file, **changes)
    (folder / "recipe.toml").write_text(text)
    start(load_recipe(folder / "recipe.toml"), folder / "run")
    return folder / "run"


@pytest.fixture
def store(measured, tmp_path) -> Store:
    return Store(Path(shutil.copytree(measured, tmp_path / "run")))


def rescored(store: Store, **losses: Any) -> None:
    """Other losses of evaluations: round_N = the losses."""
    known = store.evaluations()
    for name, values in losses.items():
        done = int(name.removeprefix("round_"))
        store.evaluated(done, asdict(Evaluation(list(values), answers=known[done]["answers"])))


def test_terminal_report_and_json_say_the_same(store):
    rescored(store, round_0=BASE[:12], round_3=BASE[:12] - 0.5 + NOISE[:12])
    store.remember(NOTES, ["a.csv: 3 rows", "warning: 2 of 9 rows are long"])
    verdict = RunVerdict.of(store)
    assert (verdict.kind, verdict.warnings) == ("better", ["2 of 9 rows are long"])
    lines = fedkseed("rounds", store.directory).output.strip().splitlines()
    assert lines[-2:] == ["warning: 2 of 9 rows are long", verdict.text]
    assert documented("rounds", store.directory)["verdict"] == asdict(verdict)
    assert json.dumps(verdict.text, ensure_ascii=True) in page([store.directory])
    ended = fedkseed("resume", store.directory)
    assert (ended.exit_code, ended.output.strip().splitlines()[-1]) == (0, verdict.text)
    assert documented("resume", store.directory)["verdict"]["text"] == verdict.text


def test_training_rows_among_the_held_out_rows_do_not_count(store):
    learned = BASE[:12] + NOISE[:12] / 10
    learned[[3, 5]] -= 3  # by heart
    rescored(store, round_0=BASE[:12], round_3=learned)
    assert RunVerdict.of(store).kind == "unresolved"
    holdings = store.recall("clients")
    assert holdings["repeated"] == {"": []}
    store.remember("clients", holdings | {"repeated": {"": [3, 5]}})
    text = RunVerdict.of(store).text
    assert "on 10 held-out rows (2 more are also training rows, and don't count)" in text
    assert f"{BASE[:12][[0, 1, 2, 4, *range(6, 12)]].mean():.4f} → " in text
    store.remember("clients", holdings | {"repeated": {"": [3, 5, 7]}})
    assert RunVerdict.of(store).text.startswith("Can't say: 9 held-out rows (3 more are also training rows")


def test_unfinished_runs_are_judged_by_what_is_there(store):
    rescored(store, round_0=BASE[:12], round_1=BASE[:12] - 0.5 + NOISE[:12])
    store.rollback(1)
    assert RunVerdict.of(store).text.startswith("After 1 of 3 rounds: Better: held-out loss")
    store.rollback(0)
    assert RunVerdict.of(store).text == "After 0 of 3 rounds: Can't say: no round is evaluated yet"


def test_a_run_that_diverged_says_so_first(store):
    rescored(store, round_0=BASE[:12], round_2=BASE[:12] + 5, round_3=BASE[:12] + 6)
    verdict = RunVerdict.of(store)
    assert verdict.kind == "diverged"
    assert verdict.text.startswith("Diverged: after 3 rounds the held-out loss is ")
    assert "the model after 3 rounds is kept" in verdict.text
    store.remember(STOPPED, "the run diverged")
    store.remember(DIVERGED, 0)
    assert "the base model is kept. Next: find a smaller lr: fedkseed tune " in RunVerdict.of(store).text
    rescored(store, round_1=BASE[:12] - 0.5 + NOISE[:12])
    store.remember(DIVERGED, 1)
    verdict = RunVerdict.of(store)
    assert (verdict.kind, verdict.text[:7]) == ("better", "Better:")
    assert "Later the run diverged: after 3 rounds" in verdict.text


def test_clients_that_lost_or_never_came_are_named(store):
    gains = [Gain(name, 20, {}, {}, {"loss": Estimate(mean, 0.1)}) for name, mean in (("hr", -1), ("it", 1))]
    store.remember(GAINS, [asdict(gain) for gain in gains])
    assert RunVerdict.of(store).warnings == ["1 of 2 clients lost by it, on rows of their own: it"]
    holdings = store.recall("clients")
    store.remember("clients", holdings | {"names": ["hr", "it", "legal", "sales"]})
    assert len(RunVerdict.of(store).warnings) == 1  # all four took part


def test_a_server_without_rows_or_names_says_what_it_knows(store):
    """Its clients are numbers, one of four never came, and the gains are those that clients have sent."""
    with store.transaction() as database:
        database.execute("DELETE FROM evaluations")
        database.execute("DELETE FROM facts WHERE name = 'clients'")
    assert RunVerdict.of(store).text.startswith("Can't say: there are no held-out rows here; score it on rows that no ")
    store.remember("identity", (store.recall("identity") or {}) | {"a number of clients of": "5"})
    recipe = store.recipe.read_text().replace("cohort = 4", "cohort = 5").replace("count = 4", "count = 5")
    store.change_recipe(recipe)
    assert RunVerdict.of(store).warnings == ["1 of 5 clients took part in no round: client 4"]
    gains = [Gain(name, 20, {}, {}, {"loss": Estimate(-1.5, 0.1)}) for name in ("client 0", "client 1")]
    store.remember(GAINS, [asdict(gain) for gain in gains])
    verdict = RunVerdict.of(store)
    assert (verdict.kind, verdict.text) == (
        "better", "Better: of 2 clients 2 gained and 0 lost, by the loss on rows of their own"
    )  # fmt: skip
    (run,) = json.loads(page([store.directory]).split('id="data">')[1].split("</script>")[0])["runs"]
    assert run["clients"] == {"names": [], "taken": [3, 3, 3, 3, 0]}
