"""Steps at which a training saves: every so many steps, every so many seconds, and steps that are listed.

Steps by number cost no message: every rank computes them. A save by time is due by the coordinator's clock. Four
heartbeats before a save is due, the coordinator's heartbeat proposes a step, as many steps ahead as the training does
in four heartbeats; the heartbeats of the other ranks answer with the last step of their rank, and the coordinator
decides. By the rules of `Agreement` all ranks save at that step; a rank that comes to the step before the decision
waits for it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.key_value import Client
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manager.preemption import Agreement, Moment, agreement_seconds, wait_for_decision
from dcp_remote.run.job import require_step

logger = logging.getLogger(__name__)

# Heartbeats from a proposal to its step: proposal, answers and decision take one each, in the worst case.
_LEAD_HEARTBEATS = 4

# Share of the newest step in the average of the duration of a step.
_NEWEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Rules that say at which steps to save; a step is saved if one of the rules says so.

    Attributes:
        every_steps: Save at the steps that are multiples of this number, but not at step 0; None for no such rule.
        every_seconds: Seconds from a save, or from the first `should_save`, to the next one, by the clock of rank 0;
            None for no such rule.
        at: Steps to save at.

    Raises:
        InvalidArgumentError: There is no rule, or a number is wrong.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    at: Iterable[int] = ()

    def __post_init__(self) -> None:
        """Check the rules, and make `at` a set."""
        steps, seconds = self.every_steps, self.every_seconds
        if steps is not None and (type(steps) is not int or steps < 1):
            raise InvalidArgumentError("every_steps must be an integer above zero.", every_steps=steps)
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds <= threading.TIMEOUT_MAX):
            raise InvalidArgumentError("every_seconds must be a number above zero, and finite.", every_seconds=seconds)
        if isinstance(self.at, str | bytes) or not isinstance(self.at, Iterable):
            raise InvalidArgumentError("at must be a list of steps, such as at=[100, 1000].", at=self.at)
        listed = list(self.at)
        for step in listed:
            require_step(step)
        object.__setattr__(self, "at", frozenset(listed))
        if steps is None and seconds is None and not listed:
            raise InvalidArgumentError("A SavePolicy needs a rule: every_steps=, every_seconds= or at=.")

    def names(self, step: int) -> bool:
        """Return whether the rules name this step by its number; the same on every rank."""
        return step in self.at or (self.every_steps is not None and step > 0 and step % self.every_steps == 0)


class SaveSchedule:
    """Answers of one rank to `should_save`; all ranks ask for the same steps, in the same order."""

    def __init__(self, policy: SavePolicy, ranks: RankGroup, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Add a hook to the heartbeat of the ranks if a rule goes by time."""
        self._policy = policy
        self._ranks = ranks
        self._clock = clock
        self._every_seconds = math.inf if policy.every_seconds is None else policy.every_seconds
        # Shared by the threads of training and heartbeat, each value set by one statement.
        self._due_seconds = math.inf
        self._step_seconds: float | None = None
        self._last_call: tuple[float, int] | None = None
        self.agreement = Agreement(ranks.rank, ranks.world_size, name="save-policy")
        self._proposed_round = 0
        self._earliest: Moment | None = None
        self._warned_round = 0
        self._is_by_time = policy.every_seconds is not None
        self._saved_step: int | None = None
        if self._is_by_time:
            ranks.hooks.append(self._exchange)

    def should_save(self, step: int, *, is_last: bool = False) -> bool:
        """Return whether to save at this step; False if this step was saved or restored last.

        Costs a lock, and no message; waits only if a save is due by time at this step, and that is not decided yet.
        `is_last` is True if the job saves and stops at this step, whatever the rules say.
        """
        is_due = is_last or self._policy.names(step)
        if self._is_by_time:
            self._measure(step)
            is_due = self._is_due_by_time(step) or is_due
        is_due = is_due and step != self._saved_step
        if is_due:
            self._restart()
        return is_due

    def note_saved(self, step: int) -> None:
        """Note that this step was saved, or restored: the time to the next save begins."""
        self._saved_step = step
        self._restart()

    def forget_saved(self, step: int | None) -> None:
        """Take back `note_saved` of this step, whose save failed: the rules name the step again."""
        if step == self._saved_step:
            self._saved_step = None

    def count_restore(self) -> None:
        """Count a restore, after which steps may be smaller; see `Agreement.count_restore`."""
        self.agreement.count_restore()
        self._last_call = None

    def close(self) -> None:
        """Take no part in agreements any more."""
        with suppress(ValueError):  # no rule goes by time, or closed before
            self._ranks.hooks.remove(self._exchange)

    def _restart(self) -> None:
        self._due_seconds = self._clock() + self._every_seconds

    def _measure(self, step: int) -> None:
        """Take the duration of a step, from one call to the next."""
        now, last = self._clock(), self._last_call
        if last is None:
            self._last_call = now, step
            if math.isinf(self._due_seconds):
                self._restart()
        elif step > last[1]:
            seconds = (now - last[0]) / (step - last[1])
            share = 1.0 if self._step_seconds is None else _NEWEST_SHARE
            self._step_seconds = share * seconds + (1 - share) * (self._step_seconds or 0.0)
            self._last_call = now, step

    def _is_due_by_time(self, step: int) -> bool:
        heartbeat, agreement = self._ranks.heartbeat, self.agreement
        if heartbeat is None:  # a rank alone
            return self._clock() >= self._due_seconds
        answer = agreement.ask(step)
        if answer is None:
            wait_for_decision(agreement, heartbeat, seconds=agreement_seconds(heartbeat))
            answer = agreement.ask(step)
        if agreement.has_failed and self._warned_round < agreement.round:
            self._warned_round = agreement.round
            logger.warning(
                "The ranks did not agree in time on a step for the save that was due; that save is left out."
            )
        # Without its store no rank can agree: a save is due all the same, and raises what has happened to the store.
        return bool(answer) or (heartbeat.gone is not None and self._clock() >= self._due_seconds)

    def _exchange(self, client: Client) -> None:
        """Propose a step if a save is due soon, and exchange; in the heartbeat's thread."""
        heartbeat, agreement = self._ranks.heartbeat, self.agreement
        assert heartbeat is not None, "called by the heartbeat"
        lead_seconds = min(_LEAD_HEARTBEATS * heartbeat.interval_seconds, self._every_seconds)
        is_soon = self._clock() >= self._due_seconds - lead_seconds
        if self._ranks.is_coordinator and is_soon and agreement.can_begin:
            self._restart()  # a step on which the ranks do not agree is left out
            last = agreement.last
            steps = 1 if not self._step_seconds else math.ceil(lead_seconds / self._step_seconds)
            self._earliest = Moment(last.restores, last.step + max(1, steps))
            self._proposed_round = agreement.round + agreement.settled.is_set()
        agreement.exchange(client, notice=self._proposed_round, earliest=self._earliest, find=heartbeat.find)
