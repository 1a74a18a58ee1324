"""Each place of Flower's that compat.py works around is there: an upgrade that moves one fails here, and by name."""

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from importlib.metadata import entry_points
from inspect import getsource, signature
from pathlib import Path

import httpx
import pytest
import uvicorn
from flwr.app import Message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE, ErrorCode
from flwr.supercore import constant
from flwr.supercore.exit import ExitCode
from flwr.supercore.task_identity import TaskIdentity

import fedkseed
from fedkseed import FedKSeedError
from fedkseed.network.flower import compat
from fedkseed.network.flower.compat import require_flower
from fedkseed.network.flower.messages import packed
from fedkseed.network.protocol.carrier import MAX_MESSAGE

SAID = {  # what is looked for in Flower, and who says it
    compat.STUCK[0]: "flwr.supercore.retry.http_retry",
    compat.STUCK[1]: "flwr.supercore.retry.http_retry",
    compat.LEFT_OVER: "flwr.supernode.start_client_internal",
    compat.REGISTERED: "flwr.server.superlink.linkstate.sql_linkstate",
    compat.UNREGISTERED: "flwr.supercore.error.catalog",
    "Exit Code: {": "flwr.supercore.exit.exit",
    "FLWR_TELEMETRY_ENABLED": "flwr.supercore.telemetry",
    "FLWR_DISABLE_UPDATE_CHECK": "flwr.supercore.constant",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "flwr.common.constant",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "flwr.supercore.superexec.run_superexec",
}


def test_no_other_file_names_a_version_of_flower():
    named = re.compile(r"\b(flwr|flower)\W{0,4}1\.\d|\b1\.4[01]\b", re.IGNORECASE)
    package = Path(fedkseed.__file__).parent
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".toml")]
    found = [str(path.relative_to(package)) for path in files if named.search(path.read_text())]
    assert found == ["network/flower/compat.py"]


def test_without_flower_the_commands_tell_what_to_install(monkeypatch):
    require_flower()
    monkeypatch.setattr(compat, "version", lambda name: "1.99.0")
    with pytest.raises(FedKSeedError, match=r"Flower 1.99.0 is installed.*pip install 'fedkseed\[flower\]'"):
        require_flower()

    def missing(name):
        raise compat.PackageNotFoundError(name)

    monkeypatch.setattr(compat, "version", missing)
    with pytest.raises(FedKSeedError, match=r"needs Flower; install it with: pip install 'fedkseed\[flower\]'"):
        require_flower()


def test_importing_fedkseed_and_its_commands_needs_no_flower():
    modules = "fedkseed.cli, fedkseed.cli.flower, fedkseed.network.flower.compat, fedkseed.run.simulation"
    code = f"import sys; sys.modules['flwr'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", SAID)
def test_flower_still_says_what_is_looked_for(text):
    assert text in getsource(import_module(SAID[text]))


def test_every_variable_of_flowers_that_is_set_is_looked_for():
    assert {name for name in compat.QUIET if name.startswith("FLWR_")} <= SAID.keys()
    assert f"Exit Code: {ExitCode.SUPERNODE_CONNECTION_ERROR}" == compat.NO_ENTRY


def test_flower_pulls_replies_where_that_is_guarded():
    theirs = import_module(compat.PULLS)
    assert {compat.PULL, compat.INFLATE} <= {*theirs.HttpGrid.pull_messages.__code__.co_names}
    assert [*signature(getattr(theirs, compat.PULL)).parameters][:2] == ["object_ids", "pull_object_fn"]
    assert "max_time" in signature(getattr(theirs, compat.PULL)).parameters
    assert issubclass(theirs.ObjectPullError, Exception)


def test_flower_installs_and_loads_an_app_where_ours_is_put_in():
    theirs = import_module(compat.INSTALLS)
    assert {compat.INSTALL, compat.LOAD} <= {*theirs.run_clientapp.__code__.co_names}


def test_the_superlink_calls_what_is_put_in():
    """tests/network/flower/server/test_superlink.py shows that it has its effect."""
    router = getsource(import_module("flwr.superlink.routers.fleet.router"))
    assert "fleet_handlers.push_messages(request=request, state=state)" in router
    assert "fleet_handlers.activate_node(request=request, state=state)" in router
    assert "*extensions.get_middleware()," in getsource(import_module("flwr.superlink.main")), "the first of all"
    nodes = import_module(compat.NODES)
    assert compat.AUTHENTICATE in nodes.NodeAuthMiddleware.dispatch.__code__.co_names
    assert httpx.codes.SERVICE_UNAVAILABLE in import_module("flwr.supercore.retry.http_retry")._RETRYABLE_STATUS_CODES


