"""Rows of a classification task, whose category is the label, written by the script itself."""

import json
import subprocess

from . import command

TASK = {
    "Definition": ["Say good or bad."],
    "Instances": [
        {"input": "Sun.", "output": ["good"]},
        {"input": "Rain.", "output": ["bad", "bad"]},
        {"input": "Wind.", "output": ["good", "bad"]},
    ],
}


def test_a_row_has_its_label_as_category_and_rows_of_two_labels_are_left_out(tmp_path):
    task, output = tmp_path / "task.json", tmp_path / "rows.jsonl"
    task.write_text(json.dumps(TASK))
    done = subprocess.run(command("labels.py", task, output), capture_output=True, text=True, check=True)
    assert "2 rows, labels bad, good" in done.stdout
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"instruction": "Say good or bad.\nSun.", "response": "good", "category": "good"},
        {"instruction": "Say good or bad.\nRain.", "response": "bad", "category": "bad"},
    ]
