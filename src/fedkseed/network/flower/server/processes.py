"""The processes of a server: Flower's SuperLink on loopback, the executor of our ServerApp, nginx on the public port.

    nginx        host:port, TLS: passes on the path /v1/fleet/, which clients need, and nothing else
    SuperLink    127.0.0.1, TLS: one port for clients, for the commands that start runs, and for executors; it takes
                 nothing of clients but answers to what they were sent (superlink.py)
    superexec    starts the ServerApp in a process of its own, which outlives a SuperLink that is restarted

All of them, and the ServerApp, end when this process does. The folder `flower/` of a run's directory can be deleted
except for `state.db`, in which the SuperLink keeps the clients' keys.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from string import Template

import tomli_w

from ....errors import FedKSeedError
from ....files import border, exclusive, locked, read_table, write_atomically, write_table
from ....run.loop import Result
from ....run.progress import Progress
from ....run.store import Store
from ...protocol import certs
from ...protocol.addresses import disk_of, is_loopback
from ...protocol.server.client_numbers import ClientNumbers
from ...protocol.signatures import ServerSigning
from ..children import GRACE, Child, accepts, environment, flwr, free_port, secret, superexec, wait_until, write_program
from ..compat import ADDRESS, FLEET, KEEP_ALIVE, REGISTERED, UNREGISTERED
from .status_file import JournalReader

START = 180.0  # seconds for a process to be ready: importing PyTorch on a busy machine takes more than 60
FRUITLESS = 3  # restarts of processes without a finished round between them, before the server gives up
LOOK = 0.2  # seconds between two looks at the journal and the processes
CONNECTION = "server"  # the name of the SuperLink in Flower's configuration
KEYS = 2.0  # seconds between two looks at the clients' keys
NGINX = Template("""\
# Made by `fedkseed server`: clients reach $fleet of Flower's SuperLink and nothing else of it.
daemon off;
${user}worker_processes auto;
pid $folder/nginx.pid;
error_log stderr warn;
worker_rlimit_nofile 8192;  # two a client that is being answered
events { worker_connections 4096; }
http {
  access_log off;
  server_tokens off;
  client_max_body_size $largest;  # what a client of this recipe has to send
  client_body_buffer_size 64k;
  client_header_timeout 10s;  # of a handshake, too
  client_body_timeout 10s;    # between two parts of a body
  send_timeout 10s;
  keepalive_timeout 30s;
  reset_timedout_connection on;
  large_client_header_buffers 4 4k;  # Flower's are 800 bytes
  limit_conn_zone $$binary_remote_addr zone=connections:10m;
  limit_req_zone $$binary_remote_addr zone=requests:10m rate=50r/s;
  limit_conn_status 503;  # with 503, a SuperNode asks again later
  limit_req_status 503;
  client_body_temp_path $folder/nginx-body;
  proxy_temp_path $folder/nginx-proxy;
  fastcgi_temp_path $folder/nginx-other;
  uwsgi_temp_path $folder/nginx-other;
  scgi_temp_path $folder/nginx-other;
  upstream superlink {
    server 127.0.0.1:$port;
    keepalive 64;          # else a TLS handshake a request
    keepalive_timeout ${kept}s;  # the SuperLink ends them after $ended
  }
  server {
    limit_conn connections 128;  # bodies are kept before Flower looks at their keys
    limit_req zone=requests burst=400 delay=200;  # a client sends 0.4 a second, and 13 more in a round
    listen $address ssl;
    ssl_certificate $certs/server.pem;
    ssl_certificate_key $certs/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    location $fleet {
      limit_except POST { deny all; }
      proxy_pass https://superlink$fleet;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header $real $$remote_addr;
      proxy_ssl_verify on;
      proxy_ssl_trusted_certificate $certs/ca.pem;
      proxy_ssl_name localhost;
      proxy_read_timeout 300s;
    }
    location / { return 403; }
  }
}
""")


def find_nginx() -> str | None:
    """The path of nginx, which Debian installs outside the path of ordinary users; None if it is not installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


