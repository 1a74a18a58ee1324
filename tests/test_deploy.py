"""The files of deploy/: units, an image and its composition, and the configuration of nginx that a server writes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedkseed.network.flower.server.processes import find_nginx, nginx_conf
from fedkseed.network.protocol.certs import make

UNITS = ("fedkseed-server.service", "fedkseed-client.service")


@pytest.fixture
def deploy(request) -> Path:
    return request.config.rootpath / "deploy"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_exposed_little(deploy, tmp_path, unit):
    shutil.copy(deploy / unit, tmp_path)
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"./{unit}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert float(exposure) < 3, done.stdout
    said = re.findall(r"says ([0-9.]+);", (deploy / unit).read_text())
    assert said == [exposure]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_keeps_what_it_needs(deploy, unit):
    """Kernels are compiled while the program runs, GPUs are devices, and state is written."""
    text = (deploy / unit).read_text()
    for line in ("MemoryDenyWriteExecute=yes", "PrivateDevices=yes", "ProcSubset=pid", "PrivateNetwork=yes"):
        assert f"\n{line}" not in text
    assert re.search(r"^ReadWritePaths=/srv/fedkseed/\w+$", text, re.MULTILINE)
    assert re.search(r"^User=fedkseed$", text, re.MULTILINE)


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


@pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed")
def test_nginx_takes_the_configuration(tmp_path):
    make(tmp_path / "keys", 1, ["localhost"], 2)
    path = tmp_path / "nginx.conf"
    path.write_text(nginx_conf(tmp_path, tmp_path / "keys", "127.0.0.1", 18443, 18000, 1 << 16))
    command = [str(find_nginx()), "-t", "-c", str(path), "-e", "stderr"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[warn]" not in done.stderr


def test_nginx_limits_what_an_address_may_do_before_a_key_is_looked_at(deploy):
    text = (deploy / "nginx.conf").read_text()
    for directive in (
        "client_max_body_size 65536;",
        "client_header_timeout 10s;",
        "client_body_timeout 10s;",
        "send_timeout 10s;",
        "limit_conn connections 128;",
        "limit_req zone=requests burst=400 delay=200;",
    ):
        assert directive in text
    assert "proxy_set_header x-real-ip $remote_addr;" in text, "a client can't name another address"
