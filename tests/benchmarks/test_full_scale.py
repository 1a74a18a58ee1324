"""The table of the paper's scale: a row of an experiment's runs."""

import sys

from . import FOLDER

sys.path.insert(0, str(FOLDER))  # a benchmark is a script, not a module

import full_scale


def test_a_row_has_the_longest_run_the_hours_of_all_and_says_which_it_does_not_know():
    one = {"clients a round": 2, "rounds": 3, "local steps": 4, "hours, all seeds": 1.4}
    one |= {"bytes of a run": 1_500_000, "memory (GB)": 7.25}
    other = {**one, "clients a round": 36, "local steps": None, "hours, all seeds": None, "bytes of a run": 2e9}
    row = full_scale.row("name", [one, other])
    assert (row["client steps"], row["hours"]) == ("24", "1 and more")
    assert (row["clients a round"], row["memory, GB"]) == ("2 to 36", "7.25")
    assert row["MB of a run"] == "1.5 to 2,000"
