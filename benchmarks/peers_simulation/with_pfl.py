"""FedAvg by pfl-research's simulated backend.

    PYTHON with_pfl.py cnn|lora ROUNDS COHORT

Users take turns with one resident model, and nothing is serialised.
"""

# pyright: reportMissingImports=false

from importlib.metadata import version

import shared
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Network(nn.Module):
    """The model as pfl takes one: with a loss of its own, and metrics."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = shared.model(name)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.layers(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        return {}


class Turns(TrainingProcessCallback):
    """The end of each round, where bare training has its turn."""

    def __init__(self, meter: shared.Meter) -> None:
        self.meter = meter

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.meter.turn()
        return False, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    name, rounds, cohort = shared.asked()
    network, data = Network(name), {user: list(held) for user, held in enumerate(shared.users())}
    model = PyTorchModel(
        network,
        lambda parameters, lr: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr),
        torch.optim.SGD(shared.tuned(network), lr=1.0),
    )
    users = FederatedDataset.from_slices(data, get_user_sampler("random", list(data)))
    meter = shared.Meter(shared.bare(name, cohort))
    meter.begin()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            train_cohort_size=cohort,
            val_cohort_size=None,
            evaluation_frequency=rounds + 2,  # in round 0 alone, which warms up
        ),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(
            local_batch_size=shared.BATCH, local_num_epochs=1, local_learning_rate=shared.LR, local_max_grad_norm=None
        ),
        callbacks=[Turns(meter)],
        send_metrics_to_platform=False,
    )
    shared.report(meter, [f"pfl {version('pfl')}", f"torch {torch.__version__}"])


if __name__ == "__main__":
    main()
