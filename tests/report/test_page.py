"""The report: its numbers are the store's, hostile texts stay texts, and a real browser shows all of it."""

import json
import math
import re
import shutil
from dataclasses import asdict, replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from tomllib import loads

import numpy as np
import pytest

from fedkseed.evaluation.statistics import (
    Confusion,
    Estimate,
    Evaluation,
    Gain,
    McNemar,
    balanced_accuracy,
    paired_change,
)
from fedkseed.recipe.reading import load_recipe
from fedkseed.report import page as report
from fedkseed.round import Report
from fedkseed.run.round_metrics import METRICS, Metric
from fedkseed.run.start_and_resume import start
from fedkseed.run.store import GAINS, NOTES, Store
from fedkseed.strategies.kseed import State, importance

from ..commands import fedkseed, refused
from ..conftest import recipe_text, rows
from .browser import Browser

HOSTILE = ["<script>document.title = 'broken into'</script>", "</script><img src=x onerror=alert(1)>", "capital"]
LEARNING = ["Held-out loss", "Change of held-out loss", "Local loss", "Rouge-L"]
TRAFFIC = ["A client's messages", "Sent in all", "Time of a round"]
DIRECTIONS = ["Probabilities", "Draws", "Size of a scalar gradient", "Coefficients"]
CLIENTS = ["Examples", "Participation"]
FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"


def write(path: Path, made: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))


def make(folder: Path, text: str, name: str) -> Path:
    (folder / "recipe.toml").write_text(text)
    start(load_recipe(folder / "recipe.toml"), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def plain(tmp_path_factory, model_folder, data_file) -> Path:
    text = recipe_text(model_folder, data_file, examples="every = 1\nexamples = 8")
    return make(tmp_path_factory.mktemp("report"), text, "plain")


@pytest.fixture(scope="module")
def pro(tmp_path_factory, model_folder, data_file) -> Path:
    changes = {"algorithm": 'algorithm = "fedkseed-pro"', "rounds": "rounds = 4", "examples": "every = 2\nexamples = 8"}
    return make(tmp_path_factory.mktemp("report"), recipe_text(model_folder, data_file, **changes), "pro")


@pytest.fixture(scope="module")
def late(tmp_path_factory, model_folder, data_file) -> Path:
    """A run with asynchronous rounds."""
    changes = {"cohort": "cohort = 2\nslow_share = 0.5\nslow_factor = 2.0", "examples": "every = 1\nexamples = 8"}
    text = recipe_text(model_folder, data_file, **changes) + "[asynchronous]\nbuffer = 1\nconcurrency = 3\n"
    return make(tmp_path_factory.mktemp("report"), text, "late")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, model_folder) -> Path:
    """A run whose categories and name look like HTML."""
    folder = tmp_path_factory.mktemp("report")
    names = dict(zip(("colour", "number", "capital"), HOSTILE, strict=True))
    write(folder / "rows.jsonl", [row | {"category": names[row["category"]]} for row in rows()])
    return make(folder, recipe_text(model_folder, folder / "rows.jsonl"), '<i>"run"&')


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, model_folder, data_file) -> Path:
    text = recipe_text(model_folder, data_file, algorithm='algorithm = "fedavg"')
    return make(tmp_path_factory.mktemp("report"), text, "averaged")


@pytest.fixture(scope="module")
def choosing(tmp_path_factory, model_folder) -> Path:
    """A run that measures choices among labels that look like HTML."""
    folder = tmp_path_factory.mktemp("report")
    write(folder / "rows.jsonl", [row | {"response": f"<b>{k % 3}</b>"} for k, row in enumerate(rows())])
    names = 'every = 2\nexamples = 8\nmetrics = ["choice", "rouge", "exact match"]'
    return make(folder, recipe_text(model_folder, folder / "rows.jsonl", examples=names), "choosing")


