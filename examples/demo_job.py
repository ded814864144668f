"""What the demo starts: training jobs under torchrun, and a slow link between them and the store."""

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
FOLLOW_SECONDS = 30.0  # what the other nodes get to end when one has failed
STOP_SECONDS = 10.0  # torchrun passes SIGTERM on to its ranks and waits for them; then everything is killed
LOG_LINES_SHOWN = 30  # of a node that failed
TORCHRUN_SPEAKS = "torch/distributed/elastic/"
LOG_LINES_TOLD = ("loaded step", "saved step", "Rank ")  # of the first node, as it prints them
RELAY_CHUNK_BYTES = 64 << 10


class JobFailedError(Exception):
    """A job did not do what the demo needs; the message holds the end of its log."""


class Job:
    """One training job: a torchrun for each node, each in a folder of its own that is also its temporary folder.

    torchrun puts every rank into a session of its own, so killing torchrun's process group would leave the ranks
    alive: they tell their process ids in their first event.
    """

    def __init__(
        self, name: str, *, nodes: Sequence[int], work: Path, output: Path, environment: Mapping[str, str]
    ) -> None:
        """See the class. `nodes` gives the number of ranks of each."""
        self.name, self.nodes, self.work = name, list(nodes), work
        self.events_folder = output / "events" / name
        self._logs = [output / "logs" / f"{name}-node-{node}.log" for node in range(len(nodes))]
        self._environment = dict(environment)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._suspended = False
        self._shown_events, self._shown_lines = 0, 0

    @property
    def ranks(self) -> int:
        """The world size."""
        return sum(self.nodes)

    def start(self, arguments: Sequence[str]) -> None:
        """Start every node; returns at once."""
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
                # gloo and torchrun listen where the host's name points to; the demo stays on loopback.
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
                        start_new_session=True,  # ctrl-C is for the demo, which then stops its jobs in order
                    )
                )

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank noted so far."""
        return read_events(self.events_folder, rank)

    def step(self) -> int:
        """The last step that rank 0 finished; 0 before the first."""
        return max((event["step"] for event in self.events() if event["event"] == "step"), default=0)

    def log(self, node: int = 0) -> list[str]:
        """What a node has printed so far; a last line that is not whole yet is left out."""
        text = self._logs[node].read_text(encoding="utf-8", errors="replace")
        return [line.rstrip() for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, patience_seconds: float) -> None:
        """Show the progress until all nodes have ended.

        Raises:
            JobFailedError: A node failed, or the job took longer than `patience_seconds`.
        """
        if any(self.ended(patience_seconds)):
            raise JobFailedError(f"{self.name} failed.{self._log_tail()}")

    def ended(self, patience_seconds: float) -> list[int]:
        """Show the progress until all nodes have ended, or one has failed and the others had time to follow.

        Returns:
            The exit statuses.

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
        """For jobs that should still be running.

        Raises:
            JobFailedError: A node has ended.
        """
        if any(process.poll() is not None for process in self._processes):
            raise JobFailedError(f"{self.name} ended too early.{self._log_tail()}")

    def kill(self) -> None:
        """SIGKILL for every process of every node, as when the machines lose their power; returns when all are dead."""
        # torchrun first: it would notice that its ranks died, and act.
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
        """SIGTERM for a node: torchrun passes it on to its ranks, and waits for them."""
        self._processes[node].terminate()

    def suspend(self) -> None:
        """SIGSTOP for every process of every node, as when machines hang."""
        self._suspended = True
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT: they go on as if nothing had happened."""
        self._suspended = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)
        for pid in self._rank_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End the job in whatever state it is; does nothing to one that has ended."""
        running = [process for process in self._processes if process.poll() is None]
        if not running:
            return
        if self._suspended:
            self.kill()
            return
        for process in running:
            process.terminate()  # torchrun ends its ranks, those included that have not told their process id yet
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def alive(self) -> bool:
        """Whether any process of the job, torchrun or rank, is still running."""
        return any(process.poll() is None for process in self._processes) or any(map(_running, self._rank_pids()))

    def show_progress(self) -> None:
        """Print what rank 0 noted, and what the manager logged, since the last call."""
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
            # What ranks have said, without torchrun's summary of how they ended.
            said = list(itertools.takewhile(lambda line: TORCHRUN_SPEAKS not in line, self.log(node)))
            tails.append(f"\n-- {path.name}:\n" + "\n".join(said[-LOG_LINES_SHOWN:]))
        return "".join(tails)


def _running(pid: int) -> bool:
    """Whether a process is there and not merely waiting for init to collect it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError):
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc/self").exists()  # Linux: it has gone just now. Elsewhere: kill() has told already


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class SlowLink:
    """A TCP relay on loopback that passes a given number of bytes per second, over all connections and directions."""

    def __init__(self, target_url: str, *, bytes_per_second: float) -> None:
        """See the class; relays while it is entered."""
        target = urlsplit(target_url)
        self._target = (target.hostname, target.port or 80)
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0  # when everything that was let through so far will have passed
        self._stack = ExitStack()

    @property
    def endpoint_url(self) -> str:
        """Where to connect instead of to the target."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        """Listen on an ephemeral port."""
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        threading.Thread(target=self._accept, name="slow-link", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listen no longer; what is connected ends with its peers."""
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
        with suppress(OSError):  # either peer may vanish; the demo is about that
            while data := source.recv(RELAY_CHUNK_BYTES):
                self._wait_for_turn(len(data))
                sink.sendall(data)
        for end in (source, sink):  # wakes the other direction
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait_for_turn(self, size_bytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / self._bytes_per_second
            wait_seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_seconds))
