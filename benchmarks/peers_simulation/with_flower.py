"""FedAvg by Flower's simulation engine, on Ray with one actor, so that it has one core as the others have.

    PYTHON with_flower.py cnn|lora ROUNDS COHORT

The actor keeps its model and the data from visit to visit; Flower leaves that to its user.
"""

import os
import time
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version

import shared
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

client_app, server_app = ClientApp(), ServerApp()


@cache
def resident(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The model and all users' data of this process."""
    torch.set_num_threads(1)
    return shared.model(name), shared.users()


def sent(network: nn.Module) -> ArrayRecord:
    """The tuned weights as they travel."""
    return ArrayRecord({name: tensor.detach() for name, tensor in network.named_parameters() if tensor.requires_grad})


@client_app.train()
def train(message: Message, context: Context) -> Message:
    network, users = resident(str(message.content.config_records["config"]["model"]))
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict(), strict=False)
    optimizer = torch.optim.SGD(shared.tuned(network), lr=shared.LR)
    shared.train(network, optimizer, users[int(context.node_config["partition-id"])])
    content = {"arrays": sent(network), "metrics": MetricRecord({"num-examples": shared.EXAMPLES})}
    return Message(RecordDict(content), reply_to=message)


class Whole(FedAvg):
    """FedAvg that does not go on without a client: a round of fewer visits would look fast."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if failed := [reply.error for reply in replies if reply.has_error()]:
            raise RuntimeError(f"{len(failed)} of {len(replies)} clients failed: {failed[0]}")
        if len(replies) != self.min_train_nodes:
            raise RuntimeError(f"{len(replies)} clients answered, {self.min_train_nodes} were expected")
        return super().aggregate_train(server_round, replies)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    torch.set_num_threads(1)
    name, rounds, cohort = shared.asked()
    arrays, config = sent(shared.model(name)), ConfigRecord({"model": name})
    strategy = Whole(cohort / shared.USERS, fraction_evaluate=0, min_train_nodes=cohort)
    meter = shared.Meter(shared.bare(name, cohort), lambda: time.process_time() + shared.descendants())
    meter.begin()
    for _ in range(rounds + 1):
        arrays = strategy.start(grid, arrays, num_rounds=1, train_config=config).arrays
        meter.turn()
    shared.report(meter, [f"flwr {version('flwr')}", f"ray {version('ray')}", f"torch {torch.__version__}"])


def run() -> None:
    """Start the engine."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    one = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    run_simulation(server_app, client_app, num_supernodes=shared.USERS, backend_config=one)


if __name__ == "__main__":
    from with_flower import run as run_of_module  # the actor finds what a module defines, not what a script does

    run_of_module()
