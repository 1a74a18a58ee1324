"""Plans of asynchronous rounds: virtual time and staleness, without any training.

    python benchmarks/plan.py [--json]

200 clients, of which a fifth takes ten times as long as the others, 200 local steps, 400 contributions; means over ten
seeds.
"""

import math
from itertools import islice
from statistics import fmean

from fedkseed.run.cohort import asynchronous, durations, synchronous
from table import Row, new_parser, show

CLIENTS, STEPS, SHARE, FACTOR, CONTRIBUTIONS, SEEDS = 200, 200, 0.2, 10.0, 400, 10
PLANS: list[tuple[int, int | None, float]] = [  # buffer, concurrency (None: synchronous), max_staleness
    (10, None, 0), (10, 10, math.inf), (10, 20, math.inf), (5, 20, math.inf), (10, 40, math.inf), (5, 20, 4),
]  # fmt: skip


def row(buffer: int, concurrency: int | None, limit: float) -> Row:
    clocks, late, largest, slow = list[float](), list[int](), list[int](), list[bool]()
    for seed in range(SEEDS):
        times = durations(seed, [STEPS] * CLIENTS, SHARE, FACTOR)
        if concurrency is None:
            plan = synchronous(seed, times, buffer)
        else:
            plan = asynchronous(seed, times, buffer, concurrency, limit)
        steps = list(islice(plan, CONTRIBUTIONS // buffer))
        stale = [round_ - begun for round_, step in enumerate(steps) for begun in step.begun.values()]
        clocks.append(steps[-1].clock)
        late += stale
        largest.append(max(stale))
        slow += [times[client] > STEPS for step in steps for client in step.begun]
    name = f"synchronous, cohorts of {buffer}" if concurrency is None else f"buffer {buffer}, concurrency {concurrency}"
    return {
        "plan": name + ("" if concurrency is None or math.isinf(limit) else f", max_staleness {limit:g}"),
        "virtual time": f"{fmean(clocks):,.0f}", "staleness, mean": f"{fmean(late):.1f}",
        "largest": f"{fmean(largest):.0f}", "mean factor": f"{fmean((1 + s) ** -0.5 for s in late):.2f}",
        "from slow clients": f"{fmean(slow):.0%}",
    }  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__)
    options = parser.parse_args()
    show("the plan of asynchronous rounds", [row(*chosen) for chosen in PLANS], as_json=options.json)


if __name__ == "__main__":
    main()
