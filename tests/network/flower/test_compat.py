"""What is reckoned with in Flower is there: an upgrade that changes it fails here, and by name."""

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from inspect import getsource
from pathlib import Path

import pytest
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.supercore import constant
from flwr.supercore.task_identity import TaskIdentity

import fedkseed
from fedkseed.network.flower import compat
from fedkseed.network.flower.messages import packed
from fedkseed.network.protocol.carrier import MAX_MESSAGE

from .loopback import name_message, name_task


def test_no_other_file_names_a_version_of_flower():
    named = re.compile(r"\b(flwr|flower)\W{0,4}1\.\d|\b1\.4[01]\b", re.IGNORECASE)
    package = Path(fedkseed.__file__).parent
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".toml")]
    found = [str(path.relative_to(package)) for path in files if named.search(path.read_text())]
    assert found == ["network/flower/compat.py"]


def test_importing_fedkseed_and_its_commands_needs_no_flower():
    modules = "fedkseed.cli, fedkseed.network.flower.compat, fedkseed.run.simulation"
    code = f"import sys; sys.modules['flwr'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_flowers_numbers_are_the_ones_that_are_reckoned_with():
    assert compat.ERRORS.keys() == {
        ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED,
    }  # fmt: skip
    assert compat.NODE_GONE == ErrorCode.NODE_UNAVAILABLE


def test_the_superlink_keeps_messages_as_is_reckoned_with():
    with closing(sqlite3.connect(":memory:")) as database:
        assert database.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) >= MAX_MESSAGE
    assert {"sqlite"} == constant.SQL_ALLOWED_DIALECTS
    state = import_module("flwr.server.superlink.linkstate.sql_linkstate").SqlLinkState
    assert "delivered_at" in getsource(state._claim_message_ins_rows), "a message is handed out once"
    assert "available_until" in getsource(state._check_stored_messages), "and no more when its time is over"


def test_a_message_can_be_made_and_named_in_one_process(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)  # and put back after the test
    with pytest.raises(RuntimeError, match="TaskIdentity"):
        Message(packed(b""), 1, "train")
    name_task()
    message = Message(packed(b""), 1, "train")
    assert name_message(message) == message.metadata.message_id == message.object_id
