"""Training jobs under torchrun, and a slow link between them and the store; for the demo."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from watch import read_events

SCRIPT = Path(__file__).resolve().parent / "train_fsdp2.py"
STEPS_PER_LINE = 10  # of progress
POLL_SECONDS = 0.2
FOLLOW_SECONDS = 30.0  # time for the other nodes to end after one has failed
STOP_SECONDS = 10.0  # time for torchrun to pass SIGTERM on and wait; then all processes are killed
LOG_LINES_SHOWN = 30  # last lines of a node that failed
TORCHRUN_SPEAKS = "torch/distributed/elastic/"
LOG_LINES_TOLD = ("loaded step", "saved step", "Rank ")  # of the first node, as it prints them
RELAY_CHUNK_BYTES = 64 << 10


class JobFailedError(Exception):
    """A job failed, or did not reach the state that the demo needs; the message may hold the end of its log."""


class Job:
    """One training job: a torchrun for each node, each in a folder of its own that is also its temporary folder.

    torchrun puts every rank into a session of its own, so killing torchrun's process group would leave the ranks
    alive. Their process ids are in their first events.
    """

    def __init__(
        self, name: str, *, nodes: Sequence[int], work: Path, output: Path, environment: Mapping[str, str]
    ) -> None:
        """Store the settings; nothing is started. `nodes` gives the number of ranks of each node."""
        self.name, self.nodes, self.work = name, list(nodes), work
        self.events_folder = output / "events" / name
        self._logs = [output / "logs" / f"{name}-node-{node}.log" for node in range(len(nodes))]
        self._environment = dict(environment)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._suspended = False
        self._shown_events, self._shown_lines = 0, 0

    @property
    def ranks(self) -> int:
        """World size."""
        return sum(self.nodes)

    def start(self, arguments: Sequence[str]) -> None:
        """Start every node, without waiting."""
        port = _free_port()
        for node, ranks in enumerate(self.nodes):
            folder = self.work / f"node-{node}"
            folder.mkdir(parents=True)
            log = self._logs[node]
            log.parent.mkdir(parents=True, exist_ok=True)
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            torchrun += ["--nnodes", str(len(self.nodes)), "--node-rank", str(node), "--nproc-per-node", str(ranks)]
            torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
            environment = self._environment | {
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(folder),
                # gloo listens on the address of the host's name by default; the demo stays on loopback.
                "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
                "CUDA_VISIBLE_DEVICES": "",
            }
            with log.open("wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        [*torchrun, str(SCRIPT), *arguments],
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops its jobs in order
                    )
                )

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the events of a rank so far."""
        return read_events(self.events_folder, rank)

    def step(self) -> int:
        """Return the last step that rank 0 finished; 0 before the first."""
        return max((event["step"] for event in self.events() if event["event"] == "step"), default=0)

    def log(self, node: int = 0) -> list[str]:
        """Return the lines that a node has printed so far, without a last line that is incomplete."""
        text = self._logs[node].read_text(encoding="utf-8", errors="replace")
        return [line.rstrip() for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, patience_seconds: float) -> None:
        """Print the progress until all nodes have ended.

        Raises:
            JobFailedError: A node failed, or the job took longer than `patience_seconds`.
        """
        if any(self.ended(patience_seconds)):
            raise JobFailedError(f"{self.name} failed.{self._log_tail()}")

    def ended(self, patience_seconds: float) -> list[int]:
        """Print the progress until all nodes have ended; 30 s after one has failed, raise.

        Returns:
            The exit statuses of the nodes.

        Raises:
            JobFailedError: The job took longer than `patience_seconds`.
        """
        deadline = time.monotonic() + patience_seconds
        while any(process.poll() is None for process in self._processes):
            self.show_progress()
            if any(process.poll() for process in self._processes):
                deadline = min(deadline, time.monotonic() + FOLLOW_SECONDS)
            if time.monotonic() > deadline:
                raise JobFailedError(f"{self.name} did not end in time.{self._log_tail()}")
            time.sleep(POLL_SECONDS)
        self.show_progress()
        return [process.returncode for process in self._processes]

    def raise_if_ended(self) -> None:
        """Raise unless all nodes are running.

        Raises:
            JobFailedError: A node has ended.
        """
        if any(process.poll() is not None for process in self._processes):
            raise JobFailedError(f"{self.name} ended too early.{self._log_tail()}")

    def kill(self) -> None:
        """Send SIGKILL to every process of every node, as if the machines lost power; return when all are dead."""
        # torchrun is killed first, since it would react to the death of its ranks.
        for process in self._processes:
            process.kill()
        for pid in self._rank_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        deadline = time.monotonic() + STOP_SECONDS
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def terminate(self, node: int) -> None:
        """Send SIGTERM to a node: torchrun passes it on to its ranks, and waits for them."""
        self._processes[node].terminate()

    def suspend(self) -> None:
        """Send SIGSTOP to every process of every node, as if the machines hung."""
        self._suspended = True
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Send SIGCONT to every process of every node."""
        self._suspended = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)
        for pid in self._rank_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End the job in any state; do nothing if it has ended."""
        running = [process for process in self._processes if process.poll() is None]
        if not running:
            return
        if self._suspended:
            self.kill()
            return
        for process in running:
            process.terminate()  # torchrun also ends ranks that have not written their process id yet
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def alive(self) -> bool:
        """Return whether any process of the job, torchrun or rank, is still running."""
        return any(process.poll() is None for process in self._processes) or any(map(_running, self._rank_pids()))

    def show_progress(self) -> None:
        """Print the events of rank 0, and the log lines of the manager, since the last call."""
        events, lines = self.events(), self.log()
        for event in events[self._shown_events :]:
            if event["event"] == "step" and event["step"] % STEPS_PER_LINE == 0:
                print(f"   step {event['step']:>4}  loss {event['loss']:.3f}", flush=True)
        for line in lines[self._shown_lines :]:
            if line.startswith(LOG_LINES_TOLD):
                print(f"   {line}", flush=True)
        self._shown_events, self._shown_lines = len(events), len(lines)

    def _rank_pids(self) -> list[int]:
        starts = [event for rank in range(self.ranks) for event in self.events(rank) if event["event"] == "started"]
        return [start["pid"] for start in starts]

    def _log_tail(self) -> str:
        tails = []
        for node, path in enumerate(self._logs):
            # The output of the ranks, without torchrun's summary of how they ended.
            said = list(itertools.takewhile(lambda line: TORCHRUN_SPEAKS not in line, self.log(node)))
            tails.append(f"\n-- {path.name}:\n" + "\n".join(said[-LOG_LINES_SHOWN:]))
        return "".join(tails)


