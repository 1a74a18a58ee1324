"""A data set of the same layout as Natural Instructions, small enough to count by hand."""

import gzip
import io
import json
import os
import re
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkseed import FedKSeedError
from fedkseed.data import natural_instructions
from fedkseed.data.federated import ClientShares, share_out
from fedkseed.data.natural_instructions import MAX_FILE, Subsample, read, split_lists, subsample
from fedkseed.models.load import load_tokenizer
from fedkseed.recipe.reading import parse

TRAINING = {"small": 99, "middle": 100, "large": 250, "long": 200}
TEST = {"few": 15, "some": 300, "many": 1500}
LONG = "word " * 400  # 2,000 characters


def task(name: str, count: int) -> dict[str, Any]:
    """The last 190 inputs of the task "long" are long."""
    inputs = [f"{name} {i} {LONG if name == 'long' and i >= 10 else ''}" for i in range(count)]
    return {
        "Definition": [f"Do {name}.", "Another wording."],
        "Instances": [{"id": i, "input": text, "output": [f"answer {i}", "other"]} for i, text in enumerate(inputs)],
    }


def write(folder: Path, training: dict[str, int] = TRAINING, test: dict[str, int] = TEST) -> Path:
    (folder / "tasks").mkdir(parents=True)
    (folder / "splits/default").mkdir(parents=True)
    (folder / "splits/default/train_tasks.txt").write_text("".join(f"{name}\n" for name in training))
    (folder / "splits/default/test_tasks.txt").write_text("".join(f"{name}\n" for name in test))
    for name, count in {**training, **test, "unlisted": 200}.items():
        (folder / f"tasks/{name}.json").write_text(json.dumps(task(name, count), indent=1))
    (folder / "tasks/README.md").write_text("not a task")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("ni") / "natural-instructions")


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


def sizes(drawn: Subsample) -> tuple[dict[str, int], ...]:
    return tuple({name: len(examples) for name, examples in part.items()} for part in (drawn.clients, drawn.held_out))


def shared(
    source: Path, tokenizer: Any, clients: dict[str, Any] | None = None, seed: int = 0, **data: Any
) -> ClientShares:
    recipe = {
        "seed": seed,
        "model": {"name": "x"},
        "data": {"source": str(source), "format": "natural-instructions", "max_tokens": 500} | data,
        "clients": {"split": "tasks", "cohort": 2} | (clients or {}),
        "evaluation": {"examples": 30},
    }
    return share_out(parse(recipe), tokenizer)


def test_an_example_has_the_first_definition_the_input_and_the_first_output(folder):
    ((name, examples),) = read(str(folder), ["middle"])
    assert (name, len(examples)) == ("middle", 100)
    first = examples[0]
    assert (first.instruction, first.context, first.response) == ("Do middle.", "middle 0 ", "answer 0")
    assert first.category == "middle"


