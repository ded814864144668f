"""Jobs of the campaign: ranks under torchrun, the events that they report, and the signals that they get."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from tests.campaign.trainee import Orders
from tests.support.figures import count

Event: TypeAlias = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent.parent

POLL_SECONDS = 0.02

# Limit of waits without one of their own. A rank imports torch for seconds, on a busy machine for many.
PATIENCE_SECONDS = 120.0

# Time that torchrun gives the other ranks to end by themselves once one has failed.
SHUTDOWN_SECONDS = 40

_LOG_LINES_SHOWN = 60


class Job:
    """A job under torchrun, in a folder of its own; always ended by `end`."""

    def __init__(
        self,
        number: int,  # number among all jobs of the campaign, from 0
        folder: Path,
        *,
        # Variables beside this process's, without any cloud configuration of the machine.
        environment: Mapping[str, str],
        arguments: Sequence[str],  # arguments of the trainee
        world_size: int,
        gate: int,  # last step that the job may make until `order` moves it
        last: int | None = None,  # last step of all; None is not decided yet
    ) -> None:
        self.number, self.folder, self.world_size = number, folder, world_size
        folder.mkdir()
        self._orders = Orders(harness=os.getpid(), gate=gate)
        if last is not None:
            self._orders = replace(self._orders, last=last)
        self._orders.write(folder)
        self._log = folder / "log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        torchrun += ["--nproc-per-node", str(world_size), "--shutdown-timeout", str(SHUTDOWN_SECONDS)]
        trainee = ["-m", "tests.campaign.trainee", "--folder", str(folder), "--job", str(number), *arguments]
        with self._log.open("wb") as log:
            self.torchrun = subprocess.Popen(
                [*torchrun, *trainee],
                cwd=ROOT,
                env={
                    **clean,
                    **environment,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                    "TMPDIR": str(folder),
                    "CUDA_VISIBLE_DEVICES": "",
                    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # ---- events

    def events(self, rank: int, kind: str | None = None) -> list[Event]:
        """Return a rank's events so far, without an incomplete last line."""
        file = self.folder / f"rank-{rank}.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in events if kind in (None, one["event"])]

    def last(self, rank: int, kind: str) -> Event:
        events = self.events(rank, kind)
        assert events, f"rank {rank} never told of {kind!r}{self.story()}"
        return events[-1]

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        pid = self.last(rank, "started")["pid"]
        assert isinstance(pid, int)
        return pid

    def story(self) -> str:
        """Return all events and the end of the log, for a failure's message."""
        told = [
            f"rank {rank}: {json.dumps({k: v for k, v in event.items() if k not in ('whole', 'own', 'at')})}"
            for rank in self.ranks
            for event in self.events(rank)[-12:]
        ]
        log = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return "\n".join([f"\n-- job {self.number}:", *told, "-- its log:", *log])

    # ---- orders

    @property
    def gate(self) -> int:
        """Return the last step that the job may make."""
        return self._orders.gate

    def order(self, **changes: Any) -> None:
        """Move the gate, and tell ranks which faults to act out."""
        self._orders = replace(self._orders, **changes)
        self._orders.write(self.folder)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll a condition; an assertion fails after two minutes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                self._print_stacks()
                raise AssertionError(f"{what}: not within {PATIENCE_SECONDS:.0f} s{self.story()}")
            time.sleep(POLL_SECONDS)

    def wait_idle(self) -> None:
        """Wait until the ranks are at the gate, their last save committed; an assertion fails if the job ends."""

        def idle() -> bool:
            assert self.torchrun.poll() is None, f"the job ended{self.story()}"
            for rank in self.ranks:
                failed = [one for one in self.events(rank) if one["event"] in ("failed", "save failed")]
                assert not failed, f"rank {rank} failed{self.story()}"
            return all(any(one["step"] == self.gate for one in self.events(rank, "idle")) for rank in self.ranks)

        self.wait_until(idle, f"the ranks come to step {self.gate}")

    def wait_told(self, rank: int, kind: str) -> Event:
        """Wait until a rank has reported such an event, and return it."""
        self.wait_until(lambda: bool(self.events(rank, kind)), f"rank {rank} tells of {kind!r}")
        return self.last(rank, kind)

    def wait_saving(self, step: int) -> None:
        """Wait until the coordinator is about to save this step."""
        self.wait_until(
            lambda: any(one["step"] >= step for one in self.events(0, "saving")), f"step {step} is being saved"
        )

    # ---- signals

    def kill(self, rank: int) -> None:
        """Send a rank SIGKILL; return at once."""
        count("ranks killed")
        with suppress(ProcessLookupError):
            os.kill(self.pid(rank), signal.SIGKILL)

    def kill_torchrun(self) -> None:
        """Send torchrun SIGKILL: the ranks live on, without the host of their store."""
        self.torchrun.kill()
        self.torchrun.wait()

    def kill_all(self) -> None:
        """Kill torchrun and all ranks, as a loss of power does."""
        self.torchrun.kill()  # first: it would notice that its ranks die
        for rank in self.ranks:
            self.kill(rank)
        self.torchrun.wait()

    def stop(self, rank: int) -> None:
        """Send a rank SIGSTOP."""
        count("ranks stopped")
        os.kill(self.pid(rank), signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        """Send a rank SIGCONT."""
        with suppress(ProcessLookupError):
            os.kill(self.pid(rank), signal.SIGCONT)

    def terminate(self, rank: int) -> None:
        """Send a rank SIGTERM."""
        os.kill(self.pid(rank), signal.SIGTERM)

    def alive(self, rank: int) -> bool:
        """Return whether a rank's process exists and is no zombie."""
        try:
            stat = Path(f"/proc/{self.pid(rank)}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def wait_ended(self, ranks: Sequence[int] | None = None) -> None:
        """Wait until these ranks have ended, by default all of them and torchrun as well."""
        some = self.ranks if ranks is None else ranks
        self.wait_until(lambda: not any(map(self.alive, some)), f"ranks {list(some)} end")
        if ranks is None:
            self.wait_until(lambda: self.torchrun.poll() is not None, "torchrun ends")

    def end(self) -> None:
        """End all processes of the job by force."""
        self.torchrun.kill()
        self.torchrun.wait()
        for rank in self.ranks:
            if self.events(rank, "started") and self.alive(rank):
                with suppress(ProcessLookupError):
                    os.kill(self.pid(rank), signal.SIGKILL)

    def _print_stacks(self) -> None:
        for rank in self.ranks:
            if self.events(rank, "started") and self.alive(rank):
                with suppress(ProcessLookupError):
                    os.kill(self.pid(rank), signal.SIGUSR1)
        time.sleep(0.5)
