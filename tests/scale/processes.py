"""Many real ranks on one machine: processes forked from one that has imported everything, and one TCPStore for all.

    with Ranks(512, hosts=64) as ranks:
        measured = ranks.run(phases.gather, 4)

A fork shares its parent's memory, so that 512 ranks take some 10 GiB in place of 130. torch's backend is "fake", whose
collectives do nothing: the ranks meet in the store alone, as the package does.

Hosts are modelled: ranks of one modelled host have one name of a host and one address on the loopback interface, and
only they share a host link. All end with the process that started them, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch._dynamo  # imported here, or by each rank when it makes its first DTensor
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

from tests.scale.counting import Kind, OperationCounter
from tests.scale.hosts import model_host

# Time for the processes to end by themselves before they are killed.
_LEAVE_SECONDS = 5.0

# Ranks need this long to read that they are to begin, beside a part that grows with their number.
_LEAD_SECONDS = 0.1
_LEAD_SECONDS_PER_RANK = 0.001

# prctl(2): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """Cost of one phase of all ranks.

    Attributes:
        seconds: From the common beginning until the last rank has ended.
        operations: Operations at the store of all ranks, by kind.
        beats: Heartbeats of all ranks.
        value_bytes: Bytes of values that ranks have sent to the store, and got from it.
        connections: Connections to the store, at the end.
        store_cpu_seconds: CPU of the process of the store.
        coordinator_cpu_seconds: CPU of rank 0.
        ranks_cpu_seconds: CPU of all ranks.
        values: Value that each rank returned.
    """

    seconds: float
    operations: Counter[Kind]
    beats: int
    value_bytes: int
    connections: int
    store_cpu_seconds: float
    coordinator_cpu_seconds: float
    ranks_cpu_seconds: float
    values: list[Any]

    def count(self, **wanted: object) -> int:
        """Return the operations of those kinds whose attributes are as wanted."""
        return sum(
            count
            for kind, count in self.operations.items()
            if all(getattr(kind, name) == value for name, value in wanted.items())
        )


@dataclass(frozen=True, slots=True)
class _Done:
    """Report of a rank on a phase; `failure` is the traceback if it raised."""

    ended: float
    cpu_seconds: float
    operations: Counter[Kind]
    beats: int
    value_bytes: int
    value: Any
    failure: str | None


@dataclass(slots=True)
class Rank:
    """Process of a rank: it keeps objects from one phase to the next in `kept`, by name."""

    rank: int
    world_size: int
    host: int
    kept: dict[str, Any]


class RanksFailedError(Exception):
    """A rank raised, died, or did not come to its end in time."""


class Ranks:
    """Processes that do one phase after another; a context manager. The caller has one thread.

    Args:
        world_size: Number of ranks.
        hosts: Number of modelled hosts, each with as many ranks; ranks of one host follow each other.
        timeout_seconds: Longest time of one phase, after which all processes are killed.
    """

    def __init__(self, world_size: int, *, hosts: int, timeout_seconds: float = 120.0) -> None:
        """Start nothing; the block does."""
        if world_size % hosts:
            message = f"{world_size} ranks cannot be shared out evenly to {hosts} hosts"
            raise ValueError(message)
        self.world_size, self.hosts = world_size, hosts
        self._timeout_seconds = timeout_seconds
        self._processes: list[tuple[int, Connection]] = []

    def __enter__(self) -> Self:
        try:
            self._fork(_serve_store)
            port = self._processes[0][1].recv()
            for rank in range(self.world_size):
                place = Rank(rank, self.world_size, rank * self.hosts // self.world_size, {})
                self._fork(partial(_serve_rank, place, port))
            self._wait_for(self._processes[1:], time.monotonic() + self._timeout_seconds)
        except BaseException:
            self._end(seconds=0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(seconds=0.0 if error is not None else _LEAVE_SECONDS)

    @property
    def pids(self) -> list[int]:
        """Process ids of the store and the ranks."""
        return [pid for pid, _ in self._processes]

    def run(self, phase: Callable[..., Any], *args: object) -> Measured:
        """Call a function of a module on every rank at once, with the `Rank` first, and return its cost.

        Raises:
            RanksFailedError: A rank raised or died, or the time is over; its traceback is in the text.
        """
        (_, store), *ranks = self._processes
        store_seconds = _ask_cpu(store)
        begin = time.monotonic() + _lead_seconds(self.world_size)
        for _, connection in ranks:
            connection.send((phase, args, begin))
        done: list[_Done] = self._wait_for(ranks, begin + self._timeout_seconds)
        failures = [f"rank {rank}: {one.failure}" for rank, one in enumerate(done) if one.failure]
        if failures:
            raise RanksFailedError("\n".join([f"{len(failures)} ranks failed in {phase.__name__}", *failures[:3]]))
        operations: Counter[Kind] = Counter()
        for one in done:
            operations.update(one.operations)
        return Measured(
            seconds=max(one.ended for one in done) - begin,
            operations=operations,
            beats=sum(one.beats for one in done),
            value_bytes=sum(one.value_bytes for one in done),
            connections=_count_sockets(self.pids[0]),
            store_cpu_seconds=_ask_cpu(store) - store_seconds,
            coordinator_cpu_seconds=done[0].cpu_seconds,
            ranks_cpu_seconds=sum(one.cpu_seconds for one in done),
            values=[one.value for one in done],
        )

    def memory_bytes(self) -> int:
        """Return the memory of all processes, shared pages divided by their users."""
        return sum(_shared_out_bytes(pid) for pid in self.pids)

    def _fork(self, serve: Callable[[Connection], None]) -> None:
        ours, theirs = Pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            status = 1
            try:
                _end_with(parent)
                for connection in (ours, *(other for _, other in self._processes)):
                    connection.close()
                serve(theirs)
                status = 0
            except EOFError:
                status = 0  # the parent is done
            except BaseException:  # noqa: BLE001  # nothing of the parent may run in the child
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()
        self._processes.append((pid, ours))

    def _wait_for(self, processes: Iterable[tuple[int, Connection]], end: float) -> list[Any]:
        answers: dict[int, Any] = {}
        pids = {connection: pid for pid, connection in processes}
        order = list(pids.values())
        while pids:
            ready = wait(list(pids), max(0.0, end - time.monotonic()))
            if not ready:
                late = [order.index(pid) for pid in pids.values()]
                raise RanksFailedError(f"{len(late)} ranks are late, such as {late[:8]}")
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answers[pids[connection]] = connection.recv()
                except (EOFError, ConnectionResetError) as error:
                    raise RanksFailedError(f"rank {order.index(pids[connection])} died") from error
                del pids[connection]
        return [answers[pid] for pid in order]

    def _end(self, *, seconds: float) -> None:
        """End all processes: those that do not leave in time are killed, each by its own pid."""
        processes, self._processes = self._processes, []
        for _, connection in processes:
            connection.close()
        end = time.monotonic() + seconds
        # The store last: ranks that leave still need it.
        for pid, _ in reversed(processes):
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() >= end:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                time.sleep(0.01)


def _lead_seconds(world_size: int) -> float:
    return _LEAD_SECONDS + world_size * _LEAD_SECONDS_PER_RANK


# ---- in a process of a rank or of the store


def _end_with(parent: int) -> None:
    """Let this process be killed when its parent ends, and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve_store(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    while True:
        connection.recv()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        connection.send(usage.ru_utime + usage.ru_stime)


def _ask_cpu(store: Connection) -> float:
    store.send(None)
    return float(store.recv())


def _serve_rank(rank: Rank, port: int, connection: Connection) -> None:
    counter = OperationCounter()
    counter.install()
    torch.set_num_threads(1)
    model_host(rank.host)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=rank.rank, world_size=rank.world_size)
    connection.send(None)
    while True:
        phase, args, begin = connection.recv()
        time.sleep(max(0.0, begin - time.monotonic()))
        counter.take()
        cpu_seconds, value, failure = time.process_time(), None, None
        try:
            value = phase(rank, *args)
        except BaseException:  # noqa: BLE001  # told to the parent
            failure = traceback.format_exc()
        ended, cpu_seconds = time.monotonic(), time.process_time() - cpu_seconds
        time.sleep(_lead_seconds(rank.world_size))  # the heartbeats that say that ranks have left are of this phase
        with suppress(BrokenPipeError):
            connection.send(_Done(ended, cpu_seconds, *counter.take(), value, failure))


def _count_sockets(pid: int) -> int:
    folder = Path(f"/proc/{pid}/fd")
    return sum(os.readlink(entry).startswith("socket:") for entry in folder.iterdir())


def _shared_out_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
