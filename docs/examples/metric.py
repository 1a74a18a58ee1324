"""Every command of fedkseed with one more metric: the share of its clients that a round did not give up.

Run:  python metric.py run dolly.toml --tensorboard
Then: python metric.py rounds runs/dolly
"""

from fedkseed.cli import main
from fedkseed.run.round_metrics import METRICS, Metric, StoredReport


def kept(report: StoredReport) -> float:
    answered = len(report["clients"])
    return answered / (answered + report.get("given_up", 0))


METRICS.append(Metric("clients/kept", "kept", kept, form="{:.0%}", phrase="kept {:.0%}"))

if __name__ == "__main__":
    main()