class ServerProcesses:
    """The processes of a server.

    Args:
        directory: directory of the run.
        keys: directory made by `fedkseed certs`.
        host, port: address that clients connect to.
        largest: bytes of the largest request of a client.
    """

    def __init__(self, directory: Path, keys: Path, host: str, port: int, largest: int, progress: Progress) -> None:
        self.directory, self.keys = directory.resolve(), keys.resolve()
        self.folder = self.directory / "flower"
        self.host, self.port, self.largest, self.progress = host, port, largest, progress
        self.nginx = find_nginx()
        if self.nginx is None and not is_loopback(host):
            raise FedKSeedError(
                f"nginx is not installed, and without it whoever reaches {host}:{port} could start programs on the "
                "clients; install it (Debian: apt-get install nginx), or serve this machine alone: --host 127.0.0.1"
            )
        # Where nginx listens at the public port, the SuperLink takes any other.
        self.inner = port if self.nginx is None else free_port()
        self.env = environment(self.folder / "home", [self.folder / "bin"])
        self.children: dict[str, Child] = {}
        self._fruitless, self._rekeyed = 0, False
        self._seen: dict[str, tuple[int, int]] = {}  # the clients' public keys: name -> time and size
        self._noticed = 0  # bytes of the SuperLink's notices that were shown

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start all processes, and end them after the `with` block.

        Raises:
            FedKSeedError: a certificate has expired, a port is taken, or a process does not start.
        """
        if warning := certs.check(self.keys):
            self.progress.note(warning)
        if not self._begun:
            certs.public_keys(self.keys)  # refuses a gap
        with border(f"can't make {self.folder}"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / "home").mkdir(mode=0o700, exist_ok=True)
        taken = f"another server works on {self.directory}; stop it first"
        with exclusive(self.folder / "server.lock", taken), ExitStack() as stack:
            end = time.monotonic() + GRACE
            while locked(self.directory / "lock"):  # perhaps by the ServerApp of a server that was killed just now
                if time.monotonic() > end:
                    raise FedKSeedError(f"another process works on {self.directory}; stop it first")
                time.sleep(LOOK)
            if not (self.folder / "state.db").exists():  # without it, the SuperLink knows no key
                self._nodes.unlink(missing_ok=True)
            self._configure()
            if self._open():
                raise FedKSeedError(f"port {self.port} of {self.host} is taken; choose another with --port")
            self._launch(stack, "SuperLink", self._superlink())
            self._ready("SuperLink", self.inner)
            self._register()
            self._launch(stack, "superexec", self._superexec())
            if self.nginx is not None:
                self._launch(stack, "nginx", [self.nginx, "-c", str(self.folder / "nginx.conf"), "-e", "stderr"])
                wait_until(self._open, START, self.children["nginx"])
            yield

    def run(self) -> Result:
        """Start the run in Flower, and follow the run to its end; processes that die are started again.

        Raises:
            FedKSeedError: the run ended with an error, processes die again and again, or the disk is full.
        """
        with disk_of(self.directory):
            return self._run()

    def _run(self) -> Result:
        while True:
            self._revive(0)
            self._ready("SuperLink", self.inner)
            self._stop_runs()
            follower = JournalReader(self.directory, self.progress)
            follower.path.unlink(missing_ok=True)
            started = flwr(["run", str(self.folder / "app"), CONNECTION], self.env, START)
            try:
                result = self._follow(follower)
            finally:
                follower.close()
            if result is not None:
                return result
            if self._rekeyed:
                self._rekeyed = False
                continue
            self._again(f"the ServerApp of Flower's run {started.get('run-id')} has died", follower.committed)

    def _follow(self, follower: JournalReader) -> Result | None:
        """The result of a run; None if its ServerApp has died, or was ended because clients have new keys."""
        begin, committed = time.monotonic(), 0
        looked = begin
        while True:
            self._show_notices()
            if time.monotonic() - looked > KEYS:
                looked = time.monotonic()
                if follower.pid is not None and self._new_keys():
                    # It reads the keys when it starts, and goes on from the last finished round.
                    with suppress(ProcessLookupError):
                        os.kill(follower.pid, signal.SIGKILL)
                    self._rekeyed = True
            if (result := follower.read()) is not None:
                return result
            if self._revive(follower.committed - committed):
                committed = follower.committed
            if follower.pid is None and time.monotonic() - begin > START:
                raise FedKSeedError(f"Flower did not start the ServerApp in {START:g} s; see {self.folder}/*.log")
            if follower.pid is not None and not _alive(follower.pid):
                return follower.read()
            time.sleep(LOOK)

    def _revive(self, committed: int) -> bool:
        """Start dead processes again; returns whether there were any.

        Args:
            committed: number of rounds finished since the last restart.
        """
        dead = [child for child in self.children.values() if not child.running]
        for child in dead:
            self._again(child.ended(), committed)
            child.stop()  # ends the rest of its group: nginx's workers would keep the port
            child.start()
        return bool(dead)

    def _again(self, what: str, committed: int) -> None:
        """Report that something is started again, and wait a little.

        Args:
            what: the event, in words.
            committed: number of rounds finished since the last restart.

        Raises:
            FedKSeedError: too many restarts in a row were without a finished round between them.
        """
        self._fruitless = 0 if committed else self._fruitless + 1
        if self._fruitless > FRUITLESS:
            raise FedKSeedError(f"{what}; no round was finished since it was last started: see {self.folder}/*.log")
        self.progress.note(f"{what}; it is started again")
        time.sleep(self._fruitless)

    def _launch(self, stack: ExitStack, name: str, command: list[str]) -> None:
        child = Child(name, command, self.folder / f"{name.lower()}.log", self.env)
        child.start()
        self.children[name] = child
        stack.callback(child.stop)

    def _ready(self, name: str, port: int) -> None:
        wait_until(lambda: accepts("127.0.0.1", port), START, self.children[name])

    def _open(self) -> bool:
        """Whether a process listens at the public port."""
        return accepts("127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host, self.port)  # noqa: S104 - nothing is bound

    def _superlink(self) -> list[str]:
        return [
            sys.executable, "-m", "fedkseed.network.flower.server.superlink", str(self.largest), str(self._notices),
            "--host", "127.0.0.1", "--port", str(self.inner),
            "--ssl-ca-certfile", str(self.keys / "ca.pem"), "--ssl-certfile", str(self.keys / "server.pem"),
            "--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth", "--isolation", "process",
            "--superexec-auth-secret-file", str(secret(self.folder / "superexec.secret")),
            "--database", str(self.folder / "state.db"), "--disable-runtime-dependency-installation",
        ]  # fmt: skip

    def _superexec(self) -> list[str]:
        return [
            *superexec(), "--runtime-api-address", f"127.0.0.1:{self.inner}",
            "--root-certificates", str(self.keys / "ca.pem"),
            "--superexec-auth-secret-file", str(secret(self.folder / "superexec.secret")),
            "--parent-pid", str(os.getpid()),
        ]  # fmt: skip

    def _configure(self) -> None:
        """Write the configuration files of the processes."""
        connection = {"address": f"127.0.0.1:{self.inner}", "root-certificates": str(self.keys / "ca.pem")}
        table = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        write_atomically(self.folder / "home" / "config.toml", tomli_w.dumps(table).encode())
        write_program(self.folder / "bin", "flwr-serverapp", "fedkseed.network.flower.server.executor")
        self._notices.unlink(missing_ok=True)
        written = nginx_conf(self.folder, self.keys, self.host, self.port, self.inner, self.largest)
        write_atomically(self.folder / "nginx.conf", written.encode())
        with border(f"can't make {self.folder / 'app'}"):
            (self.folder / "app").mkdir(exist_ok=True)
        # Replaced for every run, because `flwr run` writes into the file.
        write_atomically(self.folder / "app" / "pyproject.toml", app(self.directory).encode())

    @property
    def _nodes(self) -> Path:
        """The file with the nodes of the clients' keys, `registered` and `revoked`: public key -> node."""
        return self.folder / "nodes.json"

    @property
    def _notices(self) -> Path:
        """The file in which the SuperLink writes what whoever runs the server should know of."""
        return self.folder / "notices.jsonl"

    @property
    def _begun(self) -> int:
        """The number of clients of a run that has begun; 0 if there is none."""
        made = (self.directory / "recipe.toml").exists()
        return ClientNumbers.registered(self.directory) if made and Store(self.directory).begun else 0

    def _register(self) -> bool:
        """Let the SuperLink know the clients' keys as they are now; their order decides the clients' numbers.

        A key that was removed or replaced is refused from its next request on, and can't come back. A run that has
        begun continues with the number of clients that it began with.

        Returns:
            Whether clients have other keys than before.

        Raises:
            FedKSeedError: two clients have one key, or a key is one that was revoked.
        """
        self._seen = self._public()
        if begun := self._begun:
            keys = [self.keys / f"client-{number}.pub" for number in range(begun)]
            if len(self._seen) > begun:
                self.progress.note(
                    f"the run began with {begun} clients; those that have come since take part in new runs"
                )
        else:
            keys = certs.public_keys(self.keys)
        known: dict[str, dict[str, int]] = {"registered": {}, "revoked": {}}
        if self._nodes.exists():
            known = read_table(self._nodes)
        registered, revoked = known["registered"], known["revoked"]
        texts = [key.read_text().strip() if key.exists() else "" for key in keys]
        given = [text for text in texts if text]
        if len({*given}) < len(given):
            raise FedKSeedError(f"two clients of {self.keys} have the same key; each needs one of its own")
        before = ClientNumbers.nodes(self.directory)
        for text in [text for text in registered if text not in given]:
            node = registered[text]
            self.progress.note(f"revoking the key of {self._whose(node)}")
            try:
                flwr(["supernode", "unregister", str(node), CONNECTION], self.env)
            except FedKSeedError as error:
                if UNREGISTERED not in str(error):  # by a server that was killed before it wrote that down
                    raise
            revoked[text] = registered.pop(text)
            write_table(self._nodes, known)
        for number, (key, text) in enumerate(zip(keys, texts, strict=True)):
            if text in revoked:
                raise FedKSeedError(f"the key {key} was revoked, and can't come back; make another for client {number}")
            if text and text not in registered:
                self.progress.note(f"registering the key of client {number}")
                registered[text] = self._node(key, {*registered.values(), *revoked.values()})
                write_table(self._nodes, known)
        nodes = [registered[text] if text else before[number] for number, text in enumerate(texts)]
        ClientNumbers.register(self.directory, nodes, [number for number, text in enumerate(texts) if not text])
        ServerSigning.write(self.folder, self.keys, texts)
        return bool(before) and dict(enumerate(nodes)) != before

    def _public(self) -> dict[str, tuple[int, int]]:
        """The clients' public keys, and when each was written, in which size."""
        found = {path.name: path.stat() for path in self.keys.glob("client-*.pub")}
        return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}

    def _new_keys(self) -> bool:
        """Take up changes of the clients' keys while the server runs; returns whether a client has another key."""
        try:
            return self._public() != self._seen and self._register()
        except (FedKSeedError, OSError) as error:  # a key that is half written, too: it is read again when it is whole
            self.progress.note(f"the keys in {self.keys} have changed, and can't be taken up: {error}")
            return False

    def _show_notices(self) -> None:
        if not self._notices.exists():
            return
        with self._notices.open("rb") as file:
            file.seek(self._noticed)
            for line in file.read().splitlines(keepends=True):
                if line.endswith(b"\n"):  # else it is being written
                    self._noticed += len(line)
                    notice = json.loads(line)
                    self.progress.note(f"{self._whose(notice['node'])} {notice['text']}")

    def _whose(self, node: int) -> str:
        numbers = {known: number for number, known in ClientNumbers.nodes(self.directory).items()}
        return f"client {numbers[node]}" if node in numbers else f"node {node}"

    def _node(self, key: Path, others: set[int]) -> int:
        """Register a key, and return its node.

        A server may have been killed after the registration, before it wrote the node down. Then the key's node is the
        only one that Flower lists and `others` lacks.
        """
        try:
            return int(flwr(["supernode", "register", str(key), CONNECTION], self.env)["node-id"])
        except FedKSeedError as error:
            listed = flwr(["supernode", "list", CONNECTION], self.env)["nodes"]
            unknown = {int(node["node-id"]) for node in listed} - others
            if REGISTERED not in str(error) or len(unknown) != 1:
                raise
            return unknown.pop()

    def _stop_runs(self) -> None:
        """End earlier runs that Flower takes for unfinished: their ServerApps are gone."""
        for known in flwr(["list", CONNECTION], self.env)["runs"]:
            if not str(known["status"]).startswith("finished"):
                flwr(["stop", str(known["run-id"]), CONNECTION], self.env)


