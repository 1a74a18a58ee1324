"""Imports go one way, in no circle, and reach PyTorch only where a model is needed; tests mirror the sources."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"
TESTS = Path(__file__).parent


def words(text: str) -> list[str]:
    return text.split()


# From the ground up: a folder, or a file of the package's own, imports from those before it and from itself.
ORDER = words("""
errors randomness files directions wire secure weights local strategy strategies round recipe data models evaluation run
planning tuned report trainer network paper cli
""")

# Modules that a server without a model is made of, or a command that only looks at a run.
WITHOUT_TORCH = words("""
errors randomness files directions directions.pool directions.families directions.reference wire wire.records wire.codec
wire.numbers wire.int8 wire.delta weights.adapter weights.basis_file local.client local.work local.zeroth_order
local.derivatives local.optimizers local.private_steps local.schedules strategy strategies.kseed strategies.kseed_client
strategies.uploads strategies.averaging strategies.replay strategies.checks strategies.masked strategies.noised
strategies.tree secure secure.accounting secure.grid secure.masks secure.member secure.noise secure.server round
recipe.basis_digest recipe.own_code recipe.schema recipe.algorithms recipe.rules recipe.reading data.file_formats
data.layouts data.sources data.natural_instructions data.batches data.split data.encoder data.held_out data.federated
models.checkpoint models.dtypes models.place tuned.convert tuned.untie planning.pin run.prerequisites planning.init
tuned.load tuned.formats
evaluation.statistics run.loop run.store run.best_round run.progress
run.round_metrics run.cohort run.privacy_plan run.activity run.trackers
report.watch_state report.watch_page report.terminal report.bars report.results report.rounds
report.page network.flower.compat network.flower.client_app network.flower.server_app network.flower.grid_carrier
cli.network network.protocol.certs network.protocol.envelope network.flower.messages network.protocol.networked_recipe
network.protocol.server.rounds network.protocol.server.clients network.protocol.server.client_numbers
network.limits network.http_server network.http_client network.protocol.signatures network.protocol.masking_keys
network.protocol.client.recipe_consent network.protocol.client.policy
network.protocol.client.worker_process network.protocol.client.task_handler network.protocol.server.serving
network.protocol network.protocol.carrier network.https network.https.task_files network.https.connections
network.https.app network.https.unreachable network.https.browser_page network.https.registered_keys
network.https.server network.https.join network.https.shard network.peers network.peers.signed_upload
network.peers.roster network.peers.merge_rule network.peers.store network.peers.tls network.peers.app
network.peers.gossip network.peers.verify cli cli.options cli.certs cli.tune cli.look cli.share cli.research
""")
HEAVY = ("torch", "numba", "transformers", "datasets", "matplotlib", "peft", "ray")

# Modules that have no test file of their own name, and the file that tests them.
TESTED_IN = {
    "__main__": "cli/test_stopping.py",
    "data.batches": "data/test_wording.py",
    "data.encoder": "data/test_federated.py",
    "data.held_out": "evaluation/test_sets.py",
    "directions.numba_cpu.averages": "directions/test_averages.py",
    "directions.numba_cpu.backend": "directions/test_backends.py",
    "directions.numba_cpu.gguf": "models/test_quantised.py",
    "directions.numba_cpu.kernels": "directions/test_backends.py",
    "directions.numba_cpu.simd": "directions/test_backends.py",
    "directions.numba_cpu.kept_kernels": "directions/test_kept_kernels.py",
    "directions.numba_cpu.threads": "directions/test_backends.py",
    "directions.numpy_any": "directions/test_families.py",
    "directions.pool": "directions/test_operations.py",
    "directions.torch_any": "directions/test_backends.py",
    "directions.triton_gpu": "directions/test_backends.py",
    "directions.vectors": "directions/test_backends.py",
    "errors": "cli/test_options.py",
    "evaluation.tasks.questions": "tuned/test_lm_eval.py",
    "network.protocol.client.task_handler": "network/protocol/client/test_worker.py",
    "network.protocol.client.training_client": "network/protocol/client/test_worker.py",
    "network.protocol.client.worker_process": "network/protocol/client/test_worker.py",
    "network.flower.grid_carrier": "network/flower/test_server_app.py",
    "network.flower.messages": "network/flower/test_client_app.py",
    "network.protocol.server.serving": "network/protocol/server/test_clients.py",
    "local.client": "test_round.py",
    "local.first_order": "weights/test_full.py",
    "local.schedules": "strategies/test_kseed.py",
    "local.work": "test_round.py",
    "local.zeroth_order": "weights/test_in_memory.py",
    "models.checkpoint": "cases/test_exported.py",
    "models.load": "models/test_quantised.py",
    "models.loss": "evaluation/test_evaluate.py",
    "models.peft_adapters": "recipe/test_algorithms.py",
    "network.https.server": "network/https/test_app.py",
    "network.peers.app": "network/peers/test_gossip.py",
    "network.peers.signed_upload": "network/peers/test_merge_rule.py",
    "network.peers.tls": "network/peers/test_gossip.py",
    "paper.dry_run": "paper/test_reproduce.py",
    "paper.run_records": "paper/test_reproduce.py",
    "paper.results": "paper/test_reproduce.py",
    "paper.outputs": "paper/test_reproduce.py",
    "paper.tables": "paper/test_reproduce.py",
    "randomness": "strategies/test_kseed.py",
    "recipe.own_code": "evaluation/test_objectives.py",
    "recipe.reading": "recipe/test_schema.py",
    "trainer.checkpoints": "trainer/test_trainer.py",
    "trainer.outputs": "trainer/test_trainer.py",
    "trainer.training": "trainer/test_trainer.py",
    "tuned.read_back": "cases/test_exported.py",
    "run.eps_ladder": "planning/test_tune.py",
    "run.setup": "recipe/test_algorithms.py",
    "run.simulation": "run/test_cohort.py",
    "run.progress": "run/test_time_left.py",
    "network.protocol.carrier": "network/protocol/server/test_clients.py",
    "strategies.checks": "strategies/test_kseed.py",
    "strategies.kseed_client": "test_round.py",
    "strategies.uploads": "strategies/test_kseed.py",
    "strategy": "test_round.py",
    "tuned.formats": "run/test_prerequisites.py",
    "planning.compare": "recipe/test_algorithms.py",
    "report.terminal": "cli/test_options.py",
    "report.results": "evaluation/test_metrics.py",
    "report.rounds": "run/test_round_metrics.py",
    "report.preview": "cli/test_look.py",
    "cli.certs": "network/protocol/test_certs.py",
    "planning.forecast": "cli/test_tune.py",
    "planning.pin": "network/protocol/server/test_rounds.py",
    "report.tables": "planning/test_tune.py",
    "weights.base": "weights/test_in_memory.py",
    "weights.modes": "weights/test_in_memory.py",
    "weights.layout": "weights/test_in_memory.py",
    "weights.lazy": "weights/test_streamed.py",
    "weights.side_by_side": "weights/test_streamed.py",
    "wire.records": "wire/test_codec.py",
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file; of a package, its own name."""
    found = {}
    for path in sorted((SOURCES / "fedkseed").rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, everywhere: bool) -> set[str]:
    """Modules of this package, and names of others, that a module imports: at its top, or anywhere in it."""
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in nodes(ast.parse(path.read_text()), everywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in modules() else base if base in modules() else base.partition(".")[0])
    return found - {name}


