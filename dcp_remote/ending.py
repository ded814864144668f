"""How something that ranks do together ends, as one of them sees it: why, who tells whom, under which number.

The coordinator is the only one to end it for all: its pulse's thread posts the verdict. If it is silent itself, or the
store has gone with its host, every rank finds that out alone.

Ranks count joints themselves, and numbers are right as long as all join equally often. But a rank may raise before it
joins, where the others join and fail for want of it; it would be behind for ever. So an end of something else, under
the number that a rank has come to, makes it count on: nobody there will do what it wants to do.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Sequence

from dcp_remote.crossing import survives_pickling
from dcp_remote.errors import DcpRemoteError
from dcp_remote.joint_keys import End, Place
from dcp_remote.key_value import Client
from dcp_remote.party import Party
from dcp_remote.pulse import Beat
from dcp_remote.storage.retrying import Deadline

# What the coordinator gets, after the deadline, to say who is missing, before the others give up by themselves.
GRACE_SECONDS = 2.0

# Named in an error; the rest is counted.
_RANKS_NAMED_MAX = 16

# An error goes in one piece.
_ERROR_BYTES_MAX = 2**20


class Ending:
    """Whether a joint goes on, and if not, why; from any thread.

    Args:
        party: Of the joint.
        place: Where it is, as this rank has counted.
        seconds: Until its deadline, from now on.
        silence_seconds: After which a store that does not answer ends it, and a sleep of this rank's own.
        left_seconds: For work, before this process is killed; it ends when there are none, be it committing.
        failed: What is raised for a cause that is no error of ours.
        timed_out: What is raised at the deadline.
        moved: Called when it turns out to go by another number.
        clock: Monotonic, in seconds.

    Attributes:
        what: It is.
        failed: See above.
        timed_out: See above.
        place: Where it is, as is known by now.
        error: Why it was cancelled; None if it was not.
        lost: It was cancelled, and what the coordinator did last nobody knows here.
        past_return: The coordinator's: nothing but the deadline ends it.
        ended_before_commit: The coordinator has said that it ended it, and was not committing yet; not its own.
        left: This rank does not take part any more.
        met: All have met in a round: the number is right.
        time: Passes at the deadline.
        deadline: Passes then, or at once when it is cancelled.
    """

    def __init__(
        self,
        party: Party,
        place: Place,
        *,
        seconds: float,
        silence_seconds: float,
        left_seconds: Callable[[], float],
        failed: type[DcpRemoteError],
        timed_out: type[DcpRemoteError],
        moved: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """See the class."""
        self.what = place.what
        self.failed = failed
        self.timed_out = timed_out
        self.place = place
        self._party = party
        self._pulse = party.pulse
        self._moved = moved
        self._clock = clock
        self._seconds = seconds
        self._silence_seconds = silence_seconds
        self._left_seconds = left_seconds
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self.error: DcpRemoteError | None = None
        self.lost = False
        self.past_return = False
        self.ended_before_commit = False
        self.left = False
        self.met = False
        self._last_look = clock()
        self.time = Deadline(seconds, clock)
        self.deadline = Deadline(
            seconds, lambda: math.inf if self._cancelled.is_set() or left_seconds() <= 0 else clock()
        )

    def pass_return(self) -> None:
        """From now on nothing but the deadline ends it; raises if it is cancelled already; the coordinator's."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self.past_return = True

    def leave(self) -> DcpRemoteError | None:
        """Nothing cancels it any more: why it was until now."""
        with self._lock:
            self.left = True
            return self.error

    def wait(self, seconds: float) -> None:
        """For so long, or until it is cancelled."""
        self._cancelled.wait(seconds)

    def look(self) -> None:
        """Cancel it if its deadline has passed by the grace, if no time is left, or if the store does not answer.

        From any thread, as often as one likes, without touching the store: whoever waits for a thread that may be stuck
        there calls this twice a second.
        """
        now = self._clock()
        asleep_seconds, self._last_look = now - self._last_look, now
        if self.left or self.error is not None:
            return
        pulse, rank, patience = self._pulse, self._party.rank, self._silence_seconds
        if self.time.elapsed_seconds() >= self._seconds + GRACE_SECONDS:
            self._time_out_alone()
        elif self._left_seconds() <= 0:
            told = f"There is no time left for {self.what} before rank {rank} is killed; it was given up."
            self.end(self.timed_out(told, rank=rank), late=True)
        elif pulse is None or self.past_return:
            return
        elif asleep_seconds > patience:
            told = f"Rank {rank} was stopped or stuck for {asleep_seconds:.0f} s; {self.what} was given up."
            self.end(self.failed(told, rank=rank), lost=True)
        elif pulse.gone is not None or pulse.contact_seconds() > patience:
            self.lose_the_store(pulse.gone)

    def require_going_on(self) -> None:
        """Raise if it is cancelled, or has to be now."""
        self.look()
        if self.error is not None:
            raise self.error

    # ---- where the others are

    def coordinators_beat(self) -> Beat | None:
        """Its last one, where this is another rank; None if it was never heard of."""
        return None if self._party.is_coordinator or self._pulse is None else self._pulse.last(0)

    def is_gone(self, beat: Beat) -> bool:
        """Whether that rank takes no part in this joint any more."""
        has_left = beat.joint == self.place.number and beat.what == self.what and not beat.inside
        return beat.closed or beat.joint > self.place.number or has_left

    def follow(self, beat: Beat) -> bool:
        """Take part in what the coordinator is in, if that is the same thing under a later number."""
        place = self.place
        if self.met or beat.joint <= place.number or beat.what != self.what or not beat.inside:
            return False
        self._move(place, beat.joint)
        return True

    def hear(self, client: Client) -> bool:
        """What stands in the store of the end under this number: cancel, or count on."""
        place, is_coordinator = self.place, self._party.is_coordinator
        key = place.failed if is_coordinator else place.verdict
        told = client.get(key) if client.has([key]) else b""
        if not told:
            return False  # also what was swept between the two: this rank is behind, and will see that
        end = pickle.loads(told)  # noqa: S301  # of a rank of this job
        assert isinstance(end, End), "nothing else is put there"
        if self.met or end.what in {self.what, ""}:
            if is_coordinator:
                self.end(end.error(self.failed))
            else:
                self.ended_before_commit = not end.lost and not end.past_return
                self.cancel(end.error(self.failed), lost=end.lost)
        elif self._move(place, place.number + 1) and is_coordinator:
            everybody = range(1, self._party.world_size)
            mine, theirs = (one.contributions(1, everybody) for one in (place, place.of(end.what)))
            self._party.leave_behind(place.number, [place.failed, place.verdict, *mine, *theirs])
        return True

    def _move(self, place: Place, number: int) -> bool:
        """From there, once."""
        with self._lock:
            if self.place is not place:
                return False
            self.place = Place(number, self.what)
            self._moved(number)
            return True

    # ---- ends

    def _time_out_alone(self) -> None:
        """The deadline has passed by the grace, and no verdict came."""
        never_came = False
        if self._party.is_coordinator:
            told = f"The coordinator did not end {self.what} by the deadline."
        else:
            beat = self.coordinators_beat()
            never_came = beat is not None and beat.joint < self.place.number
            told = f"The coordinator did not end {self.what} by the deadline; it was given up."
        self.end(self.timed_out(told, **self.whereabouts([0])), lost=not never_came, late=True)

    def lose_the_store(self, cause: Exception | None) -> None:
        """It has gone, or does not answer; the coordinator may live all the same."""
        seconds = 0.0 if self._pulse is None else self._pulse.contact_seconds()
        how = f"has not answered for {seconds:.0f} s" if cause is None else "has gone"
        told = f"The key-value store of the process group {how}; {self.what} was given up. Is its host alive?"
        self.end(self.failed(told, **self.whereabouts([0]), cause=cause), lost=True)

    def miss_the_end(self, beat: Beat) -> None:
        """The coordinator has gone on, and this rank did not see how it ended."""
        if beat.closed:
            told = f"The coordinator has closed without an end of {self.what}."
        elif beat.joint == self.place.number:
            told = f"The coordinator has left {self.what} without an answer for this rank."
        else:
            told = f"This rank is behind: {self.what} is over for the others, and how it ended is not known any more."
        self.end(self.failed(told, **self.whereabouts([0])), lost=True)

    def end(self, error: DcpRemoteError, *, lost: bool = False, late: bool = False, whatever: bool = False) -> None:
        """Cancel it here, and tell the others.

        Args:
            error: Why.
            lost: Whether it is not known any more what the coordinator does.
            late: As for `cancel`.
            whatever: It is an end of all that goes by this number, be it something else.
        """
        own = self._party.is_coordinator
        if self.cancel(error, lost=lost and not own, late=late):
            lost = self.past_return if own else lost
            self.tell(error if own else self.crossing(error), lost=lost, whatever=whatever)

    def cancel(self, error: DcpRemoteError, *, lost: bool = False, late: bool = False) -> bool:
        """Here alone, without a word to the others; False if it was cancelled or left before, or must not be.

        Args:
            error: Why.
            lost: See the class.
            late: Also behind the coordinator's point of no return.
        """
        with self._lock:
            if self.left or self.error is not None or (self.past_return and not late):
                return False
            self.error, self.lost = error, lost
            self._cancelled.set()
            return True

    def tell(self, error: DcpRemoteError, *, lost: bool, whatever: bool = False) -> None:
        """The coordinator tells all; another rank tells the coordinator."""
        if self._pulse is not None:
            key = self.place.verdict if self._party.is_coordinator else self.place.failed
            what, data = "" if whatever else self.what, pickle.dumps(error)
            end = pickle.dumps(End(what, str(error), data, lost, self.past_return))
            self._pulse.tell(lambda client: client.put_first(key, end))

    def crossing(self, error: BaseException) -> DcpRemoteError:
        """What the others raise for this rank's error."""
        rank = self._party.rank
        told = self.failed(f"Rank {rank} failed; {self.what} was given up.", rank=rank, cause=error)
        if not isinstance(error, DcpRemoteError):
            return told
        try:
            same = type(error)(error.what, **error.details | {"rank": rank})
            fits = survives_pickling(same) and len(pickle.dumps(same)) <= _ERROR_BYTES_MAX
        except Exception:  # noqa: BLE001  # a class of somebody's own may do anything
            return told
        return same if fits else told

    def whereabouts(self, ranks: Sequence[int]) -> dict[str, str]:
        """Details of an error: who, and what each was last doing."""
        some = ranks[:_RANKS_NAMED_MAX]
        more = [f"{len(ranks) - len(some)} more"] if len(ranks) > len(some) else []
        last = [f"{rank}: {self._last_known(rank)}" for rank in some]
        return {"ranks": ", ".join([*map(str, some), *more]), "last": "; ".join(last)}

    def _last_known(self, rank: int) -> str:
        if self._pulse is None or rank == self._party.rank:
            return self.what if self._pulse is None else self._pulse.last_note
        beat = self._pulse.last(rank)
        if beat is None:
            return "never heard of"
        if beat.joint < self.place.number:
            return f"not here yet, {beat.note or 'nothing yet'}"
        return beat.note if beat.what in {self.what, beat.note} else f"{beat.what}, {beat.note}"


def named(ranks: Sequence[int]) -> str:
    """The first of them, and how many more there are: "Ranks 3, 5 and 2 more"."""
    some = [str(rank) for rank in ranks[:_RANKS_NAMED_MAX]]
    more = f" and {len(ranks) - len(some)} more" if len(ranks) > len(some) else ""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(some)}{more}"