def nginx_conf(folder: Path, keys: Path, host: str, port: int, inner: int, largest: int) -> str:
    """The configuration of nginx; deploy/nginx.conf is such a file."""
    return NGINX.substitute(
        user="user root;\n" if os.geteuid() == 0 else "",  # else nginx could not write to root's directory of the run
        folder=folder, certs=keys, port=inner, largest=largest, fleet=FLEET, kept=KEEP_ALIVE - 1, ended=KEEP_ALIVE,
        real=ADDRESS, address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
    )  # fmt: skip


def app(directory: Path) -> str:
    """The Flower app of a run, whose ServerApp and ClientApp are those of the fedkseed installed on each machine."""
    table: Mapping = {
        "project": {"name": "fedkseed-run", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedkseed",
                    "components": {
                        "serverapp": "fedkseed.network.flower.server.app:app",
                        "clientapp": "fedkseed.network.flower.client.app:app",
                    },
                    "config": {"run": str(directory)},
                }
            }
        },
    }
    return tomli_w.dumps(table)


def _alive(pid: int) -> bool:
    """Whether a process is running; one that has ended and was not waited for (a zombie) is not."""
    status = Path(f"/proc/{pid}/stat")
    if status.parent.parent.exists() and Path("/proc/self/stat").exists():
        try:
            return status.read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