def nodes(tree: ast.Module, everywhere: bool):
    """All nodes, or those that run when the module is imported."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not everywhere:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                waiting += node.orelse
                continue
        waiting += ast.iter_child_nodes(node)


def place(name: str) -> int:
    """Where in the order a module stands; the package itself and its `__main__` stand on top."""
    parts = name.split(".")[1:]
    return ORDER.index(parts[0]) if parts and parts[0] != "__main__" else len(ORDER)


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_nothing_that_stands_above_it(name):
    own = {other for other in imported(name, everywhere=True) if other in modules()}
    version = {"fedkseed"} if "__version__" in modules()[name].read_text() else set()
    above = sorted(other for other in own - version if place(other) > place(name))
    assert not above, f"{name} imports {above}; the order is {' < '.join(ORDER)}"


def test_there_is_no_circle():
    graph = {name: imported(name, everywhere=True) & set(modules()) - {"fedkseed"} for name in modules()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_no_way_leads_from_a_light_module_to_pytorch(name):
    waiting, way = [f"fedkseed.{name}"], {f"fedkseed.{name}": ""}
    while waiting:
        here = waiting.pop()
        for other in imported(here, everywhere=False):
            assert other not in HEAVY, f"{way[here]} -> {here} -> {other}"
            if other in modules() and other not in way:
                way[other] = f"{way[here]} -> {here}"
                waiting.append(other)


def test_light_modules_are_imported_without_pytorch_and_without_one_another_s_weight():
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module('fedkseed.' + name)\n"
    code += "print([name for name in sys.modules if name in " + repr(HEAVY) + "])"
    command = [sys.executable, "-c", code, *WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], *[[c, "--help"] for c in ("rounds", "run", "init", "eval", "serve")]]
)
def test_help_needs_neither_pytorch_nor_pydantic(arguments):
    code = "import sys\nsys.argv[0] = 'fedkseed'\nfrom fedkseed.cli import app\n"
    code += "try:\n    app()\nexcept SystemExit: pass\n"
    code += "print('heavy:', [m for m in sys.modules if m in " + repr((*HEAVY, "pydantic", "flwr")) + "])"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: []\n")
    assert "Usage" in done.stdout


@pytest.mark.parametrize("name", [name for name, path in sorted(modules().items()) if path.name != "__init__.py"])
def test_every_module_has_a_test_file_of_its_name_or_a_line_here(name):
    parts = name.split(".")[1:]
    own = TESTS.joinpath(*parts[:-1], f"test_{parts[-1]}.py")
    known = TESTED_IN.get(".".join(parts))
    assert own.exists() != (known is not None), f"{own} or a line in TESTED_IN, and not both"
    assert known is None or (TESTS / known).exists(), f"there is no {known}"