@pytest.mark.parametrize(("ending", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tar.xz", "w:xz")])
@pytest.mark.parametrize("root", [".", "natural-instructions-2.8"])
def test_an_archive_gives_what_its_folder_gives(folder, tmp_path, ending, mode, root):
    archive = tmp_path / f"data.{ending}"
    with tarfile.open(archive, mode) as file:
        for name in ("tasks", "splits"):  # as in the subset at hand: the lists come last
            file.add(folder / name, f"{root}/{name}")
    assert subsample(str(archive), 7) == subsample(str(folder), 7)


def test_the_split_lists_decide_and_give_the_order(folder):
    assert split_lists(str(folder)) == (list(TRAINING), list(TEST))
    drawn = subsample(str(folder), 0)
    assert [*drawn.clients, *drawn.held_out] == ["middle", "large", "long", "few", "some", "many"]


def test_the_papers_sizes_a_fifth_of_training_and_a_fiftieth_of_test_tasks(folder):
    """99 // 5 = 19 examples are too few for a client, however many characters they have."""
    drawn = subsample(str(folder), 0)
    assert sizes(drawn) == ({"middle": 20, "large": 50, "long": 40}, {"few": 0, "some": 6, "many": 30})
    assert drawn.too_small == ["small"]


def test_the_official_codes_sizes_count_characters_before_the_draw_and_keep_20_of_a_test_task(folder):
    """ "long" has 10 short inputs, too few; "small" has 99 >= 20, of which 99 // 5 are drawn."""
    drawn = subsample(str(folder), 0, protocol="official-code")
    assert sizes(drawn) == ({"small": 19, "middle": 20, "large": 50}, {"few": 15, "some": 20, "many": 30})
    assert drawn.too_small == ["long"]


def test_the_official_limit_of_characters_is_of_the_input_and_exclusive(folder):
    """Inputs of "middle" are "middle 0 " to "middle 99 ": ten of 9 characters, ninety of 10."""

    def clients(limit: int) -> dict[str, int]:
        drawn = subsample(str(folder), 0, protocol="official-code", max_characters=limit, least=10)
        return sizes(drawn)[0]

    assert "middle" not in clients(9)
    assert clients(10)["middle"] == 10 // 5
    assert clients(11)["middle"] == 100 // 5


def test_a_draw_is_without_repetition_and_follows_from_the_seed(folder):
    one, same, other = (subsample(str(folder), seed) for seed in (1, 1, 2))
    assert one == same
    assert one.clients["large"] != other.clients["large"]
    assert len(set(one.clients["large"])) == 50
    apart = subsample(str(folder), 2, 1)
    assert (apart.clients, apart.held_out) == (other.clients, one.held_out) != (one.clients, other.held_out)


def test_a_tasks_draw_does_not_depend_on_the_other_tasks(folder, tmp_path):
    part = write(tmp_path / "part", {"large": 250}, {"many": 1500})
    whole, alone = subsample(str(folder), 3), subsample(str(part), 3)
    assert alone.clients == {"large": whole.clients["large"]}
    assert alone.held_out == {"many": whole.held_out["many"]}


def test_each_task_is_a_client_and_test_tasks_are_held_out(folder, tokenizer):
    shares = shared(folder, tokenizer)
    assert [{e.example.category for e in part} for part in shares.clients] == [{"middle"}, {"large"}, {"long"}]
    assert {e.example.category for e in shares.held_out} == {"some", "many"}
    assert len(shares.held_out) == 30
    assert shares.too_small == 1


def test_the_paper_leaves_long_examples_out_after_it_has_chosen_the_clients(folder, tokenizer):
    shares = shared(folder, tokenizer)
    long = shares.clients[2]
    assert 0 < len(long) < 20
    assert shares.too_long == 40 - len(long)
    assert all(len(e.tokens) <= 500 for e in long)


def test_a_task_with_only_long_examples_is_no_client(tmp_path, tokenizer):
    source = write(tmp_path / "ni", {"large": 250, "middle": 100}, {"many": 1500})
    table = task("middle", 100)
    for instance in table["Instances"]:
        instance["input"] = LONG
    (source / "tasks/middle.json").write_text(json.dumps(table))
    shares = shared(source, tokenizer, {"cohort": 1})
    assert [len(part) for part in shares.clients] == [50]
    assert shares.too_long == 20


def test_the_official_code_cuts_long_examples_and_those_without_a_response_left_are_out(tmp_path, tokenizer):
    """Even inputs fit, and their responses don't; odd inputs of more tokens than characters don't fit themselves."""
    source = write(tmp_path / "ni", {"large": 250}, {"many": 1500})
    table = task("large", 250)
    for i, instance in enumerate(table["Instances"]):
        instance["input"] = "\N{GRINNING FACE}" * 200 if i % 2 else "short"  # 4 tokens each
        instance["output"] = [LONG]
    (source / "tasks/large.json").write_text(json.dumps(table))
    (part,) = shared(source, tokenizer, {"cohort": 1}, protocol="official-code").clients
    drawn = subsample(str(source), 0, protocol="official-code", max_characters=500).clients["large"]
    assert len(part) == sum(e.context == "short" for e in drawn)
    assert {len(e.tokens) for e in part} == {500}
    assert all(e.prompt < 500 and e.tokens[-1] != tokenizer.eos_token_id for e in part)
    with pytest.raises(FedKSeedError, match=r"holds the data of 0 clients; lower .clients. min_examples"):
        shared(source, tokenizer, {"cohort": 1, "min_examples": 500})


def test_each_protocol_has_its_wording(folder, tokenizer):
    def wording(**data: Any) -> str:
        first = shared(folder, tokenizer, **data).clients[0][0]
        return tokenizer.decode(first.tokens[: first.prompt])

    assert wording().endswith("### Response:\n")
    assert wording(protocol="official-code").endswith("### Response:")
    assert wording(protocol="official-code", separator="\n\n").endswith("### Response:\n\n")


@pytest.mark.parametrize("seed", [0, 1, 2, 4])  # 3 draws no row of "long" that is short enough
def test_fewer_clients_than_tasks_are_a_draw_to_which_more_clients_add(folder, tokenizer, seed):
    one, two, every = (shared(folder, tokenizer, {"count": count, "cohort": 1}, seed=seed) for count in (1, 2, 3))
    assert [len(each.clients) for each in (one, two, every)] == [1, 2, 3]
    assert {*one.names} < {*two.names} < {*every.names}
    rows = dict(zip(every.names, every.clients, strict=True))
    assert all(two.clients[k] == rows[name] for k, name in enumerate(two.names))
    assert [name for name in every.names if name in two.names] == list(two.names)


FULL = os.environ.get("FEDKSEED_NATURAL_INSTRUCTIONS", "")


@pytest.mark.skipif(not FULL, reason="the full data set is not here: FEDKSEED_NATURAL_INSTRUCTIONS=FOLDER names it")
def test_the_full_data_set_has_as_many_clients_as_the_paper(tokenizer):
    """A count by the rule alone: no task is left out because all of its examples are too long."""
    assert len(shared(Path(FULL), tokenizer, max_tokens=1_000_000).clients) == 738


def test_the_number_of_clients_need_not_be_known_but_is_checked_if_given(folder, tokenizer):
    assert len(shared(folder, tokenizer, {"count": 3}).clients) == 3
    with pytest.raises(FedKSeedError, match=r"holds the data of 3 clients, \[clients\] count says 4"):
        shared(folder, tokenizer, {"count": 4})
    with pytest.raises(FedKSeedError, match="a cohort of 5 can't be drawn from 3 clients"):
        shared(folder, tokenizer, {"cohort": 5})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Definition": []}, "tasks/large.json: no Definition; keys found: Definition, Instances"),
        ({"Definition": [3]}, "Definition must be text, got int"),
        ({"Instances": {"a": 1}}, "Instances must be a list, got dict"),
        ({"Instances": ["a"]}, "instance 1: expected a JSON object, got str"),
        ({"Instances": [{"input": "a", "output": ["b"]}, {"input": "a"}]}, "instance 2: output must be a list .* null"),
        ({"Instances": [{"input": "a", "output": []}]}, r"instance 1: output must be a list of one text or more.*\[\]"),
        ({"Instances": [{"output": ["b"]}]}, "instance 1: input must be text, got NoneType"),
        ({"Instances": [{"input": "\ud800", "output": ["b"]}]}, "half a character"),
    ],
)
def test_a_broken_task_is_refused_with_its_place(tmp_path, change, message):
    source = write(tmp_path / "ni", {"large": 250}, {"many": 1500})
    (source / "tasks/large.json").write_text(json.dumps(task("large", 250) | change))
    with pytest.raises(FedKSeedError, match=message):
        subsample(str(source), 0)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tasks/large.json", b'{"Definition', "tasks/large.json: not valid JSON .*get the file again"),
        ("tasks/large.json", b"[1]", "tasks/large.json: expected a JSON object, got list"),
        ("tasks/large.json", b"\xff", "tasks/large.json: not valid UTF-8"),
        ("tasks/large.json", None, "tasks/large.json is missing, as are 1 in all"),
        ("splits/default/train_tasks.txt", None, "splits/default/train_tasks.txt is missing"),
        ("splits/default/test_tasks.txt", b"\n", "splits/default/test_tasks.txt lists no task"),
        ("splits/default/test_tasks.txt", b"large\n", "large is both a training and a test task"),
    ],
)
def test_a_broken_data_set_is_refused_with_the_file(tmp_path, file, content, message):
    source = write(tmp_path / "ni", {"large": 250}, {"many": 1500})
    (source / file).unlink() if content is None else (source / file).write_bytes(content)
    with pytest.raises(FedKSeedError, match=message):
        subsample(str(source), 0)


