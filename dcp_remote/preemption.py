"""Preemption: all ranks stop at one and the same step, though SIGTERM reaches them at different times, and some never.

An ordinary step costs a lock. A collective in each step would cost more, and one that only those enter who have heard
of the signal would never end. So ranks agree in the background, over the key-value store (`dcp_remote.pulse`):

    preempt/asked       somebody is about to be killed
    preempt/at/<rank>   the last step that this rank's `reached` was asked about; -1 if it never was
    preempt/step        what the coordinator decides, one more than the largest of these; or `none`. Written once

As soon as a rank's pulse sees the first, it publishes the second, and from then on `reached` waits there for the third.
So nobody is past the step that is decided. And nobody waits in vain: what a rank publishes does not depend on its
training, which may itself be waiting, in a collective, for a rank that waits here.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.joint import Ranks
from dcp_remote.pulse import Client

logger = logging.getLogger(__name__)

# Ranks hear of it, publish and are told in about three beats; one that is busy in one call takes longer.
AGREEMENT_SECONDS = 30.0

# What the store gets to say which came first, the decision or a rank that gave up.
_LAST_WORD_SECONDS = 5.0

_ASKED = "preempt/asked"
_STEP = "preempt/step"
_NONE = b"none"


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
        self._last_step = -1
        # The last step as it was, or is about to be, published.
        self._here: int | None = None
        self._published = False
        self._stopped = False
        self._step: int | None = None
        self._reached: int | None = None
        # The coordinator's: what is known of the others.
        self._steps: dict[int, int] = {}
        self.heard = threading.Event()
        self.settled = threading.Event()

    @property
    def step(self) -> int | None:
        """What was decided; None if nothing was, or not yet."""
        return self._step

    def ask(self, step: int) -> bool | None:
        """Whether this is the step, or the first one after it; None if it is not known, and nobody may go on.

        In the thread of training.
        """
        with self._lock:
            if self._here is not None and not self.settled.is_set() and not self._stopped and step > self._here:
                return None
            passed, self._last_step = self._last_step, max(self._last_step, step)
            if self._step is not None and self._reached is None and passed < self._step <= step:
                self._reached = step
            return self._reached == step

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
                    self._here = self._last_step
                here = self._here
            client.put(f"preempt/at/{self._rank}", b"%d" % here)
            self._published = True
        if self._rank == 0:
            self._decide(client)
        if client.has([_STEP]):
            value = client.get(_STEP)
            self.settle(None if value == _NONE else int(value))

    def give_up(self, client: Client) -> None:
        """Nothing is decided, unless it is already; in the thread of the pulse."""
        if not self.settled.is_set():
            client.put_first(_STEP, _NONE)
            value = client.get(_STEP)
            self.settle(None if value == _NONE else int(value))

    def settle(self, step: int | None) -> None:
        """It is this step, or none; what was settled before stays."""
        with self._lock:
            if not self.settled.is_set():
                self._step = step
                self.settled.set()

    def _decide(self, client: Client) -> None:
        keys = {f"preempt/at/{rank}": rank for rank in range(self._world_size) if rank not in self._steps}
        there = sorted(client.present(list(keys)))
        for key, value in zip(there, client.get_many(there), strict=True):
            self._steps[keys[key]] = int(value)
        if len(self._steps) == self._world_size:
            client.put_first(_STEP, b"%d" % (max(self._steps.values()) + 1))


class Preemption:
    """Whether it is time to save and stop; made by every rank.

    Args:
        ranks: Who stop together.
        notice_seconds: How long after SIGTERM a job is killed, counted from when this rank heard of it; None is not
            known.
        clock: Monotonic, in seconds; for tests.
    """

    def __init__(
        self, ranks: Ranks, notice_seconds: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """See the class."""
        self._ranks = ranks
        self._pulse = ranks.pulse
        self._notice_seconds = notice_seconds
        self._clock = clock
        self._agreement = Agreement(ranks.rank, ranks.world_size)
        self._asked = False
        self._heard_seconds = math.inf
        self._given_up = False
        self._installed = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        if self._pulse is not None:
            self._pulse.add_hook(self._beat)

    def install(self) -> None:
        """Listen for SIGTERM, which from now on does not end this process; done once, however often it is called.

        Raises:
            InvalidArgumentError: This is not the main thread, where Python allows it.
        """
        if self._installed:
            return
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("SIGTERM can only be listened for from the main thread; call this there first.")
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        self._installed = True

    def request(self) -> None:
        """Ask for it without a signal; from any thread."""
        self._on_signal(signal.SIGTERM, None)
        if self._pulse is not None:
            self._pulse.tell(self._beat)

    def reached(self, step: int) -> bool:
        """Whether this is the step at which to save and stop; called by every rank after every step.

        True on all ranks at one and the same step, the first one that is at least what was agreed on. Waits only
        between the signal and the agreement, about three beats; at most as long as the notice, or half a minute if
        there is none. If they cannot agree in time, it is never True, which is logged once.
        """
        if self._pulse is None:
            if self._asked:
                self._agreement.settle(step)
            return bool(self._agreement.ask(step))
        answer = self._agreement.ask(step)
        if answer is None:
            self._wait()
            answer = self._agreement.ask(step)
        if self._agreement.settled.is_set():
            hopeless = self._agreement.step is None
        else:
            hopeless = self._asked and self._pulse.gone is not None
        if hopeless:
            self._tell_once()
        return bool(answer)

    def remaining_seconds(self) -> float | None:
        """Of the notice; None if there is none, or nobody has been asked to stop."""
        if self._notice_seconds is None or not math.isfinite(self._heard_seconds):
            return None
        return max(0.0, self._notice_seconds - (self._clock() - self._heard_seconds))

    def close(self) -> None:
        """Do not listen any more: SIGTERM does what it did before."""
        if self._pulse is not None:
            self._pulse.remove_hook(self._beat)
        if not self._installed:
            return
        self._installed = False
        if threading.current_thread() is not threading.main_thread():
            logger.warning("SIGTERM stays ignored: what it did before can be restored from the main thread only.")
        elif signal.getsignal(signal.SIGTERM) == self._on_signal:  # somebody may have put his own in its place
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two instructions of the main thread, which may hold any lock: so none is taken here. The
        # pulse looks every second.
        if not self._asked:
            self._heard_seconds = min(self._heard_seconds, self._clock())
            self._asked = True

    def _beat(self, client: Client) -> None:
        self._agreement.beat(client, asked=self._asked)
        if self._agreement.heard.is_set():
            self._heard_seconds = min(self._heard_seconds, self._clock())

    def _wait(self) -> None:
        """Until it is settled. Whoever gives up says so first: then nobody else counts on this rank."""
        settled, pulse = self._agreement.settled, self._pulse
        assert pulse is not None, "one rank waits for nobody"
        seconds = self.remaining_seconds()
        end = self._clock() + (AGREEMENT_SECONDS if seconds is None else seconds)
        while not settled.wait(0.05) and self._clock() < end and pulse.gone is None:
            pass
        if not settled.is_set() and pulse.gone is None:
            pulse.tell(self._agreement.give_up)
            settled.wait(_LAST_WORD_SECONDS)
        if not settled.is_set():
            self._agreement.stop_waiting()
            self._tell_once()

    def _tell_once(self) -> None:
        if not self._given_up:
            self._given_up = True
            logger.warning("The ranks did not agree in time on a step at which to stop: training goes on.")
