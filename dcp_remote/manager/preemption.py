"""Preemption: all ranks stop at one and the same step, though SIGTERM reaches them at different times, and some never.

An ordinary step costs a lock. A collective in each step would cost more, and one that only those enter who have heard
of the signal would never end. So ranks agree in the background, over the key-value store:

    preempt/asked       somebody is about to be killed
    preempt/at/<rank>   the last moment that this rank's `reached` was asked about
    preempt/step        what the coordinator decides, a step after the latest of these; or `none`. Written once

As soon as a rank's pulse sees the first, it publishes the second, and from then on `reached` waits there for the third.
So nobody is past the step that is decided. And nobody waits in vain: what a rank publishes does not depend on its
training, which may itself be waiting, in a collective, for a rank that waits here.

A moment is a step, and how often steps were counted anew before it: a training that restores goes back to a smaller
step, and has not been there yet. All ranks come to the same moments, in the same order.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.key_value import Client
from dcp_remote.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

# Ranks hear of it, publish and are told in about three beats; one that is busy in one call takes longer.
AGREEMENT_SECONDS = 30.0

# Of the notice, for what comes after the work: the save is given up, everything is closed, the process ends. On busy
# cores an interpreter with torch takes seconds for that.
_CLOSING_SECONDS = 8.0
_CLOSING_SHARE = 0.4

# What the store gets to say which came first, the decision or a rank that gave up.
_LAST_WORD_SECONDS = 5.0

_ASKED = "preempt/asked"
_STEP = "preempt/step"
_NONE = b"none"


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """When `reached` was asked.

    Attributes:
        turn: How often steps had been counted anew.
        step: That it was asked about; -1 if it never was.
    """

    turn: int
    step: int

    def encode(self) -> bytes:
        """As it stands in the store."""
        return b"%d %d" % (self.turn, self.step)

    @classmethod
    def decode(cls, data: bytes) -> Moment:
        """What `encode` made."""
        turn, step = data.split()
        return cls(int(turn), int(step))


class Agreement:
    """One rank's side of it: no clock, no signal, and nothing here waits.

    Args:
        rank: Of this process.
        world_size: How many have to agree.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        """See the class."""
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        # The last step of this turn, if there is one yet; and the last moment of those before.
        self._turn = 0
        self._last_step = -1
        self._before = Moment(0, -1)
        # The last moment as it was, or is about to be, published.
        self._here: Moment | None = None
        self._published = False
        self._stopped = False
        self._decided: Moment | None = None
        self._reached: Moment | None = None
        # The coordinator's: what is known of the others.
        self._moments: dict[int, Moment] = {}
        self.heard = threading.Event()
        self.settled = threading.Event()

    @property
    def decided(self) -> Moment | None:
        """What was decided; None if nothing was, or not yet."""
        return self._decided

    def ask(self, step: int) -> bool | None:
        """Whether this is the step, or the first one after it; None if it is not known, and nobody may go on.

        In the thread of training.
        """
        with self._lock:
            if self._here is None and self._decided is None:  # an ordinary step
                self._last_step = max(self._last_step, step)
                return False
            passed, now = self._last(), Moment(self._turn, step)
            if self._here is not None and not self.settled.is_set() and not self._stopped and now > self._here:
                return None
            self._last_step = max(self._last_step, step)
            if self._decided is not None and self._reached is None and passed < self._decided <= now:
                self._reached = now
            return self._reached == now

    def stop_at(self, step: int) -> None:
        """It is this step, in whatever order steps are asked about; of a rank that is alone."""
        with self._lock:
            if self._decided is None:
                self._decided = self._reached = Moment(self._turn, step)
                self.settled.set()

    def count_anew(self) -> None:
        """Steps may be smaller from here on; in the thread of training, between the same two calls on all ranks."""
        with self._lock:
            self._before = self._last()
            self._turn += 1
            self._last_step = -1

    def stop_waiting(self) -> None:
        """Go on, whatever the others do: the store does not answer. A decision that comes in time still counts."""
        with self._lock:
            self._stopped = True

    def beat(self, client: Client, *, asked: bool) -> None:
        """Do what can be done now; in the thread of the pulse, again and again.

        Costs one operation as long as nobody has asked.

        Args:
            client: Of the pulse.
            asked: Whether this rank is asked to stop.
        """
        if self.settled.is_set():
            return
        if not self._published:
            if asked:
                client.put(_ASKED, b"")
            elif not client.has([_ASKED]):
                return
            self.heard.set()
            with self._lock:
                if self._here is None:
                    self._here = self._last()
                here = self._here
            client.put(f"preempt/at/{self._rank}", here.encode())
            self._published = True
        if self._rank == 0:
            self._decide(client)
        if client.has([_STEP]):
            self._settle(client.get(_STEP))

    def give_up(self, client: Client) -> None:
        """Nothing is decided, unless it is already; in the thread of the pulse."""
        if not self.settled.is_set():
            client.put_first(_STEP, _NONE)
            self._settle(client.get(_STEP))

    def _settle(self, value: bytes) -> None:
        with self._lock:
            if not self.settled.is_set():
                self._decided = None if value == _NONE else Moment.decode(value)
                self.settled.set()

    def _last(self) -> Moment:
        return Moment(self._turn, self._last_step) if self._last_step >= 0 else self._before

    def _decide(self, client: Client) -> None:
        keys = {f"preempt/at/{rank}": rank for rank in range(self._world_size) if rank not in self._moments}
        there = sorted(client.present(list(keys)))
        for key, value in zip(there, client.get_many(there), strict=True):
            self._moments[keys[key]] = Moment.decode(value)
        if len(self._moments) == self._world_size:
            latest = max(self._moments.values())
            client.put_first(_STEP, Moment(latest.turn, latest.step + 1).encode())


