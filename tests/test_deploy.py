"""The files of deploy/: a unit, an image and its composition. test_proxy.py has the configuration of nginx."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from fedkseed.cli import app

UNIT = "fedkseed@.service"


@pytest.fixture
def deploy(request) -> Path:
    return request.config.rootpath / "deploy"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_exposed_little(deploy, tmp_path):
    shutil.copy(deploy / UNIT, tmp_path / "fedkseed@serve.service")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "./fedkseed@serve.service"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert float(exposure) < 3, done.stdout
    assert re.findall(r"says ([0-9.]+);", (deploy / UNIT).read_text()) == [exposure]


def test_the_unit_keeps_what_it_needs(deploy):
    """Kernels are compiled while the program runs, GPUs are devices, and state is written."""
    text = (deploy / UNIT).read_text()
    for line in ("MemoryDenyWriteExecute=yes", "PrivateDevices=yes", "ProcSubset=pid", "PrivateNetwork=yes"):
        assert f"\n{line}" not in text
    assert re.search(r"^ReadWritePaths=/srv/fedkseed/\w+$", text, re.MULTILINE)
    assert re.search(r"^User=fedkseed$", text, re.MULTILINE)


def test_what_is_deployed_are_commands_with_options_that_they_have(deploy):
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]
    lines = [service["command"] for service in services.values()]
    lines += zip(
        ("serve", "join"), re.findall(r"^#     ARGUMENTS=(.*)$", (deploy / UNIT).read_text(), re.M), strict=True
    )
    for line in lines:
        name, *words = (line if isinstance(line, str) else " ".join(line)).split()
        options = {option for parameter in get_command(app).commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
    assert {"serve", "join", "shard", "peer"} <= get_command(app).commands.keys()


def test_the_job_of_several_nodes_runs_and_resumes_by_options_that_there_are(deploy):
    text = (deploy / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", deploy / "slurm.sh"], check=True)
    asked = {*re.findall(r"work=\((\w+)", text)}
    assert asked == {"run", "resume"}
    for name in asked:
        options = {option for parameter in get_command(app).commands[name].params for option in parameter.opts}
        assert {"--engine", *re.findall(rf"work=\({name}.*?(--\w+)", text)} <= options


def test_images_are_named_by_their_digests_and_run_as_a_user(deploy):
    lines = (deploy / "Dockerfile").read_text().splitlines()
    images = [line for line in lines if line.startswith("FROM ")]
    assert images
    assert all(re.fullmatch(r"FROM \S+@sha256:[0-9a-f]{64}", image) for image in images)
    (user,) = [number for number, line in enumerate(lines) if line.startswith("USER ")]
    assert lines[user] == "USER fedkseed"
    assert user < next(number for number, line in enumerate(lines) if line.startswith("ENTRYPOINT"))


def test_containers_have_no_privileges(deploy):
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]
    assert len(services) == 4
    for service in services.values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
    states = [
        volume.split(":")[0] for service in services.values() for volume in service["volumes"] if "state" in volume
    ]
    assert len({*states}) == len(states) == 3, "a client's state is its own"
