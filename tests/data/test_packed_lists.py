"""Lists in cells of tables: what other programs write is read as they meant it, and nothing else changes."""

import json

import numpy as np
import pandas as pd
import pytest

from fedkseed.data.packed_lists import MAX_PRINTED, parsed, unpacked

TURNS = [{"role": "user", "content": 'Say "a\\n" }\n {.'}, {"role": "assistant", "content": "it's [1]"}]


def test_a_file_that_pandas_has_written_of_lists_or_of_arrays_is_read(tmp_path):
    short = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "} {"}]  # NumPy prints it as one line
    for turns in (TURNS, short):
        for cells in (turns, np.array(turns, dtype=object)):
            pd.DataFrame({"messages": [cells]}).to_csv(tmp_path / "a.csv", index=False)
            (cell,) = pd.read_csv(tmp_path / "a.csv")["messages"]
            assert unpacked(cell) == turns


def test_an_object_of_columns_is_a_list_of_objects():
    columns = {"role": ["user", "assistant"], "content": ["a", "b"]}
    rows = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert unpacked(columns) == unpacked(json.dumps(columns)) == unpacked(repr(columns)) == rows
    for other in ({"a": ["b"], "c": ["d", "e"]}, {"a": "b"}, {}):
        assert unpacked(other) == other


@pytest.mark.parametrize(
    "text",
    [
        "[", "[1", "{{}}", "{{1}, {2}}", "{[1]: 2}", "[" * 100_000, "{'a':" * 50_000, "[-" * 1000 + "1", "{\\d}",
        '[{"a": 1, "a": 2}]', "[f()]", "[__import__('os')]", "[1] and more", "[" + "[]," * MAX_PRINTED + "]",
        "[x}" + "\n" * 200_000 + "x", "[" + "'" * 99_999 + "}" + " " * 100_000,
        "[{1, 2}]", "[b'a']", "[0x" + "f" * 9999 + "]",
    ],
    ids=lambda text: text[:9],
)  # fmt: skip
def test_a_text_that_says_no_list_stays_as_it_is(text):
    """Whatever Python's parser raises, and a key that is there twice, of which one value would be lost."""
    assert parsed(text) is None
    assert unpacked("x" + text) == "x" + text