@pytest.fixture(scope="module")
def early(tmp_path_factory, model_folder, data_file) -> Path:
    """A run with a further set that ends early, with a model that is not its last."""
    folder = tmp_path_factory.mktemp("report")
    sizes = [{"instruction": f"How large is number {k}?", "response": ("Small.", "Large.")[k % 2]} for k in range(6)]
    write(folder / "sizes.jsonl", sizes)
    changes = {
        "count": "count = 2", "alpha": 'split = "even"', "lr": "lr = 2e-3", "rounds": "rounds = 6",
        "examples": 'every = 1\nexamples = 10\nvalidation = 0.4\nbest = "loss"\npatience = 2\nmetrics = ["choice"]',
    }  # fmt: skip
    sets = f'[[evaluation.sets]]\nname = "<b>sizes"\npath = "{folder}/sizes.jsonl"\n'
    sets += '[[evaluation.sets]]\nname = "legs"\nheld_out = "number"\n'
    return make(folder, recipe_text(model_folder, data_file, **changes) + sets, "early")


@pytest.fixture(scope="module")
def departments(tmp_path_factory, model_folder) -> Path:
    """A run whose clients have names and keep rows back, one of them a single row."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "parts").mkdir()
    for name, count in (("<i>hr", 30), ("it", 5)):
        write(folder / "parts" / f"{name}.jsonl", rows()[:count])
    changes = {
        "count": 'split = "files"', "held_out": "held_out = 0.2", "examples": "examples = 4\nclients = 0.25",
        "alpha": "", "rounds": "rounds = 2",
    }  # fmt: skip
    return make(folder, recipe_text(model_folder, folder / "parts", **changes), "departments")


@pytest.fixture
def unfinished(plain, tmp_path) -> Path:
    copy = Path(shutil.copytree(plain, tmp_path / "stopped"))
    Store(copy).rollback(1)
    return copy


@pytest.fixture
def empty(plain, tmp_path) -> Path:
    """A run that was killed before anything was done."""
    with Store.create(tmp_path / "empty", (plain / "recipe.toml").read_text()) as store:
        return store.directory


@pytest.fixture(scope="module")
def large(tmp_path_factory, plain) -> Path:
    """738 clients with ten categories, and 4096 directions."""
    rng = np.random.default_rng(0)
    text = (plain / "recipe.toml").read_text()
    state = State(1, rng.normal(size=4096) * 1e-4, rng.gamma(3, 1, 4096), rng.poisson(3, 4096))
    done = Report(0, tuple(range(37)), 17_000, 700, 37 * 17_700, float("nan"), 2, 1.5, 3.0)
    categories = [{f"kind {k}": int(n) for k, n in enumerate(rng.integers(1, 9, 10))} for _ in range(738)]
    with Store.create(tmp_path_factory.mktemp("report") / "large", text) as store:
        store.commit(replace(state, round=0), None)
        store.commit(state, done)
        known = {"examples": [sum(c.values()) for c in categories], "categories": categories}
        store.remember("clients", known | {"too_long": 0, "held_out": 8})
        return store.directory


class Blocks(HTMLParser):
    """The scripts of a page, as a browser would cut them out: attributes, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data


def embedded(text: str) -> dict:
    return json.loads(next(text for attributes, text in Blocks(text).scripts if attributes.get("id") == "data"))


# ------------------------------------------------------------------------------------------------ the numbers


def test_rounds_and_totals_are_those_of_the_store(plain):
    (run,), reports = embedded(report.page([plain]))["runs"], Store(plain).reports()
    for shown, kept in zip(run["rounds"], reports, strict=True):
        assert kept.items() <= shown.items()
    assert [r["done"] for r in run["rounds"]] == [1, 2, 3]
    assert [r["bytes"] for r in run["rounds"]] == np.cumsum([r["bytes_total"] for r in reports]).tolist()
    np.testing.assert_allclose([r["seconds_total"] for r in run["rounds"]], np.cumsum([r["seconds"] for r in reports]))