def _running(pid: int) -> bool:
    """Return whether a process runs, and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError):
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc/self").exists()  # on Linux the process has just ended; elsewhere kill() found it


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class SlowLink:
    """TCP relay on loopback with a bandwidth in bytes per second, shared by all connections and directions."""

    def __init__(self, target_url: str, *, bytes_per_second: float) -> None:
        """Store the target; the relay runs while the context is entered."""
        target = urlsplit(target_url)
        self._target = (target.hostname, target.port or 80)
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0  # time at which the bytes admitted so far have passed
        self._stack = ExitStack()

    @property
    def endpoint_url(self) -> str:
        """URL to use instead of the target's."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        """Listen on an ephemeral port."""
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        threading.Thread(target=self._accept, name="slow-link", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening; open connections end with their peers."""
        self._stack.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._join, args=(client, server), name="slow-link-pair", daemon=True).start()

    def _join(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            back = threading.Thread(target=self._relay, args=(server, client), name="slow-link-back", daemon=True)
            back.start()
            self._relay(client, server)
            back.join()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # either peer may be killed
            while data := source.recv(RELAY_CHUNK_BYTES):
                self._wait_for_turn(len(data))
                sink.sendall(data)
        for end in (source, sink):  # ends the other direction
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait_for_turn(self, size_bytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / self._bytes_per_second
            wait_seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_seconds))