class Preemption:
    """Whether it is time to save and stop; made by every rank.

    Args:
        ranks: Who stop together.
        notice_seconds: How long after SIGTERM a job is killed, counted from when this rank heard of it; None is not
            known.
        clock: Monotonic, in seconds; for tests.
    """

    def __init__(
        self, ranks: RankGroup, notice_seconds: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """See the class."""
        self._ranks = ranks
        self._notice_seconds = notice_seconds
        self._clock = clock
        self._agreement = Agreement(ranks.rank, ranks.world_size)
        self._asked = False
        self._heard_seconds = math.inf
        self._given_up = False
        self._outlived = False
        ranks.add_hook(self._beat)

    def install(self) -> None:
        """Listen for SIGTERM, which from now on does not end this process; done once, however often it is called.

        A handler that was there before, in Python, is called as well, after this has heard of it; see `Sigterm`.

        Raises:
            InvalidArgumentError: This is not the main thread, where Python allows it.
        """
        self._ranks.meet()
        if self in _SIGTERM:
            return
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("SIGTERM can only be listened for from the main thread; call this there first.")
        _SIGTERM.add(self)

    def request(self) -> None:
        """Ask for it without a signal; from any thread."""
        self.hear()
        if self._ranks.heartbeat is not None:
            self._ranks.heartbeat.tell(self._beat)

    def hear(self) -> None:
        """Somebody asks for it; takes no lock, since signals do. The pulse looks at every beat."""
        if not self._asked:
            self._heard_seconds = min(self._heard_seconds, self._clock())
            self._asked = True

    def count_anew(self) -> None:
        """Steps may be smaller from here on, because an older checkpoint is restored; costs a lock.

        Called by every rank between the same two calls of `reached`; needlessly, it does no harm. What was agreed on
        already still counts: then the next step is the one.
        """
        self._agreement.count_anew()

    def reached(self, step: int) -> bool:
        """Whether this is the step at which to save and stop; called by every rank after every step.

        True on all ranks at one and the same step, the first one that is at least what was agreed on; and again, if it
        is asked about again. Steps do not go down but where `count_anew` was called. Ranks may call several times with
        one step, as when gradients are accumulated. A rank that is alone stops at the next call, whatever the step.

        Costs a lock before the signal, and no request. Waits only between the signal and the agreement, about three
        beats; at most as long as the notice, or half a minute if there is none. If they cannot agree in time, it is
        never True, which is logged once.
        """
        heartbeat = self._ranks.heartbeat
        if heartbeat is None:
            if self._asked:
                self._agreement.stop_at(step)
            return bool(self._agreement.ask(step))
        answer = self._agreement.ask(step)
        if answer is None:
            self._wait()
            answer = self._agreement.ask(step)
        if self._agreement.settled.is_set():
            hopeless = self._agreement.decided is None
        else:
            hopeless = self._asked and heartbeat.gone is not None
        if hopeless:
            self._tell_once()
        return bool(answer)

    def outlive(self) -> None:
        """Forget a notice that is over, since this process lives: whatever begins now has its usual time."""
        if not self._outlived and self.remaining_seconds() == 0.0:
            self._outlived = True
            logger.warning(
                "The notice of %g s after SIGTERM is over, and this process lives: what begins now has its usual time.",
                self._notice_seconds,
            )

    def remaining_seconds(self) -> float | None:
        """Of the notice; None if there is none, if it was outlived, or nobody has been asked to stop."""
        if self._notice_seconds is None or self._outlived or not math.isfinite(self._heard_seconds):
            return None
        return max(0.0, self._notice_seconds - (self._clock() - self._heard_seconds))

    def working_seconds(self) -> float:
        """Of the notice for work, without what closing takes; infinite if there is none, or nobody has been asked."""
        left = self.remaining_seconds()
        if left is None or self._notice_seconds is None:
            return math.inf
        return max(0.0, left - min(_CLOSING_SECONDS, _CLOSING_SHARE * self._notice_seconds))

    def close(self) -> None:
        """Do not listen any more: SIGTERM does what it did before."""
        self._ranks.remove_hook(self._beat)
        _SIGTERM.remove(self)

    def _beat(self, client: Client) -> None:
        self._agreement.beat(client, asked=self._asked)
        if self._agreement.heard.is_set():
            self._heard_seconds = min(self._heard_seconds, self._clock())

    def _wait(self) -> None:
        """Until it is settled. Whoever gives up says so first: then nobody else counts on this rank."""
        settled, heartbeat = self._agreement.settled, self._ranks.heartbeat
        assert heartbeat is not None, "one rank waits for nobody"
        end = self._clock() + self._patience_seconds()
        while not settled.wait(0.05) and self._clock() < end and heartbeat.gone is None:
            pass
        if not settled.is_set() and heartbeat.gone is None:
            heartbeat.tell(self._agreement.give_up)
            settled.wait(min(_LAST_WORD_SECONDS, self.working_seconds()))
        if not settled.is_set():
            self._agreement.stop_waiting()
            self._tell_once()

    def _patience_seconds(self) -> float:
        """For the agreement; without a notice it is half a minute, and with one the last word is within it, too."""
        seconds = self.working_seconds()
        return AGREEMENT_SECONDS if math.isinf(seconds) else max(0.0, seconds - min(_LAST_WORD_SECONDS, seconds / 4))

    def _tell_once(self) -> None:
        if not self._given_up:
            self._given_up = True
            logger.warning("The ranks did not agree in time on a step at which to stop: training goes on.")


class Sigterm:
    """This process's handler of SIGTERM: one for all who listen, there from the first that does to the last.

    The handler runs between any two instructions of the main thread, which may hold any lock: so it takes none, and
    logs nothing.

    What SIGTERM did before goes on as far as it does not end the process: a handler of the user's own, in Python, is
    called as well, after the listeners. Where SIGTERM was ignored it is listened for all the same: a launcher that
    ignores it, as after `trap '' TERM` in a shell, wants to outlive it, not that nobody hears of it.

    A child that is forked does not listen: SIGTERM does there what it did before, until the child says otherwise. None
    that was sent to the child is lost, however early.
    """

    def __init__(self) -> None:
        """See the class; nobody listens yet."""
        # Changed in one instruction: other threads may stop to listen while the handler runs.
        self._listeners: set[Preemption] = set()
        self._before: Callable[[int, FrameType | None], object] | int | None = signal.SIG_DFL
        self._is_handing_on = False
        self._forking = threading.local()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )

    def __contains__(self, listener: object) -> bool:
        """Whether it listens."""
        return listener in self._listeners

    def add(self, listener: Preemption) -> None:
        """From now on it hears of each signal; in the main thread."""
        self._listeners.add(listener)
        if not self._is_installed():
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def remove(self, listener: Preemption) -> None:
        """It hears of none from now on; after the last one, SIGTERM does what it did before.

        In a thread that may not put the former handler back, ours stays, and does that instead.
        """
        self._listeners.discard(listener)
        if not self._listeners and threading.current_thread() is threading.main_thread():
            self._put_back()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        listeners = tuple(self._listeners)
        for listener in listeners:
            listener.hear()
        if callable(self._before):
            # It may call us in its turn: then it was put in our place earlier, and has kept ours as the one before.
            if not self._is_handing_on:
                self._is_handing_on = True
                try:
                    self._before(number, frame)
                finally:
                    self._is_handing_on = False
        elif not listeners and self._is_installed():  # if it is not, whoever calls us has decided what happens
            self._put_back()
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _put_back(self) -> None:
        if self._is_installed():  # somebody may have put his own in its place
            before, self._before = self._before, signal.SIG_DFL
            # None is a handler that is not Python's.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    def _before_fork(self) -> None:
        # What reaches the child before Python is ready there would find our handler, and then be forgotten. It waits.
        self._forking.mask = None
        if self._is_installed():
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _after_fork(self) -> None:
        if self._forking.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _after_fork_in_child(self) -> None:
        self._listeners.clear()
        self._put_back()
        self._after_fork()


_SIGTERM = Sigterm()
