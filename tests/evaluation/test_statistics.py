"""Statistics against values computed by hand."""

import json
import math
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binomtest

from fedkseed.evaluation.statistics import (
    BALANCED,
    FREQUENT,
    MOST_CLASSES,
    NOT_EVALUATED,
    Confusion,
    Estimate,
    Evaluation,
    Gain,
    McNemar,
    balanced_accuracy,
    counted,
    estimate,
    gain_of_all,
    gains,
    gains_table,
    most_frequent,
    natural,
    paired_change,
    title_of,
)

# 5 are truly "no", of which 4 are chosen; 3 are truly "yes", of which 1 is; 2 truly "maybe", of which none is.
CHOICES = [
    *[("no", "no")] * 4, ("no", "yes"), ("yes", "yes"), *[("yes", "no")] * 2, ("maybe", "no"), ("maybe", "yes"),
]  # fmt: skip


def test_estimates_by_hand():
    assert estimate([1.0, 3.0]).mean == 2
    assert estimate([1.0, 3.0]).error == pytest.approx(np.sqrt(2) / np.sqrt(2))
    change = paired_change([1.0, 5.0, 9.0], [0.0, 4.0, 8.0])
    assert (change.mean, change.error) == (-1, 0)
    assert math.isinf(estimate([1.0]).error)
    assert (estimate([1.0]).text("+"), change.text("+", 2)) == ("+1.0000", "-1.00 ± 0.00")


def test_a_confusion_matrix_counts_true_by_chosen():
    found = Confusion.of(CHOICES)
    assert found == Confusion(["maybe", "no", "yes"], [[0, 1, 1], [0, 4, 1], [0, 2, 1]])
    assert Confusion.of([("a", "b"), ("a", "a")]) == Confusion(["a", "b"], [[1, 1], [0, 0]])


def test_a_confusion_matrix_of_many_classes_or_of_none_is_left_out():
    many = [(str(k), str(k)) for k in range(MOST_CLASSES + 1)]
    assert Confusion.of(many) is None
    assert Confusion.of(many[1:]) is not None
    assert Confusion.of([]) is None


def test_balanced_accuracy_is_the_mean_recall():
    assert balanced_accuracy(CHOICES) == pytest.approx((4 / 5 + 1 / 3 + 0 / 2) / 3)
    always = [(true, "no") for true, _ in CHOICES]
    assert balanced_accuracy(always) == pytest.approx(1 / 3)  # its accuracy is 0.5


def test_the_most_frequent_choice():
    assert most_frequent(CHOICES) == ("no", 0.7)
    assert most_frequent([("a", "c"), ("a", "b")]) == ("b", 0.5)  # the first in sorted order of equals


def test_mcnemars_test_by_hand():
    before, after = [1, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0]
    found = McNemar.of(before, after)
    assert found == McNemar(gained=1, lost=4)
    assert found.p == float(Fraction(2 * (1 + 5), 32))  # 2 (C(5, 0) + C(5, 1)) / 2^5
    assert McNemar(0, 0).p == McNemar(1, 0).p == McNemar(3, 3).p == 1
    assert McNemar(6, 0).p == 2 / 64


@pytest.mark.parametrize(("gained", "lost"), [(2, 9), (9, 2), (30, 12), (700, 800)])
def test_mcnemars_test_is_the_binomial_test_of_scipy(gained, lost):
    assert McNemar(gained, lost).p == pytest.approx(binomtest(gained, gained + lost).pvalue, rel=1e-9)


def test_an_evaluation_of_an_earlier_release_is_read():
    old = Evaluation(**{"losses": [1.0, 3.0], "rouge": [], "empty": []})
    assert old.measures == {"loss": [1.0, 3.0]}
    assert old.means == {"loss": 2}
    assert NOT_EVALUATED.measures == NOT_EVALUATED.means == {}


