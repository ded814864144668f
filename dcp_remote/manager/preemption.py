"""Preemption: all ranks stop at the same step, though SIGTERM reaches them at different times, and some never.

A step without a signal costs a lock. A collective in each step would cost more, and a collective that only the ranks
with the signal enter would never end. So the ranks agree in the background, over the key-value store:

    preempt/<round>/asked       some rank is asked to stop; and the moment before which no rank needs to wait, if any
    preempt/<round>/at/<rank>   the last moment for which `reached` was called on this rank
    preempt/<round>/step        decision of the coordinator: a step after the latest of these; or `none`. Written once
                                (the keys of a round are deleted when a later round is decided)

As soon as a rank's heartbeat sees the first key, the rank publishes the second, and from then on `reached` waits there
for the third. So no rank is past the step that is decided. No rank waits for ever: the heartbeat's thread publishes for
a rank, also while the training of that rank waits in a collective for a rank that waits here.

A moment is a step, with the number of restores before it: a training that restores goes back to a smaller step, which
is yet to come. All ranks come to the same moments, in the same order.

The ranks agree on no step if one of them is gone or silent, or the store of the process group is, or time is short. A
rank then stops at its next step, without a save, to which the others would not come; its log says so. A rank that is
cut off from the store learns no decision: its part of the notice passes, and it stops in the same way.

A process that outlives its notice may be asked again: the ranks then agree in another round. A rank enters a round only
after the step of the round before, at which others may still stop; no rank that waits in the new round holds it up.

`save_policy` agrees in the same way on the steps of saves that are due by time; its ranks are asked long enough before,
so that no rank comes to the step before the decision.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dcp_remote.common.text import join_some
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.heartbeat import Heartbeat, LivenessMonitor
from dcp_remote.coordination.key_value import Client
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manager.sigterm import SIGTERM

logger = logging.getLogger(__name__)

# Ranks see the request, publish and get the decision in about three heartbeats; a rank that is busy in one call takes
# longer. Of many ranks, whose heartbeats come seldom, twice the longest pause between two counts if it is longer.
_AGREEMENT_SECONDS = 30.0

# Part of the notice for what comes after the work: the save is given up, everything is closed, the process ends. On
# busy cores an interpreter with torch takes seconds for that.
_CLOSING_SECONDS = 8.0
_CLOSING_SHARE = 0.4

# Time for the store to answer which came first, the decision or a rank that gave up.
_LAST_ANSWER_SECONDS = 5.0

# Silence after which a rank whose moment is missing is taken for dead: one that lives publishes its moment with the
# next heartbeat, which is late by a few seconds on a busy host. With many ranks, twice the longest pause between
# two heartbeats if that is longer.
_SILENT_SECONDS = 10.0

# Wait for the decision after which the log says what is waited for; usually a decision takes less.
_TELL_SECONDS = 3.0

_NONE = b"none"


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """Moment of a training, at which `reached` was called."""

    restores: int  # number of restores before
    step: int  # -1 if `reached` was not called yet

    def encode(self) -> bytes:
        """Return the value for the store."""
        return b"%d %d" % (self.restores, self.step)

    @classmethod
    def decode(cls, data: bytes) -> Moment:
        """Return the moment that `encode` made the value of."""
        restores, step = data.split()
        return cls(int(restores), int(step))


# Moment before all others.
_BEGINNING = Moment(0, -1)


class Agreement:
    """Agreement of one rank with the others: no clock, no signal, and no call waits. `name` begins all of its keys."""

    def __init__(self, rank: int, world_size: int, *, name: str = "preempt") -> None:
        """Begin the first round, in which no rank is asked yet."""
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._restores = 0
        self.last = _BEGINNING  # last moment for which `ask` was called
        # Moment at which this rank stops, of the last round that came to one.
        self._reached: Moment | None = None
        self.round = 1  # number of the round
        # Last moment as it was, or is about to be, published.
        self._own: Moment | None = None
        self._is_published = False
        self._is_waiting_over = False
        self.decided: Moment | None = None  # decision of this round; None if there is none, or none yet
        # First moment at which the ranks may stop in this round: before it, no rank waits for the decision.
        self._earliest = _BEGINNING
        # Moments of the other ranks, as far as the coordinator knows them.
        self._moments: dict[int, Moment] = {}
        self.heard = threading.Event()  # this rank knows that some rank is asked to stop in this round
        self.settled = threading.Event()  # the decision of this round is known

    @property
    def has_failed(self) -> bool:
        """True if it is settled that this round decides on no step."""
        with self._lock:
            return self.settled.is_set() and self.decided is None

    @property
    def can_begin(self) -> bool:
        """True if no rank is asked in this round so far, or this rank is done with the round."""
        return not self.heard.is_set() or (self.settled.is_set() and self._is_over())

    @property
    def missing(self) -> Sequence[int]:
        """Ranks for which this one waits: on the coordinator those whose moments are missing, on others rank 0."""
        return [rank for rank in range(self._world_size) if rank not in self._moments] if self._rank == 0 else [0]

    def ask(self, step: int) -> bool | None:
        """Return whether this is the step decided on, or the first one after it. Called in the thread of training.

        None if that is not known yet: no rank may go on then.
        """
        with self._lock:
            passed, now = self.last, Moment(self._restores, step)
            own = None if self._is_waiting_over or self.settled.is_set() else self._own
            if own is not None and now > own and now >= self._earliest:
                return None
            self.last = max(passed, now)
            if self.decided is not None and passed < self.decided <= now:
                self._reached = now
            return self._reached == now

    def stop_at(self, step: int) -> None:
        """Decide on this step, in whatever order steps are asked about; for a rank that is alone."""
        with self._lock:
            if self.decided is None:
                self.decided = self._reached = Moment(self._restores, step)
                self.settled.set()

    def count_restore(self) -> None:
        """Count a restore, after which steps may be smaller; costs a lock.

        Called in the thread of training, between the same two calls of `ask` on all ranks. A needless call does no
        harm. A decision that was made before still counts: then the next step is the one.
        """
        with self._lock:
            self._restores += 1

    def forget_restore(self) -> None:
        """Take back the last `count_restore`: the restore failed because not all ranks came to it."""
        with self._lock:
            self._restores -= 1

    def stop_waiting(self) -> None:
        """Go on, whatever the others do: the store does not answer. A decision that comes in time still counts."""
        with self._lock:
            self._is_waiting_over = True

    def exchange(
        self,
        client: Client,
        *,
        notice: int,
        earliest: Moment | None = None,
        find: Callable[[Client, str], bytes] = Client.get,
    ) -> None:
        """Publish and read what is new; called in the heartbeat's thread, again and again.

        `notice` is the round in which this rank was last asked to stop; 0 if it never was. `earliest` is the first
        moment at which the ranks may stop in that round, the next one by default; only one rank may give a moment.
        `find` returns the value of a key that all ranks look for. Costs one operation as long as no rank is asked.
        """
        if self.settled.is_set():
            if not self._is_over() or not (notice > self.round or find(client, self._key("asked", self.round + 1))):
                return
            self.begin_round()
        if not self._is_published:
            if notice >= self.round:
                client.put(self._key("asked"), (earliest or _BEGINNING).encode())
                asked = client.get(self._key("asked"))
            else:
                asked = find(client, self._key("asked"))
            if not asked:
                return
            self.heard.set()
            with self._lock:
                self._earliest = Moment.decode(asked)
                if self._own is None:
                    self._own = self.last
                own = self._own
            own_key = self._key(f"at/{self._rank}")
            client.put(own_key, own.encode())
            client.has([own_key])  # its answer says that the moment has arrived: another rank may find all else
            self._is_published = True
        if self._rank == 0:
            self._decide(client)
        if decision := find(client, self._key("step")):
            self._settle(decision)

    def give_up(self, client: Client, number: int) -> None:
        """Decide on no step in this round, unless a step is decided already; called in the heartbeat's thread."""
        if self.round == number and not self.settled.is_set():
            client.put_first(self._key("step"), _NONE)
            self._settle(client.get(self._key("step")))

    def begin_round(self) -> None:
        """Begin the next round, after a round that is settled."""
        with self._lock:
            self._own = self.decided = None
            self._earliest = _BEGINNING
            self._is_published = self._is_waiting_over = False
            self._moments.clear()
            self.heard.clear()
            self.settled.clear()
            self.round += 1

    def _is_over(self) -> bool:
        """Return whether this rank stops at no later step because of this round, which is settled."""
        with self._lock:
            return self.decided is None or self.last >= self.decided

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._name}/{number or self.round}/{name}"

    def _settle(self, value: bytes) -> None:
        with self._lock:
            if not self.settled.is_set():
                self.decided = None if value == _NONE else Moment.decode(value)
                self.settled.set()

    def _decide(self, client: Client) -> None:
        keys = {self._key(f"at/{rank}"): rank for rank in range(self._world_size) if rank not in self._moments}
        for key, value in client.get_present(list(keys)).items():
            self._moments[keys[key]] = Moment.decode(value)
        if len(self._moments) == self._world_size:
            latest = max(self._moments.values())
            decided = max(self._earliest, Moment(latest.restores, latest.step + 1))
            client.put_first(self._key("step"), decided.encode())
            if self.round > 1:  # which all ranks have left
                old = ["asked", "step", *(f"at/{rank}" for rank in range(self._world_size))]
                client.delete(self._key(name, self.round - 1) for name in old)


