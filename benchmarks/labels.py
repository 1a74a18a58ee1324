"""Write a classification task of Natural Instructions as rows whose category is the label, as JSON lines.

With the label as category, `[clients] alpha` gives clients uneven labels, and `choice` has all labels as options.

    python benchmarks/labels.py task843_financial_phrasebank_classification.json FOLDER/sentiment.jsonl
"""

import argparse
import json
from pathlib import Path


def rows(task: dict) -> list[dict[str, str]]:
    """The instances of a task that have one label: definition and input, the label, and the label again."""
    definition = " ".join(task["Definition"])
    return [
        {"instruction": f"{definition}\n{one['input']}", "response": label, "category": label}
        for one in task["Instances"]
        for label in [one["output"][0]]
        if len(set(one["output"])) == 1
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    made = rows(json.loads(given.task.read_text()))
    given.output.write_text("".join(json.dumps(row) + "\n" for row in made))
    print(f"{len(made)} rows, labels {', '.join(sorted({row['category'] for row in made}))}: {given.output}")


if __name__ == "__main__":
    main()