def test_further_sets_survive_writing_and_reading_and_have_their_name_before_each_mean():
    sets = {
        "own rows": Evaluation([1.0, 2.0], scores={"choice": [0.0]}, choices=[["a", "b"]]),
        "general": Evaluation([4.0]),
    }
    found = Evaluation([2.0], sets=sets)
    assert Evaluation.of(json.loads(json.dumps(asdict(found)))) == found
    assert found.means == {
        "loss": 2, "own rows: loss": 1.5, "own rows: choice": 0, f"own rows: {BALANCED}": 0,
        f"own rows: {FREQUENT}": 1, "general: loss": 4,
    }  # fmt: skip
    assert [*found.every] == ["", "own rows", "general"]
    assert found.measures == {"loss": [2.0]}


def test_the_gain_of_each_client_is_that_of_its_own_rows():
    owners = ["b", "a", "b", "a", "b", "a"]
    before = Evaluation([1.0], sets={"own rows": Evaluation([4.0, 1.0, 5.0, 1.0, 6.0, 1.0], [0.5, 0.0], owners=owners)})
    after = Evaluation([1.0], sets={"own rows": Evaluation([3.0, 1.5, 4.0, 2.5, 4.0, 2.0], [1.0, 0.5], owners=owners)})
    first, second = gains(before, after)
    assert (first.client, first.rows, first.before["loss"], first.after["loss"]) == ("a", 3, 1.0, 2.0)
    # 0.5, 1.5 and 1: the mean 1, the variance 0.25, of three
    assert first.change["loss"].mean == pytest.approx(1.0)
    assert first.change["loss"].error == pytest.approx(math.sqrt(0.25 / 3))
    assert first.change["rouge"] == Estimate(0.5, math.inf)  # answers are written to the first two rows alone
    assert [one.verdict for one in (first, second)] == ["lost", "gained"]
    assert second.change["loss"].mean == pytest.approx(-4 / 3)
    assert gain_of_all([first, second]) == pytest.approx((3.0 - 4.0) / 6)
    table = json.loads(json.dumps([asdict(one) for one in (first, second)]))
    assert [Gain.of(one) for one in table] == [first, second]
    assert [one["verdict"] for one in gains_table([first, second])] == ["lost", "gained"]
    assert gains(Evaluation([1.0]), Evaluation([1.0])) == []


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (Estimate(-0.3, 0.1), "gained"), (Estimate(0.3, 0.1), "lost"), (Estimate(-0.2, 0.11), "unclear"),
        (Estimate(-3.0, math.inf), "unclear"), (Estimate(math.nan, 0.1), "unclear"),
    ],
)  # fmt: skip
def test_a_change_within_two_errors_is_no_gain(change, verdict):
    assert Gain("a", 3, {}, {}, {"loss": change}).verdict == verdict


def test_clients_are_in_the_order_of_their_numbers():
    names = ["client 10", "client 2", "hr", "Ward ² b", "client 1"]
    assert sorted(names, key=natural) == ["Ward ² b", "client 1", "client 2", "client 10", "hr"]


def test_means_of_choices_show_a_model_that_says_the_same_to_all():
    right = [float(true == chosen) for true, chosen in CHOICES]
    found = Evaluation([2.0] * 10, scores={"choice": right}, choices=CHOICES).means
    assert found == {"loss": 2, "choice": 0.5, BALANCED: pytest.approx(17 / 45), FREQUENT: 0.7}


@pytest.mark.parametrize(
    ("name", "title", "count"),
    [
        ("loss", "held-out loss", "1,000 examples"),
        ("choice", "choice accuracy", "1,000 examples"),
        ("rouge", "Rouge-L", "1,000 answers"),
        ("/a/folder/own.py:score", "own.py:score", "1,000 answers"),
        ("package.module:score", "package.module:score", "1,000 answers"),
        ("/a: b/own.py:score", "own.py:score", "1,000 answers"),
    ],
)
def test_names_for_people(name, title, count):
    assert (title_of(name), counted(name, 1000)) == (title, count)


def test_a_metric_of_a_set_has_the_sets_name_before_its_title():
    assert title_of("my set: loss") == "my set: held-out loss"
    assert title_of("my set: /a: b/own.py:score") == "my set: own.py:score"
