"""The digest of a tokenizer: it changes with what the tokenizer does, in the part that it changes, and with no more."""

import json
import shutil
from random import Random

import pytest
from transformers import AutoModelForCausalLM

from fedkseed import FedKSeedError
from fedkseed.data.encoder import Encoder
from fedkseed.data.tokenizer_digest import PART, PARTS, require_tokenizer, tokenizer_digest, with_tokenizer
from fedkseed.models.load import load_tokenizer, save_tokenizer
from fedkseed.recipe.reading import load_recipe
from fedkseed.tuned.gguf import write_gguf

from ..conftest import tiny_llama

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS, CUTS, TALK = PARTS


@pytest.fixture
def folder(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def edited(folder, name, change):
    """Change a file of a tokenizer; returns the digest before and after."""
    before, table = digest(folder), json.loads((folder / name).read_text())
    change(table)
    (folder / name).write_text(json.dumps(table))
    return before, digest(folder)


def digest(folder):
    return tokenizer_digest(load_tokenizer(str(folder)), "chat")


def unlike(one, other):
    """The parts in which two digests differ."""
    return {part for k, part in enumerate(PARTS) if one[k * PART : (k + 1) * PART] != other[k * PART : (k + 1) * PART]}


@pytest.mark.parametrize("seed", range(8))
def test_any_two_words_that_have_changed_places_change_the_vocabulary(folder, seed):
    def swap(table):
        words = table["model"]["vocab"]
        one, other = Random(seed).sample([word for word, number in words.items() if number], 2)
        words[one], words[other] = words[other], words[one]

    assert WORDS in unlike(*edited(folder, "tokenizer.json", swap))


def test_words_that_share_a_number_have_one_order(folder):
    """The library gives its vocabulary in another order each time that it is loaded."""

    def double(table):
        words = table["model"]["vocab"]
        words |= {f"{word}{number}": number for word, number in [*words.items()][300:340]}

    edited(folder, "tokenizer.json", double)
    assert len({digest(folder) for _ in range(4)}) == 1


def test_merges_that_are_missing_change_tokens_and_no_word(folder):
    def drop(table):
        del table["model"]["merges"][9:]

    differing = unlike(*edited(folder, "tokenizer.json", drop))
    assert CUTS in differing
    assert WORDS not in differing


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(normalizer={"type": "NFKC"}),
        lambda table: table["pre_tokenizer"].update(add_prefix_space=True),
        lambda table: table.update(normalizer={"type": "Lowercase"}),
        lambda table: table.update(normalizer={"type": "Strip", "strip_left": False, "strip_right": True}),
    ],
)  # fmt: skip
def test_rules_before_the_words_change_tokens_and_no_word(folder, change):
    differing = unlike(*edited(folder, "tokenizer.json", change))
    assert CUTS in differing
    assert WORDS not in differing


def test_another_end_of_text_changes_tokens(folder):
    assert CUTS in unlike(*edited(folder, "tokenizer_config.json", lambda table: table.update(eos_token="q")))


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.replace("\n{% endfor", "{% endfor"),
        TEMPLATE.replace("{{ eos_token }}", ""),
        TEMPLATE.replace("<assistant>", "<model>"),
        TEMPLATE.replace("{% for", "Be of help.{% for", 1),
        TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | trim }}"),
        TEMPLATE.replace(
            "{{ m['content'] }}",
            "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
            "{% else %}{{ m['content'] }}{% endif %}",
        ),
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE,
        None,
    ],
)  # fmt: skip
def test_another_chat_template_changes_that_part_alone(folder, template):
    before = digest(folder)
    file = folder / "chat_template.jinja"
    file.unlink() if template is None else file.write_text(template)
    assert unlike(before, digest(folder)) == {TALK}


