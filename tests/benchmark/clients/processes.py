"""A step on all ranks, a process each; and what the server saw of it."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from tests.benchmark.clients.worker import Task, run_rank
from tests.benchmark.report.plan import Group, Section, Step
from tests.benchmark.report.rows import Measured, Row
from tests.benchmark.server.counts import Counts

# Nobody takes as long, unless he hangs.
STEP_SECONDS_MAX = 300.0

# What a process gets to end by itself that has told what it measured.
_END_SECONDS = 10.0


# By figure: how that of all ranks is made of theirs.
_OF_ALL_RANKS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "wall_seconds": max,
    "cpu_seconds": sum,
    "state_bytes": sum,
    "above_state_bytes": max,
    "first_blocked_seconds": max,
    "blocked_seconds": max,
    "later_cpu_seconds": sum,
    "steps_per_second": min,
    "alone_steps_per_second": min,
    "saves": max,
}


class Server(Protocol):
    """Server that is measured against, and its counts."""

    @property
    def storage_options(self) -> Mapping[str, object]:
        """Options to pass as `storage_options`."""
        ...

    def counts(self) -> Counts:
        """Since it was reset."""
        ...

    def reset(self) -> None:
        """Count from zero."""
        ...


class StepFailedError(Exception):
    """A rank raised, died, or said nothing for too long; says which and why."""


def measure_step(
    server: Server,
    section: Section,
    group: Group,
    step: Step,
    *,
    round_: int,
    seconds_max: float = STEP_SECONDS_MAX,
) -> Row:
    """One row; one that failed says why."""
    task = Task(
        client=group.client,
        step=step,
        url="s3://bench/checkpoint",
        state=section.state,
        options=dict(server.storage_options),
        store_port=_free_port() if step.ranks > 1 else 0,
    )
    row = Row(
        section=section.name,
        client=group.client,
        action=step.action,
        ranks=step.ranks,
        beside=step.beside,
        round=round_,
    )
    server.reset()
    try:
        measured = run_ranks(task, seconds_max=seconds_max)
    except StepFailedError as error:
        return replace(row, failed=str(error))
    counts = server.counts()
    return replace(
        row,
        **{name: join(getattr(one, name) for one in measured) for name, join in _OF_ALL_RANKS.items()},
        requests=counts.requests,
        sent_bytes=counts.body_bytes_in,
        got_bytes=counts.body_bytes_out,
        server_cpu_seconds=counts.server_cpu_seconds,
    )


def run_ranks(task: Task, *, seconds_max: float) -> list[Measured]:
    """By one process a rank, each a fork of one that has imported torch: three seconds less than from nothing.

    Raises:
        StepFailedError: A rank has nothing to tell; the others are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmark.clients.worker"])
    pipes = [context.Pipe(duplex=False) for _ in range(task.step.ranks)]
    # Not daemons, which could not have the process that `async_save` saves by.
    processes = [
        context.Process(target=run_rank, args=(task, rank, sender), name=f"rank {rank}")
        for rank, (_, sender) in enumerate(pipes)
    ]
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()  # so that its death is an end of file
        measured = _hear([receiver for receiver, _ in pipes], seconds_max)
        for process in processes:
            process.join(_END_SECONDS)
        return measured
    finally:
        for process, (receiver, _) in zip(processes, pipes, strict=True):
            if process.pid is not None:
                process.kill()
                process.join()
            receiver.close()


def _hear(receivers: list[Connection], seconds_max: float) -> list[Measured]:
    """Return the message of each, in the order of ranks; the first that fails is all that counts."""
    heard: dict[int, Measured] = {}
    deadline = time.monotonic() + seconds_max
    while len(heard) < len(receivers):
        silent = [receivers[rank] for rank in range(len(receivers)) if rank not in heard]
        ready = wait(silent, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise StepFailedError(f"No end after {seconds_max:.0f} s.")
        for rank, receiver in enumerate(receivers):
            if receiver not in ready:
                continue
            try:
                said = receiver.recv()
            except EOFError as error:
                raise StepFailedError(f"Rank {rank} died.") from error
            if not isinstance(said, Measured):
                raise StepFailedError(f"Rank {rank}: {said}")
            heard[rank] = said
    return [heard[rank] for rank in range(len(receivers))]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port