def test_scores_and_paired_changes_are_those_of_the_store(plain):
    (run,), known = embedded(report.page([plain]))["runs"], Store(plain).evaluations()
    evaluations = run["evaluations"]
    assert [e["done"] for e in evaluations] == list(known) == [0, 1, 2, 3]
    for shown, kept in zip(evaluations, known.values(), strict=True):
        assert shown["loss"]["mean"] == pytest.approx(np.mean(kept["losses"]))
        assert shown["loss"]["error"] == pytest.approx(np.std(kept["losses"], ddof=1) / np.sqrt(8))
        assert (shown["rouge"] is None) == (not kept["rouge"])
    last = asdict(paired_change(known[0]["losses"], known[3]["losses"]))
    assert (evaluations[0]["loss_change"], evaluations[3]["loss_change"]) == (None, last)
    assert (evaluations[3]["answers"], evaluations[3]["bytes"]) == (2, run["rounds"][-1]["bytes"])
    assert {e["examples"] for e in evaluations} == {8}
    assert [e["clock"] for e in evaluations] == [0, 3, 6, 9]  # three local steps a round


def test_metrics_and_choices_are_those_of_the_store(choosing):
    data = embedded(report.page([choosing]))
    titles = {"choice": "choice accuracy", "exact match": "exact match"}
    assert data["scores"] == [{"name": name, "title": title, "good": 1} for name, title in titles.items()]
    known = {done: Evaluation(**found) for done, found in Store(choosing).evaluations().items()}
    (run,) = data["runs"]
    assert [sorted(e["others"]) for e in run["evaluations"]] == [
        ["choice", "exact match"], ["choice"], ["choice", "exact match"]
    ]  # fmt: skip
    for shown, (done, kept) in zip(run["evaluations"], known.items(), strict=True):
        assert shown["others"]["choice"]["mean"]["mean"] == np.mean(kept.scores["choice"])
        assert shown["others"]["choice"]["count"] == "8 examples"
        choices, matrix = shown["others"]["choice"]["choices"], Confusion.of(kept.choices)
        assert matrix is not None
        assert choices["confusion"] == asdict(matrix)
        assert choices["balanced"] == balanced_accuracy(kept.choices)
        test = McNemar.of(known[0].scores["choice"], kept.scores["choice"])
        assert choices["test"] == ({"gained": test.gained, "lost": test.lost, "p": test.p} if done else None)
        assert shown["written"] == kept.answers
    assert [len(e["written"]) for e in run["evaluations"]] == [2, 0, 2]  # an evaluation between rounds writes none
    last = asdict(paired_change(known[0].scores["choice"], known[3].scores["choice"]))
    assert [run["evaluations"][k]["others"]["choice"]["change"] for k in (0, 2)] == [None, last]


def test_directions_are_those_of_the_latest_state(plain):
    (run,), state = embedded(report.page([plain]))["runs"], Store(plain).state(State)
    assert state is not None
    np.testing.assert_allclose(run["directions"]["probabilities"], importance(state), rtol=1e-5)
    np.testing.assert_allclose(run["directions"]["coefficients"], state.coefficients, rtol=1e-5)
    assert run["directions"]["counts"] == state.counts.tolist()


def test_clients_and_who_took_part_are_those_of_the_store(plain):
    (run,), store = embedded(report.page([plain]))["runs"], Store(plain)
    taken = run["clients"].pop("taken")
    assert run["clients"] == store.recall("clients")
    assert taken == [sum(client in r["clients"] for r in store.reports()) for client in range(4)]


def test_several_runs_are_compared_on_the_same_examples(plain, pro):
    data = embedded(report.page([plain, pro]))
    assert [run["name"] for run in data["runs"]] == ["plain", "pro"]
    first, second = (Store(run).evaluations() for run in (plain, pro))
    change = paired_change(first[3]["losses"], second[4]["losses"])
    assert [run["against_first"] for run in data["runs"]] == [None, asdict(change)]
    assert data["differences"] == {
        "training.algorithm": ["fedkseed", "fedkseed-pro"],
        "training.rounds": [3, 4],
        "evaluation.every": [1, 2],
    }


