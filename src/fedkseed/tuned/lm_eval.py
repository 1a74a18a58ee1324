"""Scores by lm-evaluation-harness on a tuned model and on its base model: the harness's tasks, or files of own ones."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import FedKSeedError, needs_extra, others_border
from ..evaluation.statistics import Estimate, paired_change
from .load import TunedModel

TASKS = Path(__file__).parents[1] / "evaluation" / "tasks"  # tasks whose data is in this package
SEED = 1234  # the harness's own, for the draw of few-shot examples
BATCH = 8  # rows that go through the model at a time


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The score of a task, or of a group of tasks, by one of its metrics."""

    task: str
    metric: str  # the harness's name, and that of its filter where there is one
    tuned: Estimate
    base: Estimate | None = None
    change: Estimate | None = None  # paired by example; None where the metric is no mean over examples


def scores(
    tuned: TunedModel,
    names: Sequence[str],
    *,
    own: Path | None = None,
    shots: int | None = None,
    examples: int | None = None,
    as_tuned: bool = False,
    beside_base: bool = False,
) -> list[TaskScore]:
    """Scores of the tuned model by the harness, which is given it as a model of `transformers`.

    Args:
        names: names of tasks or groups of tasks, or paths of YAML files.
        own: folder of further YAML files, as the harness reads them.
        shots: solved examples before each question; None: as the task says.
        examples: number of each task's, the first ones; None: all.
        as_tuned: put requests in the words on which the model was tuned, in place of the task's own alone.

    Raises:
        FedKSeedError: a package, a task or its data is missing, or a model can't be loaded.
    """
    with needs_extra("tasks need", "harness"):
        import lm_eval.models.huggingface  # noqa: F401
    tasks = load_tasks(names, own, shots)
    tokenizer = tuned.chat_tokenizer() if as_tuned else tuned.tokenizer()
    before = _estimates(evaluate(tuned.load_base(), tokenizer, tasks, examples, as_tuned)) if beside_base else {}
    after = _estimates(evaluate(tuned.merged(), tokenizer, tasks, examples, as_tuned))
    compared = []
    for (task, metric), (score, values) in after.items():
        base_score, base_values = before.get((task, metric), (None, None))
        change = paired_change(base_values, values) if base_values and values else None
        compared.append(TaskScore(task, metric, score, base_score, change))
    return compared


def load_tasks(names: Sequence[str], own: Path | None = None, shots: int | None = None) -> Any:
    """Tasks with their data, as the harness's `evaluate` takes them; a name that no task has is refused."""
    from lm_eval.tasks import TaskManager

    folders: list[str | Path] = [TASKS] if own is None else [TASKS, own]

    def manager_of(defaults: bool) -> tuple[Any, list[str]]:
        """The harness's table of tasks, with its own or without, and the names that it has not."""
        manager = TaskManager(include_path=folders, include_defaults=defaults)
        return manager, [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]

    manager, unknown = manager_of(defaults=False)
    if unknown:  # its own are thousands of files, which take seconds to read
        manager, unknown = manager_of(defaults=True)
    if unknown:
        near = ", ".join(get_close_matches(unknown[0], manager.all_tasks, n=3))
        advice = f"near to it are {near}" if near else "`fedkseed docs evaluation` says where there are lists of them"
        raise FedKSeedError(f"no task is called {unknown[0]!r}; {advice}")
    advice = (
        "the harness's own tasks get their data from the hub; general_knowledge, and tasks over files of yours "
        "(--tasks-from), need no network"
    )
    with others_border(f"the tasks {', '.join(names)} can't be loaded", advice), _quiet():
        tasks = manager.load(list(names))
    for task in tasks["tasks"].values():
        fixed = task.get_config("num_fewshot")
        if fixed is None or (shots is not None and fixed != 0):  # 0: the task is for no examples
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=SEED)
    return tasks


def evaluate(model: Any, tokenizer: Any, tasks: Any, examples: int | None, as_tuned: bool) -> Mapping[str, Any]:
    """The harness's results of a model, with a record of each example."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    make: Any = HFLM  # its registry hides its arguments
    chat: Any = {"apply_chat_template": as_tuned, "fewshot_as_multiturn": as_tuned}
    with _quiet():
        wrapped = make(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=BATCH)
        results: Any = lm_eval.evaluate(wrapped, tasks, limit=examples, **chat)
    return results


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness from warning that a model has no name, and that a task leaves settings to their defaults."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _estimates(results: Mapping[str, Any]) -> dict[tuple[str, str], tuple[Estimate, list[float] | None]]:
    """By task and metric: the score, and those of the examples where it is their mean."""
    estimates = {}
    for task, measures in {**results["results"], **results.get("groups", {})}.items():
        for key, score in measures.items():
            metric, _, filter_ = key.partition(",")  # keys are "acc,none", "acc_stderr,none" and so on
            if not filter_ or metric.endswith("_stderr"):
                continue
            error = measures.get(f"{metric}_stderr,{filter_}")
            estimate = Estimate(float(score), float(error) if isinstance(error, int | float) else math.inf)
            samples = [sample for sample in results["samples"].get(task, ()) if sample["filter"] == filter_]
            values = [float(sample[metric]) for sample in samples if isinstance(sample.get(metric), int | float)]
            is_mean = len(values) == len(samples) > 1 and math.isclose(fmean(values), score, abs_tol=1e-9)
            name = metric if filter_ == "none" else f"{metric}, {filter_}"
            estimates[task, name] = estimate, values if is_mean else None
    return estimates
