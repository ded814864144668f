"""Real ranks: processes with a gloo process group, started once and given one function after another.

The import of torch takes seconds. A server process imports it once; ranks are forked from that process, which has one
thread and has used neither torch nor a network. A call of a running pool takes milliseconds.

    with RankPool(4) as pool:
        assert pool.run(dist.get_rank) == [0, 1, 2, 3]
        assert pool.run(dist.get_rank, ranks=(1, 3)) == [0, 1]
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from multiprocessing.reduction import DupFd
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")

# Timeout of a collective, which takes under a second on two busy cores; torch's half an hour would hang the test.
GROUP_TIMEOUT_SECONDS = 15.0

# Timeout of a call, after which its ranks are killed; the first call also waits for every rank to import torch.
CALL_TIMEOUT_SECONDS = 120.0

# Time that a hung rank has to print its stacks before it is killed.
_STACKS_SECONDS = 1.0

# Time that a rank has to exit by itself when the pool is closed.
_STOP_SECONDS = 5.0

# Calls that are named when a process has died: an earlier call may have done the damage, as with a corrupted heap.
_CALLS_NAMED = 20

_SPAWNING = multiprocessing.get_context("forkserver")
# What most ranks import. A module that starts a thread when it is imported must not be here.
_SPAWNING.set_forkserver_preload(
    ["tests.support.rank_pool", "dcp_remote.manager.manager", "dcp_remote.reader", "dcp_remote.writer"]
)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Failure of a call on a rank that did not return."""

    description: str  # traceback, or exit status of the process
    error: BaseException | None = None  # error that was raised; None if none was, or it cannot be pickled
    signal: int | None = None  # signal that ended the process; None if the process lives, or exited by itself


def start_process(target: Callable[..., None], *args: object) -> ForkServerProcess:
    """Start a process that calls a function: a fork of the server, which has imported torch and most of the package."""
    with _environment():
        ensure_running()  # the server keeps the environment of its start
    process = _SPAWNING.Process(target=target, args=args)
    process.start()
    return process


class RanksFailedError(Exception):
    """At least one rank did not return from a call; the message holds each traceback."""

    def __init__(self, failures: Mapping[int, RankFailure], results: Mapping[int, Any]) -> None:
        self.failures = dict(failures)  # failures, by rank of the call
        self.results = dict(results)  # results of the other ranks, by rank
        super().__init__(self.failures, self.results)

    def __str__(self) -> str:
        """Return every failure, in order of the ranks."""
        return "\n".join(f"rank {rank}: {self.failures[rank].description}" for rank in sorted(self.failures))


class RankPool:
    """Processes of this machine that become the ranks of one call after another.

    Every call has a process group of its own as the default group, so that no call is affected by an earlier one.
    Processes are never forked from this one; a rank has one thread for computing. Processes communicate over the
    loopback interface alone, and end with this process, however this process dies.

    Not thread-safe. Use as a context manager, or `close` it.
    """

    def __init__(
        self,
        world_size: int,  # number of processes; a call may use fewer
        *,
        group_timeout_seconds: float = GROUP_TIMEOUT_SECONDS,  # timeout of the default group of each call
        # Time after which the ranks of a call print their stacks and are killed.
        call_timeout_seconds: float = CALL_TIMEOUT_SECONDS,
    ) -> None:
        self._group_timeout_seconds = group_timeout_seconds
        self._call_timeout_seconds = call_timeout_seconds
        self._processes: list[_Process | None] = [None] * world_size
        self._calls = 0
        # The server of the rendezvous lives here, so that it outlives any rank. It gets a listening socket, since a
        # port that was only probed could be taken before it is bound.
        listening = socket.create_server(("127.0.0.1", 0))
        self._port: int = listening.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", self._port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        """Return the largest number of ranks of a call."""
        return len(self._processes)

    @property
    def pids(self) -> list[int | None]:
        """Return the process ids; None for a process that does not run."""
        return [process.pid if process and process.alive() else None for process in self._processes]

    def run(
        self,
        function: Callable[[*_Arguments], _Result],
        *args: *_Arguments,
        ranks: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[_Result]:
        """Call a function on every rank at once, each in the default process group of them all.

        The function stands at the top level of a module; arguments and results are pickled, tensors by value. `ranks`
        are the indices of the processes that become the ranks of this call, in this order; by default all. Raises
        `RanksFailedError` if a rank raised, died or was killed at the timeout; the next call restarts dead processes.
        """
        members = list(range(self.world_size)) if ranks is None else list(ranks)
        work = pickle.dumps((function, args))
        self._calls += 1
        processes = [self._running(member) for member in members]
        for rank, process in enumerate(processes):
            name = f"{function.__module__}.{function.__qualname__} as rank {rank} of {len(members)}"
            process.send(_Call(self._calls, rank, len(members), self._group_timeout_seconds, work), name)
        return self._collect(processes, self._call_timeout_seconds if timeout_seconds is None else timeout_seconds)

    def close(self) -> None:
        """End all processes; a later call starts them again."""
        running = [process for process in self._processes if process is not None]
        self._processes = [None] * self.world_size
        for process in running:
            process.leave()
        for process in running:
            process.stop()

    def _running(self, number: int) -> _Process:
        process = self._processes[number]
        if process is None or not process.alive():
            if process is not None:
                process.stop()
            process = self._processes[number] = _Process(self._port)
        return process

    def _collect(self, processes: Sequence[_Process], timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        results: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}
        open_ranks = {process.connection: rank for rank, process in enumerate(processes)}
        while open_ranks:
            ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = [processes[rank] for rank in open_ranks.values()]
                for process in hung:
                    process.print_stacks()
                for process, rank in zip(hung, open_ranks.values(), strict=True):
                    process.kill()
                    failures[rank] = RankFailure(
                        f"killed, because it did not return within {timeout_seconds:g} s; its stacks are on stderr"
                    )
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_ranks.pop(connection)
                answer = processes[rank].receive()
                if isinstance(answer, _NotJoined):
                    processes[rank].stop()
                    failures[rank] = answer.failure
                elif isinstance(answer, RankFailure):
                    failures[rank] = answer
                else:
                    results[rank] = answer.value
        if failures:
            raise RanksFailedError(failures, results)
        return [results[rank] for rank in range(len(processes))]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to one process; `work` is pickled apart, so that a failure to unpickle it is reported, too."""

    number: int
    rank: int
    world_size: int
    group_timeout_seconds: float
    work: bytes