def test_runs_on_other_data_are_not_compared_example_by_example(plain, hostile):
    assert embedded(report.page([plain, hostile]))["runs"][1]["against_first"] is None


def test_runs_of_one_name_are_told_apart_by_their_paths(plain, tmp_path):
    other = Path(shutil.copytree(plain, tmp_path / "plain"))
    names = [run["name"] for run in embedded(report.page([plain, other]))["runs"]]
    assert names == [str(plain), str(other)]


def test_an_unfinished_run_shows_what_is_there(unfinished, empty):
    one, none = embedded(report.page([unfinished, empty]))["runs"]
    assert (len(one["rounds"]), one["planned"], [e["done"] for e in one["evaluations"]]) == (1, 3, [0, 1])
    assert (none["rounds"], none["evaluations"], none["directions"], none["clients"]) == ([], [], None, None)
    assert none["verdict"]["text"].startswith("After 0 of 3 rounds: Can't say")


def test_a_loss_that_is_not_finite_is_null(large, plain):
    assert embedded(report.page([large]))["runs"][0]["rounds"][0]["loss"] is None
    assert report.finite({"a": [float("nan"), (float("inf"), 1.0)]}) == {"a": [None, [None, 1.0]]}


def test_an_algorithm_without_coefficients_has_no_directions(averaged):
    (run,) = embedded(report.page([averaged]))["runs"]
    assert run["directions"] is None
    assert [r["scalar"] for r in run["rounds"]] == [None] * 3


def test_hostile_texts_do_not_end_the_data_block(hostile):
    text = report.page([hostile])
    assert [attributes.get("id") for attributes, _ in Blocks(text).scripts] == ["data", None]
    assert "<title>&lt;i&gt;&quot;run&quot;&amp; – fedkseed report</title>" in text
    (run,) = embedded(text)["runs"]
    assert {name for counts in run["clients"]["categories"] for name in counts} == set(HOSTILE[:2])