def test_an_executor_starts_processes_where_tokens_are_hidden():
    started = getsource(import_module(compat.STARTS).SubprocessExecutor.launch)
    assert "subprocess.Popen(args)" in started
    assert f'"{compat.TOKEN_FLAG}",\n            spec.token,' in started


@pytest.mark.parametrize(
    ("module", "function", "guard"),
    [
        (compat.HANDLERS, compat.ACTIVATE, lambda: compat.guard_fleet(1, bool, print, print)),
        (compat.NODES, compat.AUTHENTICATE, lambda: compat.guard_fleet(1, bool, print, print)),
        (compat.STARTS, "SubprocessExecutor", compat.hide_tokens),
    ],
)
def test_a_superlink_or_an_executor_that_cannot_be_guarded_is_not_started(monkeypatch, module, function, guard):
    monkeypatch.delattr(import_module(module), function)
    before = getattr(import_module(compat.MIDDLEWARES), compat.MIDDLEWARE)
    with pytest.raises(FedKSeedError, match="this version of Flower was not tested"):
        guard()
    assert getattr(import_module(compat.MIDDLEWARES), compat.MIDDLEWARE) is before


@pytest.mark.parametrize("guard", [lambda: compat.guard_pulls(1.0), lambda: compat.run_only(None)])
def test_a_place_that_is_gone_is_refused_and_nothing_is_replaced(monkeypatch, guard):
    for module, function in ((compat.PULLS, compat.INFLATE), (compat.INSTALLS, compat.LOAD)):
        monkeypatch.delattr(import_module(module), function)
    left = {compat.PULLS: compat.PULL, compat.INSTALLS: compat.INSTALL}
    before = [getattr(import_module(module), function) for module, function in left.items()]
    with pytest.raises(FedKSeedError, match=r"flwr\.\S+ has no \w+ or \w+: this version of Flower was not tested"):
        guard()
    assert [getattr(import_module(module), function) for module, function in left.items()] == before


def test_every_program_of_an_executor_is_one_that_flower_installs():
    installed = {entry.name for entry in entry_points(group="console_scripts") if entry.value.startswith("flwr.")}
    assert compat.CLIENTAPP in compat.task_programs()
    assert {*compat.task_programs()} <= installed


def test_flowers_numbers_are_the_ones_that_are_reckoned_with():
    assert compat.ERRORS.keys() == {
        ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
        ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
        ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
        ErrorCode.NODE_UNAVAILABLE,
        ErrorCode.CLIENT_APP_CRASHED,
    }
    assert compat.GONE == ErrorCode.NODE_UNAVAILABLE
    assert (compat.AHEAD, compat.BEHIND) == (constant.SYSTEM_TIME_TOLERANCE, constant.TIMESTAMP_TOLERANCE)
    assert compat.CONNECTED == HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL


def test_the_superlink_keeps_messages_and_connections_as_is_reckoned_with():
    with closing(sqlite3.connect(":memory:")) as database:
        assert database.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) >= MAX_MESSAGE
    assert {"sqlite"} == constant.SQL_ALLOWED_DIALECTS
    state = import_module("flwr.server.superlink.linkstate.sql_linkstate").SqlLinkState
    assert "delivered_at" in getsource(state._claim_message_ins_rows), "a message is handed out once"
    assert "available_until" in getsource(state._check_stored_messages), "and no more when its time is over"
    assert "timeout_keep_alive" not in getsource(import_module("flwr.superlink.cli.flower_superlink"))
    assert uvicorn.Config("").timeout_keep_alive == compat.KEEP_ALIVE
    assert f"{import_module('flwr.superlink.routers.fleet.router').router.prefix}/" == compat.FLEET


def test_a_message_can_be_made_and_named_in_one_process(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)  # and put back after the test
    with pytest.raises(RuntimeError, match="TaskIdentity"):
        Message(packed(b""), 1, "train")
    compat.name_task()
    message = Message(packed(b""), 1, "train")
    assert compat.name_message(message) == message.metadata.message_id == message.object_id


def test_a_reply_has_the_parts_that_are_reckoned_with():
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    compat.name_task()
    assert len(get_all_nested_objects(Message(packed(b"an answer"), 1, "train"))) == compat.PARTS
