"""Several hosts on this machine, with real networks between them, for tests of what happens to jobs on them.

    with Rig(folder, hosts=3) as rig:
        job = rig.start(["restore", "save 1", "pause a", "save 2"])
        job.await_begin("pause a")
        job.let_pass("a")
        rig.power_loss("h1")
        job.wait(["h0", "h2"], seconds=20)

A host is a set of namespaces (`host.py`). It has two networks, each a bridge: one for training, one for storage, where
the host "store" runs the benchmark's S3 server. A cut is a rule at the bridge: packets vanish, as in a network, and no
side is told. Nothing leaves the namespaces, and all ends with this process.

Needs Linux, root, and ip, ss, tc, nft, nsenter, unshare and setpriv (on Debian: iproute2, nftables, util-linux).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from dcp_remote.common.units import KiB, MiB
from tests.hosts.host import Host, HostProcess, shell
from tests.hosts.rank import Event, Task

Network: TypeAlias = Literal["train", "store"]
Direction: TypeAlias = Literal["from", "to"]

BOTH: tuple[Network, ...] = ("train", "store")

_ROOT = Path(__file__).parent.parent.parent
_PROGRAMS = ("ip", "nft", "nsenter", "setpriv", "ss", "tc", "unshare")
_SUBNETS: dict[Network, str] = {"train": "10.9.0", "store": "10.9.1"}
_DEVICES: dict[Network, str] = {"train": "eth0", "store": "eth1"}
_STORE_NUMBER, _MOVED_NUMBER, _PORT = 100, 101, 9000
_STORE_BYTES = 256 * MiB

# Size of each of the two tensors of a job: about eight seconds at 3 MB/s.
LARGE_BYTES = 12 * MiB

# Packets of a host vanish at the bridge, by the names of its devices there.
_CUTS = """
table bridge rig {
    set from { type ifname; }
    set to { type ifname; }
    chain forward {
        type filter hook forward priority 0
        iifname @from drop
        oifname @to drop
    }
}
"""
_REJECT = f"""
table inet rig {{
    chain input {{
        type filter hook input priority 0
        tcp dport {_PORT} reject with tcp reset
    }}
}}
"""

# Name of the socket of a host's leader, and a process in the output of `ss`.
_LINK = re.compile(r"@dcp_remote/[0-9a-f]{64}\b")
_PROCESS = re.compile(r"\bpid=(\d+)")

_POLL_SECONDS = 0.1

# Limit of what a scenario waits for: seconds on an idle machine, under torchrun a minute, on a busy one more.
_AWAIT_SECONDS_MAX = 180.0


def reason_to_skip() -> str | None:
    """Return why there can be no rig here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are network namespaces, which root makes on Linux"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, nftables, util-linux)"
    try:
        made = "ip link add veth0 type veth peer name veth1; ip link add bridge0 type bridge"
        limited = "tc qdisc replace dev veth0 root tbf rate 1mbit burst 16k latency 1s"
        shell(
            f"{made}; {limited}; echo '{_CUTS}' | nft -f -",
            *("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc"),
        )
    except OSError as error:
        return f"the kernel refuses: {error}"
    return None


