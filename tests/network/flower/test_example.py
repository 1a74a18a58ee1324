"""The commands of examples/flower/README.md, as they stand there, with a small model in place of its own. Minutes."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ..https.network import kill, processes
from ..ports import free_port, wait_for
from .conftest import POLICY, Setting

pytestmark = pytest.mark.network

DIGEST = re.compile(r"digest of the tuned model\W+([0-9a-f]{64})")
LIMIT = 300.0  # seconds of each command


class Example:
    """A folder like a checkout, and the commands of the README in it.

    Args:
        section: of the README.
    """

    def __init__(self, folder: Path, setting: Setting, root: Path, section: str) -> None:
        self.folder, self.started = folder, list[subprocess.Popen]()
        shutil.copytree(root / "examples", folder / "examples")
        (folder / "examples" / "flower" / "policy.toml").write_text(POLICY)
        for name in ("recipes", "parts", "flower-home"):
            (folder / name).mkdir()
        text = setting.text("minimum = 3", count='split = "files"\ncount = 3', steps="steps = 60")
        (folder / "recipes" / "network.toml").write_text(text)
        for number, file in enumerate(setting.files):
            shutil.copy(file, folder / "parts" / f"0{number}.jsonl")
        readme = (root / "examples" / "flower" / "README.md").read_text().partition(f"## {section}\n")[2]
        blocks = "\n".join(re.findall(r"^    (.*)$|^$", readme.partition("\n## ")[0], re.MULTILINE))
        self.commands = [command.strip() for command in re.split(r"(?<!\\)\n", blocks) if command.strip()]
        self.port, self.node_ports, self.model = free_port(), [free_port() for _ in range(3)], setting.model

    def command(self, begin: str) -> str:
        """The command of the README that begins so, with this test's ports and model."""
        (found,) = [command for command in self.commands if command.startswith(begin)]
        found = found.replace("8000", str(self.port)).replace("policy=", f"model='{self.model}' policy=")
        if begin == "flower-superlink":
            found += f" --port {self.port}"
        return found

    def run(self, begin: str) -> str:
        done = subprocess.run(
            ["sh", "-c", self.command(begin)], cwd=self.folder, env=self.environment(), capture_output=True, text=True,
            timeout=LIMIT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, begin: str, number: int = 0) -> subprocess.Popen:
        command = self.command(begin).replace("909$((4 + K))", str(self.node_ports[number]))
        with self.log(begin, number).open("ab") as log:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {command}"], cwd=self.folder, env=self.environment(K=str(number)),
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def log(self, begin: str, number: int = 0) -> Path:
        return self.folder / f"{begin}-{number}.log"

    def said(self, begin: str, text: str, number: int = 0) -> bool:
        log = self.log(begin, number)
        return log.exists() and text in log.read_text(errors="replace")

    def environment(self, **more: str) -> dict[str, str]:
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
        quiet |= {"COLUMNS": "300", "TERM": "dumb"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **quiet, "PATH": path, "FLWR_HOME": str(self.folder / "flower-home"), **more}

    @property
    def logs(self) -> str:
        return "\n".join(f"=== {log} ===\n{log.read_text()[-3000:]}" for log in sorted(self.folder.rglob("*.log")))


@contextmanager
def example(folder: Path, setting: Setting, root: Path, section: str) -> Iterator[Example]:
    """The README's folder; all that was started in it ends with the test."""
    made = Example(folder, setting, root, section)
    try:
        yield made
    except BaseException:
        print(made.logs)
        raise
    finally:
        for process in made.started:
            with suppress(ProcessLookupError):  # of one that was refused and has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        kill(processes("", folder))


def test_the_commands_of_the_example_end_with_the_digest_of_one_process(setting, tmp_path, request):
    with example(tmp_path, setting, request.config.rootpath, "On one machine") as readme:
        readme.run("printf")
        readme.start("flower-superlink")
        wait_for(lambda: readme.said("flower-superlink", "Uvicorn running"), LIMIT, lambda: readme.logs)
        for number in range(3):
            readme.start("flower-supernode", number)
        over_flower = readme.run("flwr run")
        assert DIGEST.findall(over_flower) == DIGEST.findall(readme.run("fedkseed run")), over_flower


def test_a_supernode_that_is_killed_and_comes_back_does_not_show(setting, tmp_path, request):
    """With TLS, keys and signatures. Flower counts the old one as connected for a minute, and refuses it so long."""
    with example(tmp_path, setting, request.config.rootpath, "With TLS, keys and signatures") as readme:
        readme.run("fedkseed certs")
        readme.run("printf")
        readme.start("flower-superlink")
        wait_for(lambda: readme.said("flower-superlink", "Uvicorn running"), LIMIT, lambda: readme.logs)
        readme.run("for K in 0 1 2")
        nodes = [readme.start("flower-supernode", number) for number in range(3)]
        run = readme.start("flwr run")
        wait_for(lambda: readme.said("flwr run", "round 1: clients"), LIMIT, lambda: readme.logs)
        os.killpg(nodes[2].pid, signal.SIGKILL)
        kill(processes("", tmp_path / "nodes" / "2"))

        def back() -> bool:
            if readme.started[-1].poll() is not None or readme.started[-1] is run:
                readme.start("flower-supernode", 2)
            return readme.said("flwr run", "digest of the tuned model")

        wait_for(back, LIMIT, lambda: readme.logs)
        assert run.wait(LIMIT) == 0
        log = readme.log("flwr run").read_text()
        assert "client 2 did not answer" in log
        readme.commands.append("fedkseed run recipes/network.toml --output alone")
        assert DIGEST.findall(log) == DIGEST.findall(readme.run("fedkseed run"))
        assert "3 rounds" in readme.run("fedkseed verify")