def test_no_asset_names_an_address():
    for asset in (files("fedkseed.report") / "assets").iterdir():
        text = asset.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\"'\s]+", text))
        assert addresses <= {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}  # names, not addresses
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|@import|url\(", text)


def test_the_command_writes_the_page_and_refuses_what_is_no_run(plain, pro, tmp_path):
    result = fedkseed("report", plain, pro, "-o", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "r.html").read_text() == report.page([plain, pro])
    line = refused("report", plain, tmp_path / "none", "-o", tmp_path / "no.html")
    assert "is not a run's directory" in line
    assert not (tmp_path / "no.html").exists()
    assert "name the file to write, as report.html" in refused("report", plain, "-o", ".")


def test_what_clients_have_sent_is_their_gain(plain, tmp_path):
    copy = Store(Path(shutil.copytree(plain, tmp_path / "served")))
    assert report.account(copy, "served", copy)["gains"] == []
    sent = Gain("client 1", 20, {}, {}, {"loss": Estimate(-0.25, math.inf)})
    copy.remember(GAINS, [asdict(sent)])
    (shown,) = embedded(report.page([copy.directory]))["runs"][0]["gains"]
    assert shown == asdict(sent) | {"verdict": "unclear", "change": {"loss": {"mean": -0.25, "error": None}}}


# ------------------------------------------------------------------------------------------------ in a browser


@pytest.fixture
def show(chromium, tmp_path):
    """Open the page about some runs; it must be silent and ask for nothing but itself."""

    def opened(*runs: Path, **window) -> Browser:
        page = tmp_path / "report.html"
        report.write_report(runs, page)
        chromium.open(page, **window)
        return chromium

    yield opened
    assert chromium.complaints == []
    assert chromium.requests == [(tmp_path / "report.html").as_uri()]


def marks(page: Browser) -> dict[str, int]:
    """Titles of the charts -> how many curves, bands, columns and marks with a real shape they have."""
    return page.run("""Object.fromEntries([...document.querySelectorAll('figure')].map(figure => [
        figure.querySelector('h3').textContent,
        [...figure.querySelectorAll('.plot path')].filter(path => path.getTotalLength() > 0).length]))""")


def cells(page: Browser, section: str) -> list[list[str]]:
    """The texts of a section's tables, row by row."""
    return page.run(f"""[...document.querySelectorAll('#{section} tr')].map(
        row => [...row.children].map(cell => cell.textContent))""")


def turned(page: Browser, kind: str) -> str:
    """The label of the curves' axis once they turn to another, with something in every chart."""
    page.run(f"document.querySelector('input[value={kind}]').click()")
    page.run(FRAMES)
    assert min(marks(page).values()) >= 1
    return page.run("document.querySelector('#learning .label').textContent")


def test_the_page_of_one_run_has_every_chart(show, plain):
    drawn = marks(show(plain))
    assert list(drawn) == [*LEARNING, *TRAFFIC, *DIRECTIONS, *CLIENTS]
    assert min(drawn.values()) >= 1
    assert drawn["Held-out loss"] == 1 + 1 + 4  # band, curve, a mark an evaluation
    assert drawn["A client's messages"] == 2


def test_further_sets_have_tiles_curves_and_tables_and_the_tuned_model_is_that_of_the_best_round(show, early):
    one = report.account(Store(early), "early", Store(early))
    assert 0 < one["best"] < len(one["rounds"]) < one["planned"]
    page, shown = show(early), one["evaluations"][one["best"]]
    assert page.run("document.querySelector('.notice').innerText") == one["stopped"]
    tiles = re.sub(r"\n+", "\n", page.run("document.querySelector('.tiles').innerText"))
    assert f"Held-out loss\n{shown['loss'].mean:.4f}" in tiles
    assert f"the tuned model: after {one['best']} round" in tiles
    for name in ("<b>sizes: loss", "legs: loss", "validation: loss"):
        mean, change = (shown["others"][name][key] for key in ("mean", "change"))
        word = ("better" if change.mean < 0 else "worse") if abs(change.mean) > 2 * change.error else "unclear"
        title = name.replace(": loss", ": held-out loss")
        tile = rf"{title}\n{mean.mean:.4f}\n[+−-]{abs(change.mean):.4f} ± {change.error:.4f}\s+{word}"
        assert re.search(tile, tiles), (tile, tiles)
        assert title in marks(page)
    captions = page.run("[...document.querySelectorAll('#choices caption')].map(c => c.textContent)")
    assert [caption.split("true response")[0] for caption in captions] == ["", "validation, ", "<b>sizes, ", "legs, "]
    assert page.run("document.querySelectorAll('#page b').length") == 0  # the name of a set is text


def test_each_client_has_a_row_with_its_name(show, departments, plain):
    gains = report.gains_of(Store(departments))
    assert [(one.client, one.rows) for one in gains][1] == ("it", 1)
    page = show(departments)
    head, *shown = cells(page, "each-client")
    assert head == ["client", "rows", "loss before", "loss after", "change of the loss", "Rouge-L"]
    for one, row in zip(gains, shown, strict=True):
        assert row[:4] == [one.client, str(one.rows), f"{one.before['loss']:.4f}", f"{one.after['loss']:.4f}"]
        assert f"{abs(one.change['loss'].mean):.4f}" in row[4]
        assert ("±" in row[4]) == (one.rows > 1)
    assert page.run("document.querySelectorAll('#page i').length") == 0  # a name is text
    took = page.run("[...document.querySelectorAll('#rounds tbody tr')].map(r => r.lastElementChild.innerText)")
    assert took[1:] == ["<i>hr, it"] * 2
    both = show(departments, plain)
    assert both.run("document.querySelectorAll('#each-client table').length") == 1
    assert both.run("document.querySelector('#each-client caption').innerText") == "departments"


def test_answers_of_the_base_and_the_tuned_model_stand_beside_each_request(show, plain):
    head, *shown = cells(show(plain), "answers")
    assert head == ["request", "right answer", "base model", "after 3 rounds"]
    known = Store(plain).evaluations()
    assert len(shown) == len(known[3]["answers"]) > 0
    for row, before, after in zip(shown, known[0]["answers"], known[3]["answers"], strict=True):
        assert row == [*before[:2], *(one[2] or "(nothing)" for one in (before, after))]


def test_choices_have_a_tile_a_curve_and_a_table(show, choosing, plain):
    page = show(choosing)
    kept = Evaluation(**Store(choosing).evaluations()[3])
    assert list(marks(page))[:6] == [*LEARNING, "Choice accuracy", "Exact match"]
    tiles = page.run("document.querySelector('.tiles').innerText")
    assert f"Choice accuracy\n{np.mean(kept.scores['choice']):.4f}" in re.sub(r"\n+", "\n", tiles)
    assert "McNemar's p = " in tiles
    matrix = Confusion.of(kept.choices)
    assert matrix is not None
    expected = [[label, *map(str, counts)] for label, counts in zip(matrix.labels, matrix.counts, strict=True)]
    assert cells(page, "choices") == [["true response", *matrix.labels], *expected]
    head = "[...document.querySelectorAll('#rounds thead th')].map(c => c.textContent)"
    assert page.run(head)[:5] == ["", "held-out loss", "Rouge-L", "choice accuracy", "exact match"]
    assert page.run("document.querySelectorAll('#page b').length") == 0  # labels are texts
    both = show(choosing, plain)
    assert "choice accuracy" in both.run("document.querySelector('header table').innerText")
    assert both.run("document.querySelectorAll('#choices table').length") == 1


def test_the_headline_shows_the_numbers_of_the_store(show, plain):
    known, reports = Store(plain).evaluations(), Store(plain).reports()
    text = show(plain).run("document.querySelector('.tiles').innerText").replace("\N{MINUS SIGN}", "-")
    change = paired_change(known[0]["losses"], known[3]["losses"])
    assert f"{np.mean(known[3]['losses']):.4f}" in text
    assert f"{change.mean:+.4f} ± {change.error:.4f}" in text
    assert f"{reports[0]['bytes_down']:,} bytes down, {reports[0]['bytes_up']:,} bytes up" in text
    assert "3 of 3" in text


def test_the_table_has_a_row_a_round(show, plain):
    head, *rows = cells(show(plain), "rounds")
    assert [row[0] for row in rows] == ["base model", "round 1", "round 2", "round 3"]
    at = next(k for k, title in enumerate(head) if title.startswith("local loss"))
    assert [row[at] for row in rows[1:]] == [f"{r['loss']:.4f}" for r in Store(plain).reports()]


def test_a_metric_that_a_program_adds_is_a_column(show, plain):
    head = "[...document.querySelectorAll('#rounds thead th')].map(c => c.innerText.trim().split('\\n')[0])"
    assert "given up" not in show(plain).run(head)  # it says nothing: rounds of this run are synchronous
    METRICS.append(Metric("<b>half", "<b>half", lambda r: len(r["clients"]) / 2, "clients' halves", "{:.1f} h"))
    try:
        page = show(plain)
    finally:
        METRICS.pop()
    at = page.run(head).index("<b>half")
    cells = page.run(f"[...document.querySelectorAll('#rounds tbody tr')].map(r => r.children[{at}].innerText)")
    assert cells == ["–", "1.0 h", "1.0 h", "1.0 h"]


def test_curves_turn_to_bytes_and_seconds(show, plain):
    page = show(plain)
    for kind, label in (("bytes", "bytes sent by all clients together"), ("seconds", "seconds of training")):
        assert turned(page, kind) == label


def test_curves_turn_to_virtual_time_where_rounds_are_asynchronous(show, plain, late):
    page = show(plain, late)
    assert turned(page, "clock") == "virtual time, in local steps"
    assert show(plain).run("document.querySelector('input[value=clock]')") is None


def test_a_pointer_and_the_arrow_keys_show_values(show, plain):
    page, losses = show(plain), [np.mean(scores["losses"]) for scores in Store(plain).evaluations().values()]
    page.run("document.querySelector('.plot svg').scrollIntoView({block: 'center'})")
    page.run(FRAMES)
    box = "(r => [r.right - 15, r.top + r.height / 2])(document.querySelector('.plot svg').getBoundingClientRect())"
    x, y = page.run(box)
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = page.run("document.querySelector('.tip').innerText")
    assert "after 3 rounds" in tip
    assert f"{losses[3]:.4f} ± " in tip
    page.run("document.querySelector('.plot svg').focus()")
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft")
    assert f"{losses[2]:.4f} ± " in page.run("document.querySelector('.tip').innerText")


def test_several_runs_have_a_table_legends_and_a_curve_each(show, plain, pro):
    page = show(plain, pro)
    drawn = marks(page)
    assert list(drawn)[:11] == [*LEARNING, *TRAFFIC, *DIRECTIONS]
    assert drawn["Local loss"] == 2
    assert page.run("document.querySelectorAll('header tbody tr').length") == 2 + 3  # runs, differing keys
    legends = page.run("[...document.querySelectorAll('#learning .keys')].map(keys => keys.innerText.split('\\n'))")
    assert legends == [["plain", "pro"]] * 4


def test_hostile_texts_are_shown_as_texts(show, hostile):
    page = show(hostile)
    assert page.run("document.querySelector('h1').textContent") == '<i>"run"&'
    names = page.run("[...document.querySelectorAll('#clients .keys li')].map(li => li.textContent)")
    assert set(names) == set(HOSTILE[:2])
    assert page.run("document.querySelectorAll('img, i').length") == 0
    assert page.run("document.title") == '<i>"run"& – fedkseed report'


def test_unfinished_runs_are_shown(show, unfinished, empty):
    page = show(unfinished, empty)
    verdicts = page.run("[...document.querySelectorAll('.verdict')].map(verdict => verdict.textContent)")
    assert [text[:27] for text in verdicts] == ["stopped: After 1 of 3 round", "empty: After 0 of 3 rounds:"]
    assert min(marks(page).values()) >= 1


def test_a_run_with_nothing_done_is_shown(show, empty):
    page = show(empty)
    assert marks(page) == {}
    assert page.run("document.querySelector('.verdict.unknown').textContent").startswith("After 0 of 3 rounds")


def test_charts_that_do_not_apply_are_left_out(show, averaged, plain):
    shown = set(marks(show(averaged)))
    assert shown
    assert not {"Probabilities", "Draws", "Coefficients"} & shown
    assert min(marks(show(averaged, plain)).values()) >= 1


def test_a_large_run_is_drawn_whole(show, large):
    page = show(large)
    title = "[...document.querySelectorAll('figure')].find(f => f.querySelector('h3').textContent === '{}')"
    curve = page.run(title.format("Probabilities") + ".querySelector('.c0.line').getAttribute('d')")
    assert len(re.findall("[ML]", curve)) == 4096
    blocks = f"[...{title.format('Examples')}.querySelectorAll('.plot .block')]"
    columns = page.run(f"{blocks}.map(block => block.getAttribute('d'))")
    assert [column.count("M") for column in columns] == [738] * 9
    assert "2 other categories" in page.run("document.querySelector('#clients .keys').innerText")


def test_runs_that_send_far_more_than_others_share_a_log_scale(show, plain, large):
    page = show(plain, large)
    assert turned(page, "bytes") == "sent by all clients together, on a log scale"
    ticks = "[...document.querySelectorAll('#traffic-and-time figure:nth-child(2) .tick')].map(t => t.textContent)"
    assert {"10 kB", "100 kB"} <= set(page.run(ticks))


def test_every_table_and_text_is_whole_in_a_small_window(show, plain, pro, choosing, departments, early):
    """Tables become lists there, each cell beside its column's name; nothing has to be moved sideways."""
    for runs in ((plain, pro), (choosing,), (departments,), (early,)):
        page = show(*runs, width=390)
        page.run("document.querySelectorAll('details').forEach(node => (node.open = true))")
        assert page.run("getComputedStyle(document.querySelector('thead')).display") == "none"
        texts = page.run("""[...document.querySelectorAll('main *')].filter(node => node.clientWidth).map(node => {
            const box = node.getBoundingClientRect();
            return [box.left, box.right, node.scrollWidth - node.clientWidth, node.outerHTML.slice(0, 80)];
        })""")
        assert len(texts) > 100
        assert [text for left, right, hidden, text in texts if left < 0 or right > 390 or hidden > 0] == []
    head = "[...document.querySelectorAll('header td')].map(cell => cell.dataset.column)"
    assert set(show(plain, pro, width=390).run(head)) >= {"algorithm", "held-out loss", "Rouge-L", "time", "pro"}
    wide = show(plain, pro, width=1280)
    assert wide.run("getComputedStyle(document.querySelector('header thead')).display") == "table-header-group"
    assert wide.run("getComputedStyle(document.querySelector('header td')).display") == "table-cell"


def test_clients_are_named_in_their_charts(show, departments, plain, tmp_path):
    names = """[...document.querySelectorAll('#clients figure')].map(
        figure => [...figure.querySelectorAll('li span')].map(name => name.textContent))"""
    assert show(departments).run(names) == [["<i>hr", "it"]] * 2
    counts = show(departments).run(
        "[...document.querySelectorAll('#clients .bars strong')].map(count => count.textContent)"
    )
    assert counts == [*map(str, Store(departments).recall("clients")["examples"]), "2", "2"]
    assert show(departments).run("document.querySelectorAll('#page i').length") == 0
    store = Store(Path(shutil.copytree(plain, tmp_path / "served")))
    with store.transaction() as database:
        database.execute("DELETE FROM facts WHERE name = 'clients'")
    served = show(store.directory).run(names)  # a server knows its clients' numbers, and none of their rows
    assert served == [[f"client {k}" for k in range(1 + max(k for r in store.reports() for k in r["clients"]))]]


def test_the_verdict_stands_on_top_with_its_warnings(show, plain, tmp_path):
    store = Store(Path(shutil.copytree(plain, tmp_path / "warned")))
    store.remember(NOTES, ["a.csv: 36 rows; 2 repeated", "warning: 2 of 8 held-out rows are <b>"])
    page = show(store.directory, plain)
    shown = page.run("[...document.querySelectorAll('header p')].slice(1).map(line => line.textContent)")
    assert shown[:3] == [
        "warned: Can't say: 8 held-out rows are too few, hold out 10 or more",
        "plain: Can't say: 8 held-out rows are too few, hold out 10 or more",
        "2 of 8 held-out rows are <b>",
    ]
    assert page.run("document.querySelector('#clients .note').textContent") == "a.csv: 36 rows; 2 repeated"


def test_tiles_fill_rows_of_about_equal_length(show, choosing):
    tops = show(choosing).run("[...document.querySelectorAll('.tile')].map(t => t.getBoundingClientRect().top)")
    assert [tops.count(top) for top in sorted(set(tops))] == [4, 3]


def test_tuned_answers_have_the_widest_column(show, plain):
    page = show(plain)
    widths = page.run("[...document.querySelectorAll('#answers thead th')].map(c => c.getBoundingClientRect().width)")
    assert widths[-1] == max(widths) > 1.2 * max(widths[:-1])


def test_defaults_of_the_recipe_are_folded_away(show, plain):
    page = show(plain)
    first, every = page.run("[...document.querySelectorAll('#recipe pre')].map(text => text.textContent)")
    assert every == (plain / "recipe.toml").read_text()
    assert loads(first)["training"] == {
        "rounds": 3,
        "steps": 3,
        "batch_size": 2,
        "lr": 0.001,
        "eps": 0.001,
    }
    assert page.run("[...document.querySelectorAll('#recipe details')].map(node => node.open)") == [True, False]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(show, plain, pro, width, scheme):
    page = show(plain, pro, width=width, scheme=scheme)
    assert page.run("document.documentElement.scrollWidth") == width
    dark = page.run("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 27)"
    assert dark == (scheme == "dark")