def test_a_missing_and_a_damaged_source_are_refused(folder, tmp_path):
    with pytest.raises(FedKSeedError, match=r"no Natural Instructions at .*none.tar; give the folder"):
        subsample(str(tmp_path / "none.tar"), 0)
    with tarfile.open(tmp_path / "whole.tar.xz", "w:xz") as file:
        file.add(folder, ".")
    whole = (tmp_path / "whole.tar.xz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    for name, content in (("cut", whole[: len(whole) // 2]), ("flipped", bytes(flipped)), ("other", b"no archive")):
        (tmp_path / f"{name}.tar.xz").write_bytes(content)
        with pytest.raises(FedKSeedError, match=f"{name}.tar.xz can't be read: .*get it again"):
            subsample(str(tmp_path / f"{name}.tar.xz"), 0)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A file's header in an archive, of 512 bytes, with whatever size it claims."""
    about = tarfile.TarInfo(name)
    about.size, about.type = size, kind
    return about.tobuf(tarfile.GNU_FORMAT)


TARS = {
    "a task of a terabyte": (header("x/splits/default/train_tasks.txt", 1 << 40), "claims 1,099,511,627,776"),
    "a task larger than tasks are": (header("x/splits/default/train_tasks.txt", MAX_FILE + 1), "claims 268,435,457"),
    "a header of a terabyte": (header("x", 1 << 40, tarfile.XHDTYPE), "one claims 1,099,511,627,776"),
    "a long name of a terabyte": (header("x", 1 << 40, tarfile.GNUTYPE_LONGNAME), "one claims 1,099,511,627,776"),
    "a file that goes back to itself": (header("x", -512), "claims -512"),
    "a header that goes back to itself": (header("x", -1024, tarfile.XHDTYPE), "one claims -1,024"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TARS)
def test_an_archive_that_claims_to_be_endless_is_refused(tmp_path, name, packed):
    content, match = TARS[name]
    content += bytes(10_240)
    path = tmp_path / "bomb.tar"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(FedKSeedError, match=match):
        split_lists(str(path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x/splits/default/train_tasks.txt", tarfile.SYMTYPE),
        ("x/tasks/task1.json", tarfile.LNKTYPE),
        ("x/console", tarfile.CHRTYPE),
        ("x/pipe", tarfile.FIFOTYPE),
        ("../../etc/passwd", tarfile.REGTYPE),
        ("/etc/passwd", tarfile.REGTYPE),
    ],
)
def test_links_devices_and_paths_out_of_an_archive_are_refused_by_name(tmp_path, name, kind):
    """Finding 19: a symbolic link ended with a KeyError."""
    (tmp_path / "a.tar").write_bytes(header(name, 0, kind) + bytes(1024))
    with pytest.raises(FedKSeedError, match=rf"file 1, '{re.escape(name)}', is a link, a device, sparse, or outside"):
        split_lists(str(tmp_path / "a.tar"))


def test_an_archive_that_unpacks_to_far_more_than_it_has_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(header("x/skipped", 1 << 25) + bytes(1 << 25)))
    with pytest.raises(FedKSeedError, match=r"files of 16,777,216 bytes in all.*'x/skipped', claims 33,554,432"):
        split_lists(str(path))
    path.write_bytes(gzip.compress((header("x", 1 << 23, tarfile.XHDTYPE) + b"8388608 a=" + b"b" * (1 << 23)) * 4))
    with pytest.raises(FedKSeedError, match=r"bomb\.tar\.gz"):
        split_lists(str(path))


def test_an_archive_of_many_names_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(natural_instructions, "MAX_MEMBERS", 100)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(b"".join(header(f"f{k}", 0) for k in range(102)) + bytes(1024)))
    with pytest.raises(FedKSeedError, match=r"at most 100 files .* file 101, 'f100', claims 0"):
        split_lists(str(path))


def test_archives_with_flipped_bytes_are_read_or_refused(tmp_path):
    rng, buffer = np.random.default_rng(6), io.BytesIO()
    small = write(tmp_path / "small", {"a": 3}, {"b": 3})
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.add(small, ".")
    for whole in (buffer.getvalue(), gzip.compress(buffer.getvalue())):
        for _ in range(200):
            flipped = bytearray(whole)
            flipped[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
            (tmp_path / "a.tar").write_bytes(flipped)
            with suppress(FedKSeedError):
                subsample(str(tmp_path / "a.tar"), 0)