def test_what_changes_no_text_of_a_run_changes_no_digest(folder, tmp_path):
    """Files of one tokenizer differ by the program that has saved them: tokens for padding, sides, limits, comments."""
    before = digest(folder)
    (folder / "chat_template.jinja").write_text("{# of the second release #}" + TEMPLATE)
    table = json.loads((folder / "tokenizer_config.json").read_text())
    table |= {"padding_side": "left", "model_max_length": 77, "name_or_path": "elsewhere"}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    assert digest(folder) == before
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer_digest(tokenizer, "chat") == before
    save_tokenizer(load_tokenizer(str(folder)), again := tmp_path / "again")
    shutil.copy(folder / "config.json", again)
    assert digest(again) == before


@pytest.mark.parametrize("rows", [400, 448])
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_a_model_that_becomes_a_gguf_file_keeps_its_tokenizers_digest(folder, tmp_path, rows, normalizer):
    """Also one with more rows than tokens, which the file names, and with a rule that files of this kind have not."""
    edited(folder, "tokenizer.json", lambda table: table.update(normalizer=normalizer))
    tiny_llama(rows).save_pretrained(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    write_gguf(tmp_path / "model.gguf", model, tokenizer, "f32")
    assert unlike(digest(tmp_path / "model.gguf"), tokenizer_digest(tokenizer, "chat")) == set()


def test_a_word_that_was_added_counts_and_a_special_token_that_no_text_has_does_not(folder):
    tokenizer = load_tokenizer(str(folder))
    before = tokenizer_digest(tokenizer, "chat")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_7|>"]})
    assert tokenizer_digest(tokenizer, "chat") == before
    tokenizer.add_tokens(["colour"])
    assert WORDS in unlike(before, tokenizer_digest(tokenizer, "chat"))


def test_a_wording_without_the_chat_template_has_zeros_in_its_place_and_compares_none(folder, recipe_file):
    """So that peers with other chat templates are one run, and one that is pinned first and worded later goes on."""
    tokenizer = load_tokenizer(str(folder))
    pinned = with_tokenizer(load_recipe(recipe_file), tokenizer)
    assert pinned.model.tokenizer_digest.endswith(PART * "0")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert with_tokenizer(load_recipe(recipe_file), tokenizer) == pinned
    require_tokenizer(tokenizer, pinned.model.tokenizer_digest, "chat", "m")


@pytest.mark.parametrize("template", ["{{ '\\ud800' }}", "{{ nothing.of.it }}", "x" * 70_000])
def test_a_chat_template_that_can_not_be_used_has_a_digest(folder, template):
    tokenizer = load_tokenizer(str(folder))
    before, tokenizer.chat_template = tokenizer_digest(tokenizer, "chat"), template
    assert unlike(before, tokenizer_digest(tokenizer, "chat")) == {TALK}


def test_another_tokenizer_than_a_recipes_is_refused_with_what_differs(folder, recipe_file):
    tokenizer = load_tokenizer(str(folder))
    recipe = with_tokenizer(load_recipe(recipe_file).having(data={"template": "chat"}), tokenizer)
    right = tokenizer_digest(tokenizer, "chat")
    assert recipe.model.tokenizer_digest == right
    assert with_tokenizer(recipe, tokenizer) == recipe
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(
        FedKSeedError, match=r"unlike are its chat template \(\[model\] tokenizer_digest is '[0-9a-f]{48}', "
    ):
        with_tokenizer(recipe, tokenizer)
    with pytest.raises(FedKSeedError, match=r"unlike are its chat template \("):
        Encoder.of(recipe, tokenizer)
    other = "1" * PART
    with pytest.raises(FedKSeedError, match=r"the tokenizer of m is not the run's: unlike are its vocabulary \("):
        require_tokenizer(tokenizer, other + right[PART:], "paper", "m")
    with pytest.raises(FedKSeedError, match=r"vocabulary and tokens of the same texts and chat template \("):
        require_tokenizer(tokenizer, 3 * other, "chat", "m")
    with pytest.raises(FedKSeedError, match="tokenizer_digest is ") as refusal:
        require_tokenizer(tokenizer, "\x1b" * 10**6, "chat", "m")
    assert len(str(refusal.value)) < 600
    assert "\x1b" not in str(refusal.value)