class Job:
    """A job: one process on each of its hosts, a rank or torchrun.

    Attributes:
        processes: Processes, by the name of the host.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        """Write the task's file."""
        self.processes: dict[str, HostProcess] = {}
        self._folder, self._task = folder, task
        self.file = folder / f"{task.name}.json"
        self.file.write_text(json.dumps(asdict(task)))

    def log(self, host: str) -> Path:
        """Return the file of the output of the ranks on a host."""
        return self._folder / f"{self._task.name}.{host}.log"

    def events(self, operation: str | None = None, *kinds: str) -> list[Event]:
        """Return the events of all ranks, by time; those of one operation, or of some kinds."""
        lines = [
            line
            for path in self._folder.glob(f"{self._task.name}.*.jsonl")
            for line in path.read_text().splitlines(keepends=True)
        ]
        events = [Event(**json.loads(line)) for line in lines if line.endswith("\n")]
        return sorted(
            (one for one in events if operation in (None, one.operation) and (not kinds or one.kind in kinds)),
            key=lambda one: one.seconds,
        )

    def ended(self, operation: str) -> dict[str, Event]:
        """Return how the last performance of an operation ended, by host."""
        return {event.host: event for event in self.events(operation, "end", "error")}

    def await_begin(self, operation: str, ranks: int | None = None) -> None:
        """Wait until so many ranks, by default one on each host, have begun an operation."""
        wanted = len(self.processes) if ranks is None else ranks
        wait_until(lambda: len(self.events(operation, "begin")) >= wanted, f"{operation} on {wanted} ranks")

    def await_end(self, operation: str, ranks: int | None = None) -> None:
        """Wait until so many ranks, by default one on each host, have ended an operation."""
        wanted = len(self.processes) if ranks is None else ranks
        wait_until(lambda: len(self.events(operation, "end", "error")) >= wanted, f"the end of {operation}")

    def let_pass(self, pause: str) -> None:
        """Let all ranks pass a pause, once all have come to it."""
        self.await_begin(f"pause {pause}")
        (self._folder / f"{self._task.name}.passed.{pause}").touch()

    def wait(self, seconds: float, hosts: Iterable[str] | None = None) -> dict[str, int]:
        """Wait for the processes on some hosts, by default on all, and return their exit codes.

        Raises:
            AssertionError: A process still runs after so many seconds.
        """
        began = time.monotonic()
        codes: dict[str, int] = {}
        for host in self.processes if hosts is None else hosts:
            code = self.processes[host].join(began + seconds)
            assert code is not None, f"{host} did not end within {seconds:g} s"
            codes[host] = code
        return codes

    def rank_of(self, host: str, pid: int) -> int:
        """Return the rank of a process, by its number on its host."""
        (line, *_) = (self._folder / f"{self._task.name}.{host}.{pid}.jsonl").read_text().splitlines()
        return int(json.loads(line)["rank"])

    def show(self) -> str:
        """Return all events and the end of each log."""
        lines = [
            f"{one.seconds:.2f} {one.host} rank {one.rank} of {one.world_size} {one.operation}: {one.kind} {one.text}"
            + (f"; {one.differing} differ" if one.differing else "")
            for one in self.events()
        ]
        logs = {host: self.log(host) for host in self.processes}
        return "\n".join(
            [*lines, *(f"---- {host}\n{log.read_text()[-3000:]}" for host, log in logs.items() if log.exists())]
        )


