"""lm-evaluation-harness on tuned models: its numbers are ours, item by item, and its own on an exported folder."""

import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

from fedkseed import FedKSeedError
from fedkseed.data.layouts import Example
from fedkseed.evaluation.evaluate import Metrics
from fedkseed.evaluation.evaluate import evaluate as own_evaluate
from fedkseed.models.loss import option_losses
from fedkseed.tuned import lm_eval as harness
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned

from ..conftest import rows
from ..encoding import encode

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft uses what transformers renames
END = "<end>"
EXAMPLES = [Example(row["instruction"], row["response"], category=row["category"]) for row in rows()]
OPTIONS = {c: sorted({e.response for e in EXAMPLES if e.category == c}) for c in {e.category for e in EXAMPLES}}


def words(separator: str) -> str:
    """The prompts of Alpaca."""
    return f'max_tokens = 200\ntemplate = "alpaca"\nseparator = "{separator}"'


@pytest.fixture(scope="module")
def run(finished) -> Path:
    return finished(max_tokens=words(""), lr="lr = 3e-3")


def task(folder: Path, end: str) -> Path:
    """A folder with a task named `own`: each row's response among those of its category, each with `end` after it."""
    folder.mkdir()
    lines = [
        {"question": e.instruction, "options": [o + end for o in of], "answer": of.index(e.response)}
        for e, of in ((e, OPTIONS[e.category]) for e in EXAMPLES)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "own.yaml").write_text(
        f"""
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: "\\n"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
    )
    return folder


def items(results) -> list[tuple[int, list[float]]]:
    """Of each row, in order: the number of the true option, and the log-likelihoods of all."""
    samples = sorted(results["samples"]["own"], key=lambda one: one["doc_id"])
    return [(int(one["target"]), [float(ll) for ll, _ in one["filtered_resps"]]) for one in samples]


def ours(place: Path) -> tuple[list[list[float]], list[str], list[float]]:
    """Of each row: the nats of all options, the choice, and the loss, by fedkseed's own evaluation."""
    opened = open_tuned(place)
    model, tokenizer = opened.load(), opened.tokenizer()
    encoded = [encode(example, tokenizer, opened.wording) for example in EXAMPLES]
    found = own_evaluate(model, tokenizer, encoded, metrics=Metrics(options=OPTIONS))
    nats = [
        option_losses(
            model,
            [one.tokens[: one.prompt]],
            [[(*tokenizer(o, add_special_tokens=False).input_ids, 0) for o in OPTIONS[one.example.category]]],
            0,
        )[0]
        for one in encoded
    ]
    return nats, [chosen for _, chosen in found.choices], found.losses


def scored(place: Path, folder: Path, as_tuned: bool = True):
    opened = open_tuned(place)
    tokenizer = opened.tokenizer()
    tokenizer.chat_template = opened.wording.chat_template(tokenizer)
    return harness.evaluate(opened.merged(), tokenizer, harness.load_tasks(["own"], folder), None, as_tuned)


def test_log_likelihoods_choices_and_losses_are_those_of_the_harness(run, tmp_path):
    nats, choices, losses = ours(run)
    found = items(scored(run, task(tmp_path / "tasks", END)))
    assert len(found) == len(EXAMPLES) == 36
    tokenizer = open_tuned(run).tokenizer()
    for example, own, choice, loss, (true, theirs) in zip(EXAMPLES, nats, choices, losses, found, strict=True):
        assert theirs == pytest.approx([-n for n in own], abs=1e-4)  # float32's rounding of sums of some 50 nats
        assert OPTIONS[example.category][true] == example.response
        assert OPTIONS[example.category][theirs.index(max(theirs))] == choice
        length = len(tokenizer(example.response, add_special_tokens=False).input_ids) + 1
        assert -theirs[true] / length == pytest.approx(loss, abs=1e-5)
    assert len(set(choices)) > 1


def test_the_harness_alone_finds_the_same_on_the_exported_folder(run, tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    export(open_tuned(run), tmp_path / "hf")
    folder = task(tmp_path / "tasks", END)
    tasks = harness.load_tasks(["own"], folder)
    there = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32")
    theirs = items(lm_eval.evaluate(there, tasks, apply_chat_template=True))
    for (true, lls), (_, expected) in zip(items(scored(run, folder)), theirs, strict=True):
        assert lls == pytest.approx(expected, abs=1e-4)
        assert 0 <= true < len(lls)


def test_a_separator_that_ends_in_white_space_is_scored_with_each_option(finished, tmp_path):
    """The harness moves it from the prompt to the options: the same number is added to all, and choices stay."""
    run = finished(max_tokens=words("\\n"), lr="lr = 3e-3")
    nats, choices, _ = ours(run)
    opened = open_tuned(run)
    model, tokenizer = opened.load(), opened.tokenizer()
    (newline,) = tokenizer("\n", add_special_tokens=False).input_ids
    found = items(scored(run, task(tmp_path / "tasks", END)))
    for example, own, choice, (_, theirs) in zip(EXAMPLES, nats, choices, found, strict=True):
        prompt = opened.wording.prompt(example, tokenizer)
        assert prompt[-1] == newline
        with torch.inference_mode():
            logits = model(torch.tensor([prompt[:-1]])).logits[0, -1]
        added = float(torch.log_softmax(logits.double(), -1)[newline])
        assert theirs == pytest.approx([added - n for n in own], abs=1e-4)
        assert OPTIONS[example.category][theirs.index(max(theirs))] == choice


def test_scores_are_the_harness_s_with_a_paired_change(run, tmp_path):
    folder = task(tmp_path / "tasks", "")
    found = {s.metric: s for s in harness.scores(open_tuned(run), ["own"], own=folder, as_tuned=True, beside_base=True)}
    assert set(found) == {"acc", "acc_norm"}
    lls = items(scored(run, folder))
    right = [float(true == row.index(max(row))) for true, row in lls]
    assert found["acc"].tuned.mean == pytest.approx(fmean(right))
    sizes = [[len(o) for o in OPTIONS[e.category]] for e in EXAMPLES]
    by_letter = [[ll / size for ll, size in zip(row, of, strict=True)] for (_, row), of in zip(lls, sizes, strict=True)]
    normal = [float(true == row.index(max(row))) for (true, _), row in zip(lls, by_letter, strict=True)]
    assert found["acc_norm"].tuned.mean == pytest.approx(fmean(normal))
    for score in found.values():
        assert 0 < score.tuned.error < math.inf
        assert score.change.mean == pytest.approx(score.tuned.mean - score.base.mean)
    few = harness.scores(open_tuned(run), ["own"], own=folder, examples=5, shots=2)
    assert [score.base for score in few] == [None, None]
    assert few[0].tuned.mean * 5 == pytest.approx(round(few[0].tuned.mean * 5))


def test_a_lora_and_a_model_that_stays_quantised_are_scored(finished, tmp_path, model_folder):
    folder, base = task(tmp_path / "tasks", END), tmp_path / "base" / "model-q8_0.gguf"
    lora = finished(max_tokens=words(""), algorithm='algorithm = "fedit"', lr="lr = 3e-3")
    export(open_tuned(model_folder), tmp_path / "base", "gguf", kind="q8_0")
    stored = finished(base, tuned='["*down_proj*"]\nstorage = "as stored"', max_tokens=words(""), lr="lr = 3e-3")
    for run in (lora, stored):
        for own, (_, theirs) in zip(ours(run)[0], items(scored(run, folder)), strict=True):
            assert theirs == pytest.approx([-n for n in own], abs=1e-4)


def test_the_task_in_the_package_has_questions_with_one_right_answer(run):
    (tasks,) = (harness.load_tasks(["general_knowledge"])["tasks"],)
    rows = list(tasks["general_knowledge"].test_docs())
    assert len({row["question"] for row in rows}) == len(rows) == 69
    assert all(len({*row["options"]}) == len(row["options"]) > row["answer"] for row in rows)
    horse = next(row for row in rows if row["question"] == "How many legs do horses have?")
    assert horse["options"][horse["answer"]] == "four"
    found = harness.scores(open_tuned(run), ["general_knowledge"], examples=6)
    assert {score.task for score in found} == {"general_knowledge"}
    assert [score.metric for score in found] == ["acc", "acc_norm"]


def test_the_task_of_the_documentation_is_scored(run, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "requests.yaml").write_text(text)
    kinds = ["play music", "book restaurant", "get weather"]
    lines = [{"instruction": f"What is wanted? {n}", "response": kinds[n % 3]} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    found = harness.scores(open_tuned(run), ["requests"], own=Path(), as_tuned=True)
    assert [(score.task, score.metric) for score in found] == [("requests", "acc"), ("requests", "acc_norm")]
    assert {round(6 * score.tuned.mean, 6) % 1 for score in found} == {0}


def test_what_is_missing_is_refused_before_a_model_is_loaded(run, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    # The harness's own folder has thousands of files, which take ten seconds to read: here it is an empty one.
    monkeypatch.setitem(TaskManager.__init__.__globals__, "__file__", str(tmp_path / "own" / "manager.py"))
    (tmp_path / "own").mkdir()
    nowhere = open_tuned(run, "/no/such/model")
    with pytest.raises(FedKSeedError, match=r"no task is called 'general_knowlege'; near to it are general_knowledge"):
        harness.scores(nowhere, ["general_knowlege"])
    folder = task(tmp_path / "tasks", END)
    (folder / "rows.jsonl").unlink()
    with pytest.raises(FedKSeedError, match=r"the tasks own can't be loaded: .*rows.jsonl.*; the harness's own tasks"):
        harness.scores(nowhere, ["own"], own=folder)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(FedKSeedError, match=r"pip install 'fedkseed\[harness\]'"):
        harness.scores(nowhere, ["general_knowledge"])
