"""What ranks do together: each says its part, the coordinator decides, all get the answer; or all learn why not.

Everything goes over the key-value store of the process group (`dcp_remote.key_value`), never through a collective,
which nothing could interrupt. A joint ends on every rank that is alive: with answers; with the error of the rank that
failed, a beat or two later; with the names of those that fell silent; or at its deadline, with the names of those that
did not come. A rank in the middle of a long upload is reached through the joint's `Deadline`, which then has passed at
once.

The coordinator is rank 0 of the group.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from dcp_remote.ending import Ending
from dcp_remote.errors import DcpRemoteError
from dcp_remote.helper_thread import HelperThread
from dcp_remote.joint_keys import Place
from dcp_remote.key_value import Client, Line
from dcp_remote.party import Party
from dcp_remote.roll_call import RollCall

logger = logging.getLogger(__name__)

V = TypeVar("V")
R = TypeVar("R")
T = TypeVar("T")

# Pauses between two looks for a key: at first short, for ranks that arrive together; then no more than the store bears:
# it does 6,800 a second for one client (loopback), and so 2,000 for all of them leave it time for torch.
_FIRST_PAUSE_SECONDS = 0.005
_PAUSE_SECONDS_MAX = 0.25
_LOOKS_PER_SECOND = 2000

# Contributions that are waited for and read at a time: the rest stays in the store.
_RANKS_PER_READ = 256

# These end a process, whatever else happens; they are never the consequence of a joint that was cancelled.
_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Joint:
    """One thing that all ranks do together; made by `Ranks.join`, and used as a context manager, in one thread.

    An exception that leaves the block on one rank is told to all the others, which raise it: an error of ours as one of
    the same class, with `rank=`; any other as `failed`. The rank itself raises its own unchanged. What a block raises
    after the joint was cancelled is a consequence: what leaves the block then is the error that cancelled it.
    A block that ends without an exception has succeeded, whatever became of others behind its last exchange.

    Attributes:
        what: As it was named.
        failed: As it was given.
        deadline: Passes when the time is over, or at once when the joint is cancelled.
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
        clock: Callable[[], float],
    ) -> None:
        """See `Ranks.join`."""
        self._party = party
        self._pulse = party.pulse
        self._ending = Ending(
            party,
            place,
            seconds=seconds,
            silence_seconds=silence_seconds,
            left_seconds=left_seconds,
            failed=failed,
            timed_out=timed_out,
            moved=partial(party.renumber, self),
            clock=clock,
        )
        self._roll_call = RollCall(party, self._ending, silence_seconds=silence_seconds)
        self.what = place.what
        self.failed = failed
        self.deadline = self._ending.deadline
        self._pause_seconds_max = max(_PAUSE_SECONDS_MAX, party.world_size / _LOOKS_PER_SECOND)
        self._line: Line | None = None
        self._round = 0
        # The coordinator's: the answers that are in the store.
        self._answers: list[str] = []

    def __repr__(self) -> str:
        """What it is, and where."""
        return f"Joint({self.what!r}, number={self._ending.place.number}, rank={self._party.rank})"

    def __enter__(self) -> Self:
        """The joint."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave; see the class. Never blocks: what others are to be told, the pulse's thread tells them."""
        ending = self._ending
        cancelled, place = ending.leave(), ending.place
        if self._party.is_coordinator:
            unread = self._roll_call.unread(place) if error is not None else []
            self._party.leave_behind(place.number, [place.failed, place.verdict, *self._answers, *unread])
        if error is not None and cancelled is None:
            unknown = ending.past_return and not isinstance(error, DcpRemoteError)
            ending.tell(ending.crossing(error), lost=unknown)
        self._party.over(self, self._line)
        # What the coordinator raises of its commit says more than that the time is over.
        unchanged = isinstance(error, _ENDS) or ending.past_return
        if error is not None and cancelled is not None and error is not cancelled and not unchanged:
            raise _again(cancelled) from error

    # ---- for those who take part

    @property
    def number(self) -> int:
        """Its number, as this rank has counted."""
        return self._ending.place.number

    @property
    def cancelled(self) -> DcpRemoteError | None:
        """Why it was; None if it was not."""
        return self._ending.error

    @property
    def coordinator_lost(self) -> bool:
        """It was cancelled, and what the coordinator did last nobody knows here.

        It fell silent, or the store has gone; or it was past its point of no return, and never said how that ended.
        Always False on the coordinator.
        """
        return self._ending.lost

    @property
    def past_return(self) -> bool:
        """The coordinator's: it is committing, and how that ends is not known before it has."""
        return self._ending.past_return

    @property
    def ended_before_commit(self) -> bool:
        """It failed, and it is certain that the coordinator neither commits nor ever will."""
        if self._party.is_coordinator:
            return not self._ending.past_return
        return self._ending.ended_before_commit

    def note(self, text: str) -> None:
        """What this rank is doing now; shown to the others should it fall silent, or be late."""
        if self._pulse is not None and not self._ending.left:
            self._pulse.note(text)

    def gather(self, value: V, decide: Callable[[list[V]], R]) -> R:
        """Every rank's value, by rank, to the coordinator; its decision to all.

        All but the coordinator's own is pickled. Each rank sets one key, and looks now and then for another; the
        coordinator reads 256 at a time, and deletes them.

        Args:
            value: This rank's.
            decide: Called on the coordinator, in this thread. What it raises, all raise.

        Raises:
            DcpRemoteError: The joint was cancelled; see the class.
        """
        self._begin_round()
        if self._pulse is None:
            return decide([value])
        if not self._party.is_coordinator:
            return self._answer(value, shared=True)  # type: ignore[no-any-return]  # what `decide` returned there
        answer = decide(self._contributions(value))
        self._publish({self._ending.place.answer(self._round): answer})
        return answer

    def scatter(self, value: V, decide: Callable[[list[V]], Sequence[R]]) -> R:
        """As `gather`, but each rank gets its own of the answers."""
        self._begin_round()
        if self._pulse is None:
            return decide([value])[0]
        if not self._party.is_coordinator:
            return self._answer(value, shared=False)  # type: ignore[no-any-return]  # as above
        answers = decide(self._contributions(value))
        assert len(answers) == self._party.world_size, "one answer for each rank"
        self._publish({self._ending.place.answer(self._round, rank): answers[rank] for rank in range(1, len(answers))})
        return answers[0]

    def deal(self, value: V, decide: Callable[[list[V]], tuple[Sequence[R], Sequence[int]]]) -> R:
        """As `scatter`, but one answer may be that of many ranks, and is put once.

        Args:
            value: This rank's.
            decide: As for `gather`; gives the answers, and for each rank the number of its own.
        """
        self._begin_round()
        if self._pulse is None:
            answers, numbers = decide([value])
            return answers[numbers[0]]
        if self._party.is_coordinator:
            answers, numbers = decide(self._contributions(value))
            dealt: dict[str, object] = {
                self._ending.place.answer(self._round, f"of-{n}"): one for n, one in enumerate(answers)
            }
            # Afterwards: who has been told its number finds what it is of.
            dealt |= {self._ending.place.answer(self._round, rank): numbers[rank] for rank in range(1, len(numbers))}
            self._publish(dealt)
            return answers[numbers[0]]
        number = self._answer(value, shared=False)
        place = self._ending.place
        answer = self._taken(place.answer(self._round, f"of-{number}"), place, shared=True)
        if answer is None:
            raise self.failed(f"This rank is behind: {self.what} is over for the others.")
        return pickle.loads(answer)  # type: ignore[no-any-return]  # noqa: S301  # of a rank of this job

    def apart(self, call: Callable[[], R]) -> R:
        """Make a call in a thread of its own, and wait for it while the joint goes on: a store may never answer.

        Raises:
            DcpRemoteError: The joint was cancelled; the thread is left behind.
        """
        helper = HelperThread("dcp_remote-request")
        try:
            return helper.run(call, self._ending.require_going_on)
        finally:
            helper.close()

    def no_return(self) -> None:
        """Nothing is needed of the others: their silence and failures do not end it any more, only the deadline.

        Holds until the next round begins, if there is one. Called by the coordinator, just before its commit; costs one
        operation on the store. Whoever gave up before has said so: a coordinator that was stopped, and for which nobody
        waits any more, goes no further.

        Raises:
            DcpRemoteError: The joint is cancelled already, or its deadline has passed.
        """
        assert self._party.is_coordinator, "the others commit nothing"
        ending = self._ending
        ending.require_going_on()
        if self._pulse is not None:
            self._ask(ending.hear)
        if ending.time.expired():
            ending.end(
                ending.timed_out(f"The deadline passed before {self.what} was committed; it was given up.", rank=0)
            )
        ending.pass_return()

    def give_up(self, why: str) -> bool:
        """Cancel it from another thread, and tell the others; False if it is past its point of no return, or over.

        Args:
            why: What happened to this rank, in the past tense: "was interrupted".
        """
        rank = self._party.rank
        self._ending.end(self.failed(f"Rank {rank} {why}; {self.what} was given up.", rank=rank))
        return self._ending.error is not None

    def look(self) -> None:
        """Cancel it if its deadline has passed by the grace, if no time is left, or if the store does not answer.

        From any thread, as often as one likes, without touching the store: whoever waits for a thread that may be stuck
        there calls this twice a second.
        """
        self._ending.look()

    def require_going_on(self) -> None:
        """Raise if it is cancelled, or must be now; for long work between two rounds. Does not touch the store."""
        self._ending.require_going_on()

    # ---- for its ranks

    def beat(self, client: Client) -> None:
        """See how the others are, and whether it goes on; in the thread of the pulse."""
        self._roll_call.beat(client)

    def cancel(self, error: DcpRemoteError) -> None:
        """Cancel it here alone, without a word to the others; not past its point of no return."""
        self._ending.cancel(error)

    # ---- rounds, in the thread of whoever takes part

    def _begin_round(self) -> None:
        self._ending.require_going_on()
        self._round += 1
        self._ending.past_return = False  # the others are needed again

    def _answer(self, value: object, *, shared: bool) -> Any:
        """Contribute, and wait for the answer; again under each number that it turns out to have."""
        data, rank = pickle.dumps(value), self._party.rank
        while True:
            self._ask(self._hear_all)
            self._ending.require_going_on()
            place = self._ending.place
            key = place.contribution(self._round, rank)
            self._ask(lambda client, key=key: client.put(key, data))  # type: ignore[misc]
            answer = self._taken(place.answer(self._round, None if shared else rank), place, shared=shared)
            if answer is not None:
                self._ending.met = True
                return pickle.loads(answer)  # noqa: S301  # of a rank of this job

    def _taken(self, key: str, place: Place, *, shared: bool) -> bytes | None:
        """A value, as soon as it is there; None once this is not the place any more."""
        while self._await([key], place):
            answer = self._ask(lambda client: client.get(key) if shared else client.take_many([key])[0])
            if answer:
                return answer
            # Swept since it was seen: the coordinator is two joints on, which is seen by looking once more.
        return None

    def _contributions(self, value: V) -> list[V]:
        """Of all ranks, by rank; once more under each number that it turns out to have."""
        self._ask(self._hear_all)
        self._ask(lambda client: self._party.sweep(client, self._ending.place.number - 1))
        self._roll_call.waiting = True
        values: list[V] | None = None
        while values is None:
            values = self._read(self._ending.place, value)
        self._roll_call.waiting = False
        self._ending.met = True
        return values

    def _read(self, place: Place, value: V) -> list[V] | None:
        """As they come, so many at a time; None if this is not the place any more."""
        values, others = [value], range(1, self._party.world_size)
        self._roll_call.expect(self._round, others)
        for first in range(0, len(others), _RANKS_PER_READ):
            some = others[first : first + _RANKS_PER_READ]
            keys = place.contributions(self._round, some)
            if not self._await(keys, place):
                return None
            # Before they are taken: nobody must find them missing.
            self._roll_call.expect(self._round, others[first + _RANKS_PER_READ :])
            read = self._ask(lambda client, keys=keys: client.take_many(keys))  # type: ignore[misc]
            values += map(self._unpickled, some, read)
        return values

    def _unpickled(self, rank: int, data: bytes) -> Any:
        try:
            return pickle.loads(data)  # noqa: S301  # of a rank of this job
        except Exception as error:
            told = f"What rank {rank} said cannot be read by the coordinator; {self.what} was given up."
            raise self.failed(told, rank=rank, cause=error) from error

    def _publish(self, answers: Mapping[str, object]) -> None:
        """Answer, and clean up: who contributed to this round has read all earlier answers.

        Past the point of no return nothing that fails here changes what was decided: the others will see to themselves.
        """
        data = {key: pickle.dumps(answer) for key, answer in answers.items()}
        if not self._ending.past_return:
            self._ending.require_going_on()
        read, self._answers = self._answers, list(data)
        self._roll_call.expect(self._round + 1, range(1, self._party.world_size))
        try:
            self._ask(partial(self._answer_and_sweep, data, read))
        except DcpRemoteError as error:
            if not self._ending.past_return:
                raise
            logger.warning("%s: the other ranks could not be told of its end: %s", self.what, error)

    def _answer_and_sweep(self, data: Mapping[str, bytes], read: Iterable[str], client: Client) -> None:
        for key, answer in data.items():
            client.put(key, answer)
        # Also makes sure that the answers have arrived before this rank's next beat says that it has gone on.
        client.has([next(iter(data))])
        client.delete(read)
        self._party.sweep(client, self._ending.place.number)

    def _hear_all(self, client: Client) -> None:
        """Count on for as long as something else has ended under this number."""
        while self._ending.hear(client):
            self._ending.require_going_on()

    def _await(self, keys: Sequence[str], place: Place) -> bool:
        """Until all are there, False once this is not the place any more; raises as soon as the joint is cancelled."""
        ending, pause = self._ending, _FIRST_PAUSE_SECONDS
        while ending.place is place:
            beat = ending.coordinators_beat()
            if self._ask(lambda client: client.has(keys)):
                return True
            # What it told of its end, it told before that beat. To follow it without having looked would be to take
            # part in the next thing of the same name, where only the first was begun here.
            if beat is not None and ending.is_gone(beat) and not self._ask(ending.hear) and not ending.follow(beat):
                ending.miss_the_end(beat)
            ending.require_going_on()
            ending.wait(pause)
            pause = min(1.5 * pause, self._pause_seconds_max)
        return False

    def _ask(self, question: Callable[[Client], T]) -> T:
        """Ask the store, for as long as the joint goes on: a host that was stopped answers nobody."""
        assert self._pulse is not None, "one rank asks nobody"
        ending = self._ending
        if self._pulse.gone is not None:  # to connect anew would take minutes
            ending.lose_the_store(self._pulse.gone)
            ending.require_going_on()
        line, self._line = self._line or self._party.line(), None
        try:
            answer = line.ask(question, ending.require_going_on)
        except dist.DistError as error:
            line.close()
            ending.lose_the_store(error)
            if ending.error is None:  # past the point of no return
                raise self.failed("The store of the process group has gone.", cause=error) from error
            raise ending.error from error
        except BaseException:
            line.close()
            raise
        self._line = line
        return answer


def _again(error: DcpRemoteError) -> DcpRemoteError:
    """Another error that says the same."""
    return type(error)(error.what, **error.details)