@dataclass(frozen=True, slots=True)
class _Returned:
    """Result of a call."""

    value: Any


@dataclass(frozen=True, slots=True)
class _NotJoined:
    """Failure to make the group, as when another rank was killed meanwhile.

    torch numbers its groups, and has counted this one on some ranks: this process could never join the others again.
    """

    failure: RankFailure


class _Process:
    """The pool's handle of one process."""

    def __init__(self, port: int) -> None:
        ours, theirs = socket.socketpair()
        try:
            # Standard error is passed on, because it may have changed since the server was started.
            self._process = start_process(_serve, DupFd(theirs.fileno()), DupFd(2), port)
        finally:
            theirs.close()
        self.connection = Connection(ours.detach())
        self._calls: deque[str] = deque(maxlen=_CALLS_NAMED)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "the process was started"
        return self._process.pid

    def alive(self) -> bool:
        return self._process.is_alive()

    def send(self, call: _Call, name: str) -> None:
        self._calls.append(name)
        with suppress(OSError):  # if the process died meanwhile, the connection reads as ended
            self.connection.send_bytes(pickle.dumps(call))

    def receive(self) -> _Returned | RankFailure | _NotJoined:
        try:
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode
            assert status is not None, "the process has ended"
            if status >= 0:
                return RankFailure(self._name_calls(f"the process left with status {status}"))
            name = signal.Signals(-status).name
            return RankFailure(self._name_calls(f"the process was ended by {name}"), signal=-status)
        assert isinstance(answer, _Returned | RankFailure | _NotJoined)
        return answer

    def _name_calls(self, what: str) -> str:
        return "\n  ".join([f"{what}; its last calls:", *self._calls])

    def print_stacks(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)
        self._process.join(_STACKS_SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def leave(self) -> None:
        self.connection.close()

    def stop(self) -> None:
        self.connection.close()
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self.kill()


@contextmanager
def _environment() -> Iterator[None]:
    """Set the environment of ranks, which the server of forks takes over when it is started."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    changed = {
        # The server of torch's store looks up the host of each new connection, in its only thread: a slow nameserver
        # would stop all ranks for five seconds.
        "RES_OPTIONS": "timeout:1 attempts:1",
        "OMP_NUM_THREADS": "1",  # several ranks share the cores; read at torch's import, and so set before
        "PYTHONPATH": os.pathsep.join(sys.path),  # modules that this process can import
    }
    if loopback is not None:
        changed["GLOO_SOCKET_IFNAME"] = loopback
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- in a rank's process


def _serve(descriptor: Any, standard_error: Any, port: int) -> None:
    """Serve one call after another, until the pool's end of the connection is closed."""
    os.setsid()  # Ctrl-C goes to the pool's process, which ends the ranks by closing the connection
    os.dup2(standard_error.detach(), 2)
    faulthandler.enable()  # Python's stacks, if the process crashes
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    connection = Connection(descriptor.detach())
    calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
    threading.Thread(target=_receive_calls, args=(connection, calls), daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        connection.send_bytes(_answer(store, calls.get()))


def _receive_calls(connection: Connection, calls: queue.SimpleQueue[_Call]) -> None:
    """Receive calls in a thread, which sees the connection end also while a function hangs in a collective."""
    try:
        while True:
            call = pickle.loads(connection.recv_bytes())
            assert isinstance(call, _Call)
            calls.put(call)
    except (EOFError, OSError):
        os._exit(1)


def _answer(store: dist.Store, call: _Call) -> bytes:
    try:
        _join_group(store, call)
    except BaseException as error:  # noqa: BLE001  # as below
        return pickle.dumps(_NotJoined(RankFailure(traceback.format_exc(), _portable(error))))
    try:
        function, args = pickle.loads(call.work)
        return pickle.dumps(_Returned(function(*args)))
    except BaseException as error:  # noqa: BLE001  # any error is returned to the caller
        return pickle.dumps(RankFailure(traceback.format_exc(), _portable(error)))


def _join_group(store: dist.Store, call: _Call) -> None:
    if dist.is_initialized():
        # Only now, when every rank of the last call has answered: earlier, a slower rank could have been cut off.
        dist.destroy_process_group()
        # torch caches layouts by mesh, and meshes of different groups are equal: results would refer to dead groups.
        debug._clear_sharding_prop_cache()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"call-{call.number}", store),
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.group_timeout_seconds),
    )
    # No rank begins, and perhaps kills itself, while another is still connecting to it.
    joined = f"call-{call.number}/joined"
    if store.add(f"{joined}-ranks", 1) == call.world_size:
        store.set(joined, "")
    store.wait([joined], timedelta(seconds=call.group_timeout_seconds))


def _portable(error: BaseException) -> BaseException | None:
    """Return the error if it survives pickling, else None."""
    try:
        loaded = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # pickling calls code of the class, which can raise anything
        return None
    return loaded if isinstance(loaded, BaseException) else None