class Preemption:
    """Time to save and stop; made by every rank, for the ranks that stop together.

    The notice is the number of seconds from SIGTERM until this job is killed, counted from when this rank heard of the
    signal; None if that is not known.
    """

    def __init__(
        self, ranks: RankGroup, notice_seconds: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Add a hook to the heartbeat of the ranks; `install` listens for SIGTERM."""
        self._ranks = ranks
        self._notice_seconds = math.inf if notice_seconds is None else notice_seconds
        self._clock = clock
        self.agreement = Agreement(ranks.rank, ranks.world_size)
        # Round of the newest notice, and when this rank heard of that; 0 before the first.
        self._notice = 0
        self._heard_seconds = math.inf
        self._is_expired = False
        # Last notices that a signal to this process began, that the log has told of, that this rank gave up, and for
        # which it stops without a save.
        self._signalled = self._told = self._given_up = self._failed = 0
        self._log_lock = threading.Lock()
        # Round in which this rank watches those that it waits for.
        self._watched_round = 0
        self._monitor = LivenessMonitor([])
        # Ranks that keep the others from a decision, with what is known of them, for the log.
        self._gone = ""
        ranks.hooks.append(self._exchange)
        ranks.looks.append(self._look)

    def install(self) -> None:
        """Listen for SIGTERM, which from now on does not end this process; done once, however often it is called.

        A handler that was installed before, in Python, is called as well, after this one; see `Sigterm`.

        Raises:
            InvalidArgumentError: This is not the main thread, where alone Python allows a handler.
        """
        self._ranks.start_heartbeat()
        if self.record_signal in SIGTERM:
            return
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("SIGTERM can only be listened for from the main thread; call this there first.")
        SIGTERM.add(self.record_signal)

    def record_signal(self) -> None:
        """Record that this rank is asked to stop; takes no lock, since signal handlers must not.

        The other ranks hear of it with the next heartbeat. Signals after the first change nothing, until the notice has
        expired, or is a minute old if its length is not known: then the next one is a notice of its own.
        """
        is_old = math.isinf(self._notice_seconds) and self._clock() - self._heard_seconds > 2 * _AGREEMENT_SECONDS
        number = self.agreement.round + (self._is_expired or is_old or self.remaining_seconds() == 0.0)
        self._signalled = number
        self._begin_notice(number)

    def reached(self, step: int) -> bool:
        """Return whether this is the step at which to save and stop; called by every rank after every step.

        True on all ranks at the same step, the first one that is at least the step that was decided; and again if it is
        called again with that step. Steps are smaller than before only after `count_restore`. Ranks may call several
        times with one step, as when gradients are accumulated. A rank that is alone stops at the next call, whatever
        the step.

        Costs a lock before the signal, and no request. Waits only between the signal and the decision, about three
        heartbeats; at most half a minute, or a part of the notice. If the ranks cannot agree, the answer is never True,
        `must_stop` is, and the log says why.
        """
        heartbeat, agreement = self._ranks.heartbeat, self.agreement
        self._look()
        if heartbeat is None:
            if self._notice > agreement.round:
                agreement.begin_round()
            if self._notice:
                agreement.stop_at(step)
            return bool(agreement.ask(step))
        answer = agreement.ask(step)
        if answer is None:
            self._wait(heartbeat)
            answer = agreement.ask(step)
        self._look()
        return bool(answer)

    @property
    def must_stop(self) -> bool:
        """True if the ranks agree on no step after SIGTERM: this one stops at once, without a save."""
        return self._failed >= self._notice > 0 and not self._is_expired and self.agreement.decided is None

    def forget_expired_notice(self) -> None:
        """Forget a notice that has expired, since this process lives: what begins now has its usual time."""
        if not self._is_expired and self.remaining_seconds() == 0.0:
            self._is_expired = True
            logger.warning(
                "The notice of %g s after SIGTERM has expired, and this process lives: what begins now has its usual "
                "time, and the next SIGTERM is a notice of its own.",
                self._notice_seconds,
            )

    def remaining_seconds(self) -> float:
        """Return the seconds left of the notice; infinite if there is none, or it is unknown or expired."""
        if self._is_expired or not math.isfinite(self._heard_seconds):
            return math.inf
        return max(0.0, self._notice_seconds - (self._clock() - self._heard_seconds))

    def working_seconds(self) -> float:
        """Return the seconds left for work, without those for closing; infinite where `remaining_seconds` is."""
        return max(0.0, self.remaining_seconds() - min(_CLOSING_SECONDS, _CLOSING_SHARE * self._notice_seconds))

    def close(self) -> None:
        """Stop listening: SIGTERM does what it did before."""
        with suppress(ValueError):  # closed before
            self._ranks.hooks.remove(self._exchange)
            self._ranks.looks.remove(self._look)
        SIGTERM.remove(self.record_signal)

    def _begin_notice(self, number: int) -> None:
        if number > self._notice:
            self._heard_seconds = self._clock()
            self._notice = number
            self._is_expired = False

    # ---- in the thread of the heartbeat's hooks

    def _exchange(self, client: Client) -> None:
        agreement, heartbeat = self.agreement, self._ranks.heartbeat
        assert heartbeat is not None, "called by the heartbeat"
        agreement.exchange(client, notice=self._notice, find=heartbeat.find)
        if agreement.heard.is_set():
            self._begin_notice(agreement.round)
            if not agreement.settled.is_set():
                self._watch(client)

    def _watch(self, client: Client) -> None:
        """Give up for all ranks if one that is waited for has closed or fallen silent: no decision can come any more.

        Costs the coordinator two operations for a thousand ranks that are waited for, and other ranks none.
        """
        heartbeat, agreement, now = self._ranks.heartbeat, self.agreement, self._clock()
        assert heartbeat is not None, "called by the heartbeat"
        if self._watched_round < agreement.round:
            self._watched_round, self._gone = agreement.round, ""
            self._monitor = LivenessMonitor(range(self._ranks.world_size), now)
        gone = []
        coordinator = heartbeat.last_known(0)  # as of this heartbeat
        known = {} if coordinator is None else {0: coordinator}
        waited = heartbeat.read(client, agreement.missing) if self._ranks.is_coordinator else known
        for rank, status in waited.items():
            self._monitor.record(rank, status, now)
            silent_seconds = self._monitor.silent_seconds(rank, now)
            if status.is_closed:
                gone.append(f"{rank} ({status.process}) has left")
            elif silent_seconds >= max(_SILENT_SECONDS, 2 * heartbeat.delay_seconds_max):
                gone.append(f"{rank} ({status.process}) has been silent for {silent_seconds:.0f} s")
        if gone:
            self._gone = join_some([f"rank {text}" for text in gone])
            agreement.give_up(client, agreement.round)

    # ---- in any thread

    def _look(self) -> None:
        """Say that there is a notice, and end the agreement if it is settled, too late or impossible.

        Called by the heartbeat twice a second, also while the store does not answer, and by `reached`.
        """
        agreement, heartbeat, notice = self.agreement, self._ranks.heartbeat, self._notice
        if notice == 0 or self._is_expired:
            return
        self._tell(notice)
        if heartbeat is None:
            return
        is_late, is_open = self._patience_seconds() <= 0, notice >= agreement.round + agreement.settled.is_set()
        if not is_open:
            if agreement.has_failed:
                self._fail(notice, self._gone or (self._describe_missing(heartbeat) if is_late else "a rank gave up"))
        elif heartbeat.gone is not None:
            self._fail(notice, f"the key-value store of the process group is gone: {heartbeat.gone}")
        elif is_late:
            if heartbeat.contact_seconds() >= _TELL_SECONDS or self.working_seconds() == 0:
                self._fail(notice, self._describe_missing(heartbeat))
            elif self._given_up < notice:
                self._given_up = notice
                heartbeat.enqueue(lambda client: agreement.give_up(client, notice))

    def _tell(self, notice: int) -> None:
        with self._log_lock:
            if self._told >= notice:
                return
            self._told = notice
        is_own = self._signalled >= notice
        begin = "SIGTERM has arrived" if is_own else "SIGTERM has arrived at another rank"
        if self._ranks.heartbeat is None:
            plan = "this process saves and stops at its next step"
        else:
            plan = f"the ranks agree on a step at which to save and stop, within {self._patience_seconds():.0f} s"
        level = logging.WARNING if is_own else logging.INFO
        known = self._notice_seconds if math.isfinite(self._notice_seconds) else None
        logger.log(level, "rank %d: %s: %s. notice_seconds=%s", self._ranks.rank, begin, plan, known)

    def _fail(self, notice: int, why: str) -> None:
        with self._log_lock:
            if self._failed >= notice:
                return
            self._failed = notice
        logger.warning(
            "rank %d: after SIGTERM the ranks agree on no step at which to save, since %s. This rank stops without a "
            "save: should_stop is True, and reached_preemption is not. waited_seconds=%.0f",
            self._ranks.rank,
            why,
            self._clock() - self._heard_seconds,
        )

    def _wait(self, heartbeat: Heartbeat) -> None:
        """Wait until the round is settled. A rank that gives up says so first, so that no other counts on it."""
        began, has_told = self._clock(), False

        def tell() -> None:
            nonlocal has_told
            if not has_told and self._clock() - began >= _TELL_SECONDS:
                has_told = True
                logger.warning(
                    "rank %d: after SIGTERM, waits up to %.0f s for a step at which to save and stop: %s",
                    self._ranks.rank,
                    self._patience_seconds(),
                    self._describe_missing(heartbeat),
                )

        wait_for_decision(
            self.agreement,
            heartbeat,
            seconds=self._patience_seconds(),
            left_seconds=self.working_seconds,
            look=tell,
            clock=self._clock,
        )

    def _describe_missing(self, heartbeat: Heartbeat) -> str:
        """Return what is waited for, for the log."""
        silent_seconds = heartbeat.contact_seconds()
        if silent_seconds >= _TELL_SECONDS:
            return f"the key-value store of the process group has not answered for {silent_seconds:.0f} s"
        if not self.agreement.heard.is_set():
            return "the other ranks could not be told"
        last = {rank: self._monitor.last(rank) for rank in self.agreement.missing}
        named = [f"{rank} ({status.process})" if status is not None else str(rank) for rank, status in last.items()]
        return f"there is no answer of rank {join_some(named)}"

    def _patience_seconds(self) -> float:
        """Return the seconds left to agree; a notice has also to hold the last answer of the store, and the end."""
        seconds = agreement_seconds(self._ranks.heartbeat)
        if math.isfinite(self._notice_seconds):
            working_seconds = self._notice_seconds - min(_CLOSING_SECONDS, _CLOSING_SHARE * self._notice_seconds)
            seconds = working_seconds - min(_LAST_ANSWER_SECONDS, working_seconds / 4)
        return max(0.0, seconds - (self._clock() - self._heard_seconds))


def agreement_seconds(heartbeat: Heartbeat | None) -> float:
    """Return the seconds that ranks with such heartbeats have to agree on a step."""
    return max(_AGREEMENT_SECONDS, 2 * heartbeat.delay_seconds_max if heartbeat is not None else 0.0)


def wait_for_decision(
    agreement: Agreement,
    heartbeat: Heartbeat,
    *,
    seconds: float,
    left_seconds: Callable[[], float] = lambda: math.inf,
    look: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until the round is settled; return whether it is. A rank that gives up says so before it goes on.

    A rank gives up after `seconds`. `left_seconds` returns the seconds left for work before this process is killed;
    `look` is called again and again meanwhile. The thread of the heartbeat exchanges for the agreement.
    """
    number, end = agreement.round, clock() + seconds
    while not agreement.settled.wait(0.05) and clock() < end and heartbeat.gone is None:
        look()
    if not agreement.settled.is_set() and heartbeat.gone is None:
        heartbeat.enqueue(lambda client: agreement.give_up(client, number))
        agreement.settled.wait(min(_LAST_ANSWER_SECONDS, left_seconds()))
    if not agreement.settled.is_set():
        agreement.stop_waiting()
    return agreement.settled.is_set()