class Rig:
    """Hosts h0, h1 and so on, and the host "store".

    Args:
        folder: Folder of all files, which every host sees.
        hosts: Number of hosts.

    Attributes:
        names: Names of the hosts, without the store's.
        jobs: All jobs.
        fault_seconds: Time of the last fault or of its end, in seconds since the epoch.
    """

    def __init__(self, folder: Path, hosts: int = 3) -> None:
        """Make the rig; `with` starts it."""
        self.names = [f"h{number}" for number in range(hosts)]
        self.fault_seconds = 0.0
        self._folder = folder
        self._hosts: dict[str, Host] = {}
        self.jobs: list[Job] = []
        self._network: Host | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the hosts and the store."""
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all."""
        self._end()

    # ---- jobs

    def start(
        self,
        operations: Sequence[str],
        *,
        name: str = "job",
        hosts: Sequence[str] | None = None,
        manager: Mapping[str, Any] | None = None,
        sharded_bytes: int = LARGE_BYTES,
        replicated_bytes: int = LARGE_BYTES,
        local_ranks: int = 1,
    ) -> Job:
        """Start a job of one or more ranks on each of some hosts, by default on all; the first is the host of rank 0.

        The processes of a host's further ranks are "h0.1" and so on.
        """
        assert len(set(operations)) == len(operations), "events are found by their operation"
        names = list(hosts or self.names)
        job = self._job(name, operations, manager, sharded_bytes, replicated_bytes)
        for rank in range(local_ranks * len(names)):
            host, local = names[rank // local_ranks], rank % local_ranks
            group = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(local_ranks * len(names))}
            group |= {"LOCAL_WORLD_SIZE": str(local_ranks), "MASTER_ADDR": names[0], "MASTER_PORT": str(self._port)}
            self._run(job, host, "tests.hosts.rank", [str(job.file)], group, name=f"{host}.{local}" if local else host)
        return job

    def start_torchrun(
        self,
        operations: Sequence[str],
        *,
        nodes: str,
        hosts: Sequence[str] | None = None,
        restarts: int = 0,
        manager: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Start a job by torchrun on each of some hosts, by default on all; the first has the rendezvous.

        Args:
            operations: Operations of each rank.
            nodes: Number of hosts, or the least and the largest number, such as "2:3".
            hosts: Names of the hosts.
            restarts: Number of restarts after a failure of a rank.
            manager: Arguments of the `CheckpointManager`.
            environment: Environment variables of torchrun and its ranks.
        """
        job = self._job("job", operations, manager, KiB, KiB)
        for host in hosts or self.names:
            self.join_torchrun(job, host, nodes=nodes, restarts=restarts, environment=environment)
        return job

    def join_torchrun(
        self, job: Job, host: str, *, nodes: str, restarts: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start torchrun on one more host of a job; arguments as of `start_torchrun`."""
        program = ["--module", "tests.hosts.rank", str(job.file)]
        self._run_torchrun(job, host, ["--nnodes", nodes, "--max-restarts", str(restarts)], program, environment or {})

    def start_doctor(self, name: str, *, ranks: int) -> Job:
        """Start `dcp-remote doctor` on all hosts by torchrun, by so many ranks on each."""
        job = self._job(name, [], None, KiB, KiB)
        command = "import sys; from dcp_remote.cli import main; sys.exit(main(sys.argv[1:]))"
        program = ["--no-python", sys.executable, "-c", command, "doctor", "s3://runs/run"]
        environment = {"AWS_ENDPOINT_URL": f"http://store:{_PORT}", "AWS_REGION": "us-east-1"}
        environment |= {"AWS_ACCESS_KEY_ID": "rig", "AWS_SECRET_ACCESS_KEY": "rig"}
        size = ["--nnodes", str(len(self.names)), "--nproc-per-node", str(ranks)]
        for host in self.names:
            self._run_torchrun(job, host, size, program, environment)
        return job

    def _run_torchrun(
        self, job: Job, host: str, size: list[str], program: list[str], environment: Mapping[str, str]
    ) -> None:
        # Of the dead host's keep-alive, the last call for more hosts, and the look for new ones; by default a minute.
        times = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=10"
        arguments = [*size, "--monitor-interval", "0.5"]
        arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"h0:{self._port}", "--rdzv-id", "job"]
        arguments += ["--rdzv-conf", times, "--local-addr", host, *program]
        self._run(job, host, "torch.distributed.run", arguments, environment)

    # ---- faults

    def cut(
        self, *hosts: str, networks: Iterable[Network] = BOTH, directions: Iterable[Direction] = ("from", "to")
    ) -> None:
        """Let packets from or to some hosts vanish; "store" is the store's host."""
        self._note(f"cut {hosts} {networks} {directions}")
        self._change_cuts("add", hosts, networks, directions)

    def heal(
        self, *hosts: str, networks: Iterable[Network] = BOTH, directions: Iterable[Direction] = ("from", "to")
    ) -> None:
        """End cuts."""
        self._note(f"heal {hosts} {networks} {directions}")
        self._change_cuts("delete", hosts, networks, directions)

    def power_loss(self, host: str) -> None:
        """Let a host vanish: no packet of its dying processes gets out."""
        self.cut(host)
        self._hosts[host].kill()

    def freeze(self, *hosts: str) -> None:
        """Stop all processes of some hosts."""
        self._note(f"freeze {hosts}")
        for host in hosts:
            self._hosts[host].signal_all("STOP")

    def thaw(self, *hosts: str) -> None:
        """Let all processes of some hosts go on."""
        self._note(f"thaw {hosts}")
        for host in hosts:
            self._hosts[host].signal_all("CONT")

    def signal(self, host: str, pid: int, name: str) -> None:
        """Send a signal to one process of a host, by its number there."""
        self._note(f"SIG{name} to {pid} on {host}")
        self._hosts[host].shell(f"kill -{name} {pid}")

    def terminate(self, host: str) -> None:
        """Send SIGTERM to all processes of a host, as at its shutdown."""
        self._note(f"SIGTERM on {host}")
        self._hosts[host].signal_all("TERM")

    def limit(self, network: Network, megabits: float, *hosts: str) -> None:
        """Limit what hosts, by default all but the store, send and receive, to a rate in Mbit/s."""
        rate = f"root tbf rate {round(megabits * 1000)}kbit burst {max(32, round(megabits))}k latency 400ms"
        for host in hosts or self.names:
            self._hosts[host].shell(f"tc qdisc replace dev {_DEVICES[network]} {rate}")
            self._in_network(f"tc qdisc replace dev {host}-{network} {rate}")

    def stop_store(self) -> None:
        """Refuse all connections to the store, old ones as well; stored objects are kept."""
        self._note("the store is down")
        self._hosts["store"].shell(f"echo '{_REJECT}' | nft -f -")

    def continue_store(self) -> None:
        """End `stop_store`."""
        self._note("the store is up")
        self._hosts["store"].shell("nft delete table inet rig")

    def move_store(self) -> None:
        """Give the store's name another address; nothing answers at the old one."""
        self._note("the store moves")
        subnet, device = _SUBNETS["store"], _DEVICES["store"]
        self._write_names(_MOVED_NUMBER)
        old, new = f"{subnet}.{_STORE_NUMBER}/24", f"{subnet}.{_MOVED_NUMBER}/24"
        self._hosts["store"].shell(
            f"ip addr add {new} dev {device}; ip addr del {old} dev {device}; ip addr replace {new} dev {device}"
        )

    # ---- measures

    def leader(self, host: str) -> tuple[int, int]:
        """Return the process that speaks for the ranks of a host, by its number there, and how many it is linked to."""
        lines = [line for line in self._hosts[host].shell("ss -xapH").splitlines() if _LINK.search(line)]
        (listening,) = [line for line in lines if " LISTEN " in line]
        found = _PROCESS.search(listening)
        assert found is not None, listening
        return int(found[1]), len(lines) - 1

    def transferred_bytes(self, host: str, network: Network, direction: Direction) -> int:
        """Return how many bytes came from a host, or went to it."""
        statistics = json.loads(self._in_network(f"ip -s -j link show dev {host}-{network}"))[0]["stats64"]
        return int(statistics["rx" if direction == "from" else "tx"]["bytes"])

    def await_transfer(self, host: str, network: Network, direction: Direction, size_bytes: int = MiB) -> None:
        """Wait until so many bytes more have come from a host, or gone to it."""
        before = self.transferred_bytes(host, network, direction)
        wait_until(
            lambda: self.transferred_bytes(host, network, direction) - before >= size_bytes,
            f"{size_bytes} bytes {direction} {host}",
        )

    # ---- start and end

    def _start(self) -> None:
        names = [*self.names, "store"]
        self._write_names(_STORE_NUMBER)
        self._network = Host("network", self._names_file("network"))
        self._in_network("".join(f"ip link add br-{net} type bridge; ip link set br-{net} up;" for net in BOTH))
        self._in_network(f"echo '{_CUTS}' | nft -f -")
        for number, name in enumerate(names):
            self._hosts[name] = Host(name, self._names_file(name))
            for network in ("store",) if name == "store" else BOTH:
                self._connect(name, network, _STORE_NUMBER if name == "store" else 10 + number)
        command = [sys.executable, "-m", "tests.benchmark.server.server", "--bytes", str(_STORE_BYTES)]
        command += ["--folder", str(self._folder), "--bucket", "runs", "--address", "0.0.0.0", "--port", str(_PORT)]
        inside = ["nsenter", f"--target={self._hosts['store'].init}", "--net", "--mount", "--uts", "--pid"]
        self._server = subprocess.Popen(
            [*inside, *command], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
        )
        assert self._server.stdout is not None
        assert b"port" in self._server.stdout.readline(), "the store did not start"

    def _end(self) -> None:
        for host in self._hosts.values():
            host.kill()
        for job in self.jobs:
            for process in job.processes.values():
                process.join(time.monotonic() + _AWAIT_SECONDS_MAX)
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
        if self._network is not None:
            self._network.kill()

    def _connect(self, name: str, network: Network, number: int) -> None:
        outer, device, host = f"{name}-{network}", _DEVICES[network], self._hosts[name]
        self._in_network(f"ip link add {outer} type veth peer name {device} netns {host.init}")
        self._in_network(f"ip link set {outer} master br-{network} up")
        host.shell(f"ip addr add {_SUBNETS[network]}.{number}/24 dev {device}; ip link set {device} up")

    def _names_file(self, name: str) -> Path:
        return self._folder / f"hosts.{name}"

    def _write_names(self, store_number: int) -> None:
        """Write every host's `/etc/hosts`."""
        lines = ["127.0.0.1 localhost", f"{_SUBNETS['store']}.{store_number} store"]
        lines += [f"{_SUBNETS['train']}.{10 + number} {name}" for number, name in enumerate(self.names)]
        for name in [*self.names, "store", "network"]:
            self._names_file(name).write_text("\n".join(lines) + "\n")

    def _in_network(self, script: str) -> str:
        assert self._network is not None
        # Not in its namespace of processes: hosts are named by their process ids here.
        return shell(script, "nsenter", f"--net=/proc/{self._network.init}/ns/net")

    def _change_cuts(
        self, verb: str, hosts: Iterable[str], networks: Iterable[Network], directions: Iterable[Direction]
    ) -> None:
        commands = [
            f"{verb} element bridge rig {direction} {{ {host}-{network} }}"
            for host in hosts
            for network in networks
            if (host, network) != ("store", "train")
            for direction in directions
        ]
        self._in_network("\n".join(["nft -f - <<'END'", *commands, "END"]))

    def _job(
        self,
        name: str,
        operations: Sequence[str],
        manager: Mapping[str, Any] | None,
        sharded_bytes: int,
        replicated_bytes: int,
    ) -> Job:
        task = Task(
            name=name,
            operations=operations,
            manager=manager or {},
            sharded_bytes=sharded_bytes,
            replicated_bytes=replicated_bytes,
        )
        self.jobs.append(Job(self._folder, task))
        return self.jobs[-1]

    def _run(
        self,
        job: Job,
        host: str,
        module: str,
        arguments: list[str],
        environment: Mapping[str, str],
        *,
        name: str | None = None,
    ) -> None:
        folder = self._folder / f"{host}.tmp"
        folder.mkdir(exist_ok=True)
        complete = _environment() | {"TMPDIR": str(folder), "HOME": str(folder), **environment}
        name = name or host
        job.processes[name] = HostProcess(self._hosts[host], complete, job.log(name), module, arguments)

    @property
    def _port(self) -> int:
        return 29500 + len(self.jobs)

    def _note(self, text: str) -> None:
        self.fault_seconds = time.time()
        print(f"{self.fault_seconds:.2f} {text}")  # noqa: T201  # shown by pytest if the scenario fails


def _environment() -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(_ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": _DEVICES["train"],
        "AWS_EC2_METADATA_DISABLED": "true",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition; raise if it does not become true in time."""
    deadline = time.monotonic() + _AWAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(_POLL_SECONDS)
