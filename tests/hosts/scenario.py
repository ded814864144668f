"""Checks of every scenario: how each rank ended, and that a new job goes on with the newest checkpoint."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tests.hosts.rank import Event
from tests.hosts.rig import Job, Rig, wait_until

# Of every job; the tests of arrival take others.
SILENCE_SECONDS = 4.0
TIMEOUT_SECONDS = 40.0
MANAGER: dict[str, object] = {
    "silence_seconds": SILENCE_SECONDS,
    "arrival_seconds": 6.0,
    "timeout_seconds": TIMEOUT_SECONDS,
}

# Added to every bound, because the machine may be busy.
MARGIN_SECONDS = 10.0
SILENCE_BOUND_SECONDS = SILENCE_SECONDS + MARGIN_SECONDS

# At this rate the part of a rank takes longer than any bound; the fault comes once the part has begun.
SLOW_MEGABITS = 3.0

_END_SECONDS_MAX = 120.0
_SENTENCE = re.compile(r"(?<=\.)\s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Row of the table of docs/tested.md.

    Attributes:
        texts: Result of the operation or its error on each rank, by host.
        seconds: Time from the fault, or from its end, until the operation had ended on all of these ranks.
        end_seconds: Time until their processes had ended, too; None if the job goes on.
    """

    texts: dict[str, str]
    seconds: float
    end_seconds: float | None

    def row(self, scenario: str) -> str:
        """Return a line of Markdown; hosts with one outcome share it."""
        by_text: dict[str, list[str]] = {}
        for host, text in sorted(self.texts.items()):
            by_text.setdefault(_shorten(text), []).append(host)
        told = "<br>".join(f"{', '.join(hosts)}: {text}" for text, hosts in by_text.items())
        ended = "goes on" if self.end_seconds is None else f"{self.end_seconds:.1f}"
        return f"| {scenario} | {told} | {self.seconds:.1f} | {ended} |"


class Scenario:
    """A rig, and the outcome of the scenario that is played on it.

    Args:
        rig: The rig.

    Attributes:
        outcome: Outcome that was noted last; None before.
    """

    def __init__(self, rig: Rig) -> None:
        """Note nothing yet."""
        self.rig = rig
        self.outcome: Outcome | None = None

    def start(
        self,
        operations: Sequence[str],
        *,
        manager: Mapping[str, object] | None = None,
        megabits: float = SLOW_MEGABITS,
    ) -> Job:
        """Start a job that restores and saves step 1; in the operations that follow, the store is reached slowly."""
        job = self.rig.start(
            ["restore first", "save 1", "pause slow", *operations],
            manager=MANAGER | dict(manager or {}),
        )
        job.await_begin("pause slow")
        self.rig.limit("store", megabits)
        job.let_pass("slow")
        return job

    def await_errors(
        self, job: Job, operation: str, hosts: Collection[str], *, within: float = SILENCE_BOUND_SECONDS
    ) -> dict[str, Event]:
        """Wait until the last operation has raised on some hosts and their processes have ended.

        Args:
            job: The job.
            operation: Operation that has to raise.
            hosts: Names of the hosts.
            within: Bound, from the last fault on, of the time of each error.

        Returns:
            Errors, by host.
        """
        fault_seconds = self.rig.fault_seconds
        # Longer than the bound: a rank that is late shall be seen to be late.
        codes = job.wait(within + _END_SECONDS_MAX, hosts)
        self.note({host: event for host, event in job.ended(operation).items() if host in hosts}, time.time())
        errors = {event.host: event for event in job.events(operation, "error") if event.host in hosts}
        assert errors.keys() == set(hosts), "not every rank raised"
        late = {host: event.seconds - fault_seconds for host, event in errors.items()}
        assert max(late.values()) <= within, f"seconds after the fault: {late}"
        assert all(codes.values()), codes
        return errors

    def await_failure(self, job: Job, operation: str, hosts: Collection[str]) -> dict[str, Event]:
        """Wait until an operation has raised on some hosts, whose ranks go on, and return the errors by host."""
        wait_until(lambda: job.ended(operation).keys() >= set(hosts), f"the end of {operation} on {hosts}")
        ended = {host: event for host, event in job.ended(operation).items() if host in hosts}
        self.note(ended)
        late = {host: event.seconds - self.rig.fault_seconds for host, event in ended.items()}
        assert {event.kind for event in ended.values()} == {"error"}
        assert max(late.values()) <= SILENCE_BOUND_SECONDS, f"seconds after the fault: {late}"
        return ended

    def await_success(self, job: Job, operation: str) -> None:
        """Wait until an operation has ended on all ranks, on each without an error."""
        job.await_end(operation)
        ended = job.ended(operation)
        self.note(ended)
        assert {event.kind for event in ended.values()} == {"end"}
        assert not any(event.differing for event in ended.values())

    def await_end(self, job: Job) -> None:
        """Wait until all ranks have ended, each with exit code 0."""
        assert not any(job.wait(_END_SECONDS_MAX).values())

    def check_run(self, hosts: Sequence[str], *, steps: Collection[int]) -> None:
        """Let a new job restore the newest checkpoint, which has one of some steps, and save and restore another."""
        self.rig.limit("store", 1000, *hosts)
        job = self.rig.start(
            ["restore newest", "save 1000", "restore again"],
            name="next",
            hosts=hosts,
            manager=MANAGER,
        )
        self.await_end(job)
        for operation, restored in {"restore newest": set(steps), "restore again": {1000}}.items():
            events = job.ended(operation).values()
            assert {event.step for event in events} <= restored
            assert not any(event.differing for event in events)

    def note(self, ended: Mapping[str, Event], end_seconds: float | None = None) -> None:
        """Note the outcome: how an operation ended, by host, and when the processes had ended."""
        fault_seconds = self.rig.fault_seconds
        last_seconds = max((event.seconds for event in ended.values()), default=math.nan)
        texts = {host: event.text for host, event in ended.items()}
        self.outcome = Outcome(
            texts, last_seconds - fault_seconds, None if end_seconds is None else end_seconds - fault_seconds
        )


def _shorten(text: str) -> str:
    """Return the first sentence of an error, without its causes."""
    first: str = _SENTENCE.split(text.partition(" <- ")[0].replace("\n", " "))[0]
    return first.replace("|", "\\|")
