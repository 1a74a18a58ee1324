"""Rows of a classification task, whose category is the label."""

from benchmarks.labels import rows

TASK = {
    "Definition": ["Say good or bad."],
    "Instances": [
        {"input": "Sun.", "output": ["good"]},
        {"input": "Rain.", "output": ["bad", "bad"]},
        {"input": "Wind.", "output": ["good", "bad"]},
    ],
}


def test_a_row_has_its_label_as_category_and_rows_of_two_labels_are_left_out():
    assert rows(TASK) == [
        {"instruction": "Say good or bad.\nSun.", "response": "good", "category": "good"},
        {"instruction": "Say good or bad.\nRain.", "response": "bad", "category": "bad"},
    ]
