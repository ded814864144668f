"""What ranks do together: each says its part, the coordinator decides, all get the answer; or all learn why not.

Everything goes over the key-value store of the process group (`dcp_remote.pulse`), never through a collective, which
nothing could interrupt. A joint ends on every rank that is alive: with answers; with the error of the rank that failed,
a beat or two later; with the names of those that fell silent; or at its deadline, with the names of those that did not
come. A rank in the middle of a long upload is reached through the joint's `Deadline`, which then has passed at once.

The coordinator, rank 0 of the group, is the only one to end a joint for all: its pulse's thread posts the verdict. If
it is silent itself, or the store has gone with its host, every rank finds that out alone.

In the store, below the prefix of the ranks, for joint k, which is what `w` is the digest of, and its round i:

    k-w/i/in/<rank>   contributions; deleted by the coordinator when it reads them
    k-w/i/out         the answer to all; deleted when a later round shows that all have read it
    k-w/i/out/<rank>  answers one by one; deleted by their readers
    k-w/i/out/of-<n>  answers to several, each of whom is told its number; deleted as the answer to all is
    k/failed          the first rank that failed or gave up, and why
    k/verdict         how the coordinator ended it, if not by its answers

Ranks count joints themselves, and numbers are right as long as all join equally often. But a rank may raise before it
joins, where the others join and fail for want of it; it would be behind for ever. So an end of something else, under
the number that a rank has come to, makes it count on: nobody there will do what it wants to do.

When joint k + 2 is under way nothing of joint k is left, failed or not, but for what a rank that was stopped posts when
it wakes up.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dcp_remote.crossing import survives_pickling
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.pulse import Beat, Client, Pulse, Watch, beat_seconds_of, connection, line_of
from dcp_remote.storage.retrying import Deadline

logger = logging.getLogger(__name__)

V = TypeVar("V")
R = TypeVar("R")

# What the coordinator gets, after the deadline, to say who is missing, before the others give up by themselves.
GRACE_SECONDS = 2.0

# Pauses between two looks for a key: at first short, for ranks that arrive together; then no more than the store bears:
# it does 6,800 a second for one client (loopback), and so 2,000 for all of them leave it time for torch.
_FIRST_PAUSE_SECONDS = 0.005
_PAUSE_SECONDS_MAX = 0.25
_LOOKS_PER_SECOND = 2000

# Contributions that are waited for and read at a time: the rest stays in the store.
_RANKS_PER_READ = 256

# Named in an error; the rest is counted.
_RANKS_NAMED_MAX = 16

# An error goes in one piece.
_ERROR_BYTES_MAX = 2**20

# These end a process, whatever else happens; they are never the consequence of a joint that was cancelled.
_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Ranks:
    """The ranks of a group, for one user of them that does one joint thing after another; made by all alike.

    Args:
        rank: Of this process, within the group.
        world_size: Of the group; at 1 there is no thread and no store, and all behaves as with more.
        store: Of the group, below a prefix of this user's own, and touched by nobody else.
        beat_seconds: Of the pulse; by default what suits the number of ranks.
        clock: Monotonic, in seconds; for tests.

    Attributes:
        rank: See above.
        world_size: See above.
        is_coordinator: Whether this is rank 0.
        pulse: Its heartbeat; None for a rank that is alone.
        store_host: Where the store is, which all ranks can reach; None if that is not known.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        *,
        beat_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See the class; the pulse starts here."""
        self.rank = rank
        self.world_size = world_size
        self.is_coordinator = rank == 0
        self.store_host = _host_of(store)
        self.pulse: Pulse | None = None
        self._clock = clock
        self._number = 0
        self._joint: Joint | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._leftovers: dict[int, list[str]] = {}
        # A connection goes from one joint to the next, unless a thread is stuck in it.
        self._spare: Client | None = None
        self._leaving: Watch | None = None
        if world_size > 1:
            assert store is not None, "several ranks need a store to meet in"
            seconds = beat_seconds_of(world_size) if beat_seconds is None else beat_seconds
            self.pulse = Pulse(store, rank, beat_seconds=seconds, farewell=self._farewell, clock=clock)
            self.pulse.add_hook(self._beat)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, name: str, *, beat_seconds: float | None = None) -> Ranks:
        """The ranks of a process group; called on all of them, in the same order.

        Costs one operation on the store of the default group, which may block as any collective may.

        Args:
            process_group: None for the default group; where torch.distributed is not initialized, this process alone.
            name: What they are for; there may be several of one name.
            beat_seconds: As in the class.

        Raises:
            InvalidArgumentError: This process does not belong to the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise InvalidArgumentError("A process group was given, but torch.distributed is not initialized.")
            return cls(0, 1, None)
        group = dist.group.WORLD if process_group is None else process_group
        rank = dist.get_rank(group)
        if group is None or rank < 0:
            raise InvalidArgumentError("This process does not belong to the process group.", rank=dist.get_rank())
        world_size = dist.get_world_size(group)
        if world_size == 1:
            return cls(rank, world_size, None)
        # Counted in the store, where the number outlives a group that is destroyed and made again over the same store.
        prefix = f"dcp_remote/{group.group_name}/{name}"
        store = _get_default_store()
        number = connection(store).add(f"{prefix}/made/{rank}", 1)
        # That store itself, and no clone: where this process is the host, it stays as long as somebody has it, and the
        # last save can end although the group is destroyed.
        return cls(rank, world_size, dist.PrefixStore(f"{prefix}/{number}", store), beat_seconds=beat_seconds)

    def join(
        self,
        what: str,
        *,
        seconds: float,
        silence_seconds: float = 60.0,
        failed: type[DcpRemoteError],
        timed_out: type[DcpRemoteError],
    ) -> Joint:
        """Begin something that all ranks begin, in the same order; never touches the store, and so never blocks.

        Args:
            what: Named in errors: "the save of step 100".
            seconds: Until its deadline, from now on.
            silence_seconds: After which a rank that was heard of and fell silent fails it; and a store that does not
                answer.
            failed: What is raised for a cause that is no error of ours.
            timed_out: What is raised at the deadline.

        Raises:
            InvalidArgumentError: These ranks are closed, or the last joint is not over.
        """
        if self._closed:
            raise InvalidArgumentError("This is closed.", what=what)
        if self._joint is not None and self._joint.cancelled is None:
            raise InvalidArgumentError("Something else is under way.", what=what, under_way=self._joint.what)
        with self._lock:
            self._number += 1
            self._joint = joint = Joint(
                self,
                _Place(self._number, line_of(what)),
                seconds=seconds,
                silence_seconds=silence_seconds,
                failed=failed,
                timed_out=timed_out,
                clock=self._clock,
            )
            if self.pulse is not None:
                watched = range(1, self.world_size) if self.is_coordinator else [0]
                self.pulse.enter(self._number, what, watched)
        return joint

    def close(self) -> None:
        """Leave. The coordinator first gives the others some seconds to read its last answer.

        It may be the host of the store, which goes with it.
        """
        self._closed = True
        joint = self._joint
        if joint is not None:
            joint._cancel(joint.failed(f"Closed in the middle of {joint.what}."))
        if self.pulse is not None:
            self.pulse.close()

    # ---- for joints

    def over(self, joint: Joint, client: Client | None) -> None:
        """It was left; the connection is free again."""
        with self._lock:
            if client is not None:
                self._spare = client
            if self._joint is joint:
                self._joint = None
                if self.pulse is not None:
                    self.pulse.leave(f"done with {joint.what}")

    def client(self) -> Client:
        """For a joint's thread. Connects if there is none to spare, and then blocks if the store does."""
        with self._lock:
            client, self._spare = self._spare, None
        assert self.pulse is not None, "one rank needs no store"
        return self.pulse.client() if client is None else client

    def renumber(self, joint: Joint, number: int) -> None:
        """It turned out to be this one."""
        with self._lock:
            if self._joint is joint:
                self._number = number
                if self.pulse is not None:
                    self.pulse.move(number)

    def leave_behind(self, number: int, keys: Iterable[str]) -> None:
        """What may lie in the store of that joint; the coordinator's."""
        with self._lock:
            self._leftovers.setdefault(number, []).extend(keys)

    def sweep(self, client: Client, before: int) -> None:
        """Delete what joints before that one left behind."""
        with self._lock:
            old = [self._leftovers.pop(number) for number in list(self._leftovers) if number < before]
        client.delete(key for keys in old for key in keys)

    # ---- in the pulse's thread

    def _beat(self, client: Client) -> None:
        joint = self._joint
        if joint is not None:
            joint._beat(client)

    def _farewell(self, client: Client) -> bool:
        """Whether all others that live have left the last joint, so that nobody needs this process any more."""
        if not self.is_coordinator or self._number == 0 or self._joint is not None:
            return True
        assert self.pulse is not None, "whoever says goodbye has one"
        now = self._clock()
        if self._leaving is None:
            self._leaving = Watch(range(1, self.world_size), now)
        inside: list[int] = []
        for rank, beat in self.pulse.read(client, self._leaving.ranks).items():
            self._leaving.see(rank, beat, now)
            if beat.inside and beat.joint == self._number:
                inside.append(rank)
        if any(self._leaving.silent_seconds(rank, now) < self.pulse.patience_seconds for rank in inside):
            return False
        self.sweep(client, self._number + 1)
        return True


def _host_of(store: dist.Store | None) -> str | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where things of a joint lie in the store.

    Attributes:
        number: Of the joint.
        what: It is.
    """

    number: int
    what: str

    def of(self, what: str) -> _Place:
        """The same number, taken by something else."""
        return _Place(self.number, what)

    def contribution(self, number: int, rank: int) -> str:
        """Of a rank to a round."""
        return f"{self._prefix}/{number}/in/{rank}"

    def contributions(self, number: int, ranks: Iterable[int]) -> list[str]:
        """Of several ranks."""
        return [self.contribution(number, rank) for rank in ranks]

    def answer(self, number: int, to: int | str | None = None) -> str:
        """To a rank, to several, or to all."""
        return f"{self._prefix}/{number}/out" + (f"/{to}" if to is not None else "")

    @property
    def failed(self) -> str:
        """Whatever it is."""
        return f"{self.number}/failed"

    @property
    def verdict(self) -> str:
        """Whatever it is."""
        return f"{self.number}/verdict"

    @property
    def _prefix(self) -> str:
        return f"{self.number}-{zlib.crc32(self.what.encode(errors='replace')):08x}"


@dataclass(frozen=True, slots=True)
class _End:
    """How a joint ended, as it stands in the store.

    Attributes:
        what: It was; "" is an end of all that goes by that number.
        text: Of the error.
        data: The error, pickled apart: its class may be known on one rank alone.
        lost: Nobody but the coordinator knows what it did last.
    """

    what: str
    text: str
    data: bytes
    lost: bool

    def error(self, failed: type[DcpRemoteError]) -> DcpRemoteError:
        """The error, or one that says the same."""
        try:
            error = pickle.loads(self.data)  # noqa: S301  # of a rank of this job
        except Exception:  # noqa: BLE001  # whatever its class does
            return failed(self.text)
        return error if isinstance(error, DcpRemoteError) else failed(self.text)


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
        ranks: Ranks,
        place: _Place,
        *,
        seconds: float,
        silence_seconds: float,
        failed: type[DcpRemoteError],
        timed_out: type[DcpRemoteError],
        clock: Callable[[], float],
    ) -> None:
        """See `Ranks.join`."""
        self.what = place.what
        self.failed = failed
        self._timed_out = timed_out
        self._ranks = ranks
        self._pulse = ranks.pulse
        self._place = place
        self._clock = clock
        self._seconds = seconds
        self._silence_seconds = silence_seconds
        self._pause_seconds_max = max(_PAUSE_SECONDS_MAX, ranks.world_size / _LOOKS_PER_SECOND)
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._error: DcpRemoteError | None = None
        self._lost = False
        self._past_return = False
        self._left = False
        self._last_look = clock()
        self._time = Deadline(seconds, clock)
        self.deadline = Deadline(seconds, lambda: math.inf if self._cancelled.is_set() else clock())
        self._client: Client | None = None
        self._round = 0
        # All have met in a round: the number is right.
        self._met = False
        # The coordinator's: the answers that are in the store; whose contribution to which round is not read yet, and
        # whether it waits for those; and the beats of ranks that do something else under this number.
        self._answers: list[str] = []
        self._missing: tuple[int, Sequence[int]] = (1, range(1, ranks.world_size))
        self._waiting = False
        self._astray: dict[int, int] = {}

    def __repr__(self) -> str:
        """What it is, and where."""
        return f"Joint({self.what!r}, number={self._place.number}, rank={self._ranks.rank})"

    def __enter__(self) -> Self:
        """The joint."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave; see the class. Never blocks: what others are to be told, the pulse's thread tells them."""
        with self._lock:
            self._left = True
            cancelled = self._error
        place, (number, missing) = self._place, self._missing
        if self._ranks.is_coordinator:
            unread = place.contributions(number, missing if error is not None else ())
            self._ranks.leave_behind(place.number, [place.failed, place.verdict, *self._answers, *unread])
        if error is not None and cancelled is None:
            unknown = self._past_return and not isinstance(error, DcpRemoteError)
            self._tell(self._crossing(error), lost=unknown)
        self._ranks.over(self, self._client)
        # What the coordinator raises of its commit says more than that the time is over.
        unchanged = isinstance(error, _ENDS) or self._past_return
        if error is not None and cancelled is not None and error is not cancelled and not unchanged:
            raise _again(cancelled) from error

    # ---- for those who take part

    @property
    def cancelled(self) -> DcpRemoteError | None:
        """Why it was; None if it was not."""
        return self._error

    @property
    def coordinator_lost(self) -> bool:
        """It was cancelled, and what the coordinator did last nobody knows here.

        It fell silent, or the store has gone; or it was past its point of no return, and never said how that ended.
        Always False on the coordinator.
        """
        return self._lost

    @property
    def past_return(self) -> bool:
        """The coordinator's: it is committing, and how that ends is not known before it has."""
        return self._past_return

    def note(self, text: str) -> None:
        """What this rank is doing now; shown to the others should it fall silent, or be late."""
        if self._pulse is not None and not self._left:
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
        if not self._ranks.is_coordinator:
            return self._answer(value, shared=True)  # type: ignore[no-any-return]  # what `decide` returned there
        answer = decide(self._contributions(value))
        self._publish({self._place.answer(self._round): answer})
        return answer

    def scatter(self, value: V, decide: Callable[[list[V]], Sequence[R]]) -> R:
        """As `gather`, but each rank gets its own of the answers."""
        self._begin_round()
        if self._pulse is None:
            return decide([value])[0]
        if not self._ranks.is_coordinator:
            return self._answer(value, shared=False)  # type: ignore[no-any-return]  # as above
        answers = decide(self._contributions(value))
        assert len(answers) == self._ranks.world_size, "one answer for each rank"
        self._publish({self._place.answer(self._round, rank): answers[rank] for rank in range(1, len(answers))})
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
        if self._ranks.is_coordinator:
            answers, numbers = decide(self._contributions(value))
            dealt: dict[str, object] = {
                self._place.answer(self._round, f"of-{n}"): one for n, one in enumerate(answers)
            }
            # Afterwards: who has been told its number finds what it is of.
            dealt |= {self._place.answer(self._round, rank): numbers[rank] for rank in range(1, len(numbers))}
            self._publish(dealt)
            return answers[numbers[0]]
        number = self._answer(value, shared=False)
        place = self._place
        answer = self._taken(place.answer(self._round, f"of-{number}"), place, shared=True)
        if answer is None:
            raise self.failed(f"This rank is behind: {self.what} is over for the others.")
        return pickle.loads(answer)  # type: ignore[no-any-return]  # noqa: S301  # of a rank of this job

    def no_return(self) -> None:
        """Nothing is needed of the others: their silence and failures do not end it any more, only the deadline.

        Holds until the next round begins, if there is one. Called by the coordinator, just before its commit; costs one
        operation on the store. Whoever gave up before has said so: a coordinator that was stopped, and for which nobody
        waits any more, goes no further.

        Raises:
            DcpRemoteError: The joint is cancelled already, or its deadline has passed.
        """
        assert self._ranks.is_coordinator, "the others commit nothing"
        self._require_going_on()
        if self._pulse is not None:
            with self._asking() as client:
                self._hear(client)
        if self._time.expired():
            self._end(
                self._timed_out(f"The deadline passed before {self.what} was committed; it was given up.", rank=0)
            )
        with self._lock:
            self._past_return = self._error is None
        self._require_going_on()

    def give_up(self, why: str) -> bool:
        """Cancel it from another thread, and tell the others; False if it is past its point of no return, or over.

        Args:
            why: What happened to this rank, in the past tense: "was interrupted".
        """
        rank = self._ranks.rank
        self._end(self.failed(f"Rank {rank} {why}; {self.what} was given up.", rank=rank))
        return self._error is not None

    def look(self) -> None:
        """Cancel it if the deadline has passed by more than the grace, or if the store does not answer.

        From any thread, as often as one likes, without touching the store: whoever waits for a thread that may be stuck
        there calls this twice a second.
        """
        now = self._clock()
        asleep_seconds, self._last_look = now - self._last_look, now
        if self._left or self._error is not None:
            return
        pulse, rank, patience = self._pulse, self._ranks.rank, self._silence_seconds
        if self._time.elapsed_seconds() >= self._seconds + GRACE_SECONDS:
            self._time_out_alone()
        elif pulse is None or self._past_return:
            return
        elif asleep_seconds > patience:
            told = f"Rank {rank} was stopped or stuck for {asleep_seconds:.0f} s; {self.what} was given up."
            self._end(self.failed(told, rank=rank), lost=True)
        elif pulse.gone is not None or pulse.contact_seconds() > patience:
            self._lose_the_store(pulse.gone)

    # ---- rounds, in the thread of whoever takes part

    def _begin_round(self) -> None:
        self._require_going_on()
        self._round += 1
        self._past_return = False  # the others are needed again

    def _answer(self, value: object, *, shared: bool) -> Any:
        """Contribute, and wait for the answer; again under each number that it turns out to have."""
        data, rank = pickle.dumps(value), self._ranks.rank
        while True:
            with self._asking() as client:
                while self._hear(client):
                    self._require_going_on()
                self._require_going_on()
                place = self._place
                client.put(place.contribution(self._round, rank), data)
            answer = self._taken(place.answer(self._round, None if shared else rank), place, shared=shared)
            if answer is not None:
                self._met = True
                return pickle.loads(answer)  # noqa: S301  # of a rank of this job

    def _taken(self, key: str, place: _Place, *, shared: bool) -> bytes | None:
        """A value, as soon as it is there; None once this is not the place any more."""
        while self._await([key], place):
            with self._asking() as client:
                answer = client.get(key) if shared else client.take_many([key])[0]
            if answer:
                return answer
            # Swept since it was seen: the coordinator is two joints on, which is seen by looking once more.
        return None

    def _contributions(self, value: V) -> list[V]:
        """Of all ranks, by rank; once more under each number that it turns out to have."""
        with self._asking() as client:
            while self._hear(client):
                self._require_going_on()
            self._ranks.sweep(client, self._place.number - 1)
        self._waiting = True
        values: list[V] | None = None
        while values is None:
            values = self._read(self._place, value)
        self._waiting = False
        self._met = True
        return values

    def _read(self, place: _Place, value: V) -> list[V] | None:
        """As they come, so many at a time; None if this is not the place any more."""
        values, others = [value], range(1, self._ranks.world_size)
        self._missing = (self._round, others)
        for first in range(0, len(others), _RANKS_PER_READ):
            some = others[first : first + _RANKS_PER_READ]
            keys = place.contributions(self._round, some)
            if not self._await(keys, place):
                return None
            # Before they are taken: nobody must find them missing.
            self._missing = (self._round, others[first + _RANKS_PER_READ :])
            with self._asking() as client:
                read = client.take_many(keys)
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
        if not self._past_return:
            self._require_going_on()
        read, self._answers = self._answers, list(data)
        self._missing = (self._round + 1, range(1, self._ranks.world_size))
        try:
            with self._asking() as client:
                for key, answer in data.items():
                    client.put(key, answer)
                # Also makes sure that the answers have arrived before this rank's next beat says that it has gone on.
                client.has([next(iter(data))])
                client.delete(read)
                self._ranks.sweep(client, self._place.number)
        except DcpRemoteError as error:
            if not self._past_return:
                raise
            logger.warning("%s: the other ranks could not be told of its end: %s", self.what, error)

    def _await(self, keys: Sequence[str], place: _Place) -> bool:
        """Until all are there, False once this is not the place any more; raises as soon as the joint is cancelled."""
        pause = _FIRST_PAUSE_SECONDS
        while self._place is place:
            beat = self._coordinators_beat()
            with self._asking() as client:
                if client.has(keys):
                    return True
                # What it told of its end, it told before that beat. To follow it without having looked would be to take
                # part in the next thing of the same name, where only the first was begun here.
                if beat is not None and self._is_gone(beat) and not self._hear(client) and not self._follow(beat):
                    self._miss_the_end(beat)
            self._require_going_on()
            self._cancelled.wait(pause)
            pause = min(1.5 * pause, self._pause_seconds_max)
        return False

    def _miss_the_end(self, beat: Beat) -> None:
        """The coordinator has gone on, and this rank did not see how it ended."""
        if beat.closed:
            told = f"The coordinator has closed without an end of {self.what}."
        elif beat.joint == self._place.number:
            told = f"The coordinator has left {self.what} without an answer for this rank."
        else:
            told = f"This rank is behind: {self.what} is over for the others, and how it ended is not known any more."
        self._end(self.failed(told, **self._whereabouts([0])), lost=True)

    @contextmanager
    def _asking(self) -> Iterator[Client]:
        assert self._pulse is not None, "one rank asks nobody"
        if self._pulse.gone is not None:  # to connect anew would take minutes
            self._lose_the_store(self._pulse.gone)
            self._require_going_on()
        if self._client is None:
            self._client = self._ranks.client()
        try:
            yield self._client
        except dist.DistError as error:
            self._client = None
            self._lose_the_store(error)
            if self._error is None:  # past the point of no return
                raise self.failed("The store of the process group has gone.", cause=error) from error
            raise self._error from error

    def _require_going_on(self) -> None:
        self.look()
        if self._error is not None:
            raise self._error

    # ---- where the others are

    def _coordinators_beat(self) -> Beat | None:
        return None if self._ranks.is_coordinator or self._pulse is None else self._pulse.last(0)

    def _is_gone(self, beat: Beat) -> bool:
        """Whether that rank takes no part in this joint any more."""
        has_left = beat.joint == self._place.number and beat.what == self.what and not beat.inside
        return beat.closed or beat.joint > self._place.number or has_left

    def _follow(self, beat: Beat) -> bool:
        """Take part in what the coordinator is in, if that is the same thing under a later number."""
        place = self._place
        if self._met or beat.joint <= place.number or beat.what != self.what or not beat.inside:
            return False
        self._move(place, beat.joint)
        return True

    def _hear(self, client: Client) -> bool:
        """What stands in the store of the end under this number: cancel, or count on."""
        place, is_coordinator = self._place, self._ranks.is_coordinator
        key = place.failed if is_coordinator else place.verdict
        if not client.has([key]):
            return False
        end = pickle.loads(client.get(key))  # noqa: S301  # of a rank of this job
        assert isinstance(end, _End), "nothing else is put there"
        if self._met or end.what in {self.what, ""}:
            if is_coordinator:
                self._end(end.error(self.failed))
            else:
                self._cancel(end.error(self.failed), lost=end.lost)
        elif self._move(place, place.number + 1) and is_coordinator:
            everybody = range(1, self._ranks.world_size)
            mine, theirs = (one.contributions(1, everybody) for one in (place, place.of(end.what)))
            self._ranks.leave_behind(place.number, [place.failed, place.verdict, *mine, *theirs])
        return True

    def _move(self, place: _Place, number: int) -> bool:
        """From there, once."""
        with self._lock:
            if self._place is not place:
                return False
            self._place = _Place(number, self.what)
            self._ranks.renumber(self, number)
            return True

    # ---- in the pulse's thread

    def _beat(self, client: Client) -> None:
        self.look()
        if self._left or self._error is not None:
            return
        if not self._ranks.is_coordinator:
            beat = self._coordinators_beat()
            if not self._hear(client) and beat is not None:
                self._follow(beat)
            self._blame_the_silent()
        elif not self._past_return and not self._hear(client):
            self._blame_the_silent()
            self._blame_the_strays()
            if self._time.expired():
                self._blame_the_late(client)

    def _blame_the_silent(self) -> None:
        assert self._pulse is not None, "whoever beats has one"
        silent = self._pulse.silent(self._silence_seconds)
        if silent:
            have = f"{_named(list(silent))} {'has' if len(silent) == 1 else 'have'}"
            told = f"{have} been silent for {max(silent.values()):.0f} s; {self.what} was given up."
            self._end(self.failed(told, **self._whereabouts(list(silent))), lost=True)

    def _blame_the_strays(self) -> None:
        """Ranks without whose contribution the coordinator cannot go on, and which will never give it."""
        gone: list[int] = []
        for rank in self._missing[1] if self._waiting else ():
            beat = None if self._pulse is None else self._pulse.last(rank)
            if beat is None:
                continue
            if self._is_gone(beat):
                gone.append(rank)
            elif beat.inside and beat.joint == self._place.number and beat.what != self.what:
                # Unless it is about to leave that. Two beats later it has said so again.
                if beat.count >= self._astray.setdefault(rank, beat.count) + 2:
                    gone.append(rank)
            else:
                self._astray.pop(rank, None)
        if gone:
            told = f"{_named(gone)} did something else instead of {self.what}, which was given up."
            self._end(self.failed(told, **self._whereabouts(gone)), whatever=True)

    def _blame_the_late(self, client: Client) -> None:
        missing = number, ranks = self._missing
        itself, place = not self._waiting, self._place
        present = client.present(place.contributions(number, ranks))
        if self._missing is not missing:
            return  # they have come meanwhile; the next beat looks again
        late = [rank for rank in ranks if place.contribution(number, rank) not in present]
        if itself or not late:
            late.insert(0, 0)
        told = f"{_named(late)} did not report by the deadline; {self.what} was given up."
        self._end(self._timed_out(told, **self._whereabouts(late)))

    # ---- ends

    def _time_out_alone(self) -> None:
        """The deadline has passed by the grace, and no verdict came."""
        never_came = False
        if self._ranks.is_coordinator:
            told = f"The coordinator did not end {self.what} by the deadline."
        else:
            beat = self._coordinators_beat()
            never_came = beat is not None and beat.joint < self._place.number
            told = f"The coordinator did not end {self.what} by the deadline; it was given up."
        self._end(self._timed_out(told, **self._whereabouts([0])), lost=not never_came, late=True)

    def _lose_the_store(self, cause: Exception | None) -> None:
        seconds = 0.0 if self._pulse is None else self._pulse.contact_seconds()
        how = f"has not answered for {seconds:.0f} s" if cause is None else "has gone"
        told = f"The key-value store of the process group {how}; {self.what} was given up. Is its host alive?"
        self._end(self.failed(told, **self._whereabouts([0]), cause=cause), lost=True)

    def _end(self, error: DcpRemoteError, *, lost: bool = False, late: bool = False, whatever: bool = False) -> None:
        """Cancel it here, and tell the others."""
        own = self._ranks.is_coordinator
        if self._cancel(error, lost=lost and not own, late=late):
            lost = self._past_return if own else lost
            self._tell(error if own else self._crossing(error), lost=lost, whatever=whatever)

    def _cancel(self, error: DcpRemoteError, *, lost: bool = False, late: bool = False) -> bool:
        with self._lock:
            if self._left or self._error is not None or (self._past_return and not late):
                return False
            self._error, self._lost = error, lost
            self._cancelled.set()
            return True

    def _tell(self, error: DcpRemoteError, *, lost: bool, whatever: bool = False) -> None:
        """The coordinator tells all; another rank tells the coordinator."""
        if self._pulse is not None:
            key = self._place.verdict if self._ranks.is_coordinator else self._place.failed
            end = pickle.dumps(_End("" if whatever else self.what, str(error), pickle.dumps(error), lost))
            self._pulse.tell(lambda client: client.put_first(key, end))

    def _crossing(self, error: BaseException) -> DcpRemoteError:
        """What the others raise for this rank's error."""
        rank = self._ranks.rank
        told = self.failed(f"Rank {rank} failed; {self.what} was given up.", rank=rank, cause=error)
        if not isinstance(error, DcpRemoteError):
            return told
        try:
            same = type(error)(error.what, **error.details | {"rank": rank})
            fits = survives_pickling(same) and len(pickle.dumps(same)) <= _ERROR_BYTES_MAX
        except Exception:  # noqa: BLE001  # a class of somebody's own may do anything
            return told
        return same if fits else told

    def _whereabouts(self, ranks: Sequence[int]) -> dict[str, str]:
        """Details of an error: who, and what each was last doing."""
        some = ranks[:_RANKS_NAMED_MAX]
        more = [f"{len(ranks) - len(some)} more"] if len(ranks) > len(some) else []
        last = [f"{rank}: {self._last_known(rank)}" for rank in some]
        return {"ranks": ", ".join([*map(str, some), *more]), "last": "; ".join(last)}

    def _last_known(self, rank: int) -> str:
        if self._pulse is None or rank == self._ranks.rank:
            return self.what if self._pulse is None else self._pulse.last_note
        beat = self._pulse.last(rank)
        if beat is None:
            return "never heard of"
        if beat.joint < self._place.number:
            return f"not here yet, {beat.note or 'nothing yet'}"
        return beat.note if beat.what in {self.what, beat.note} else f"{beat.what}, {beat.note}"


def _again(error: DcpRemoteError) -> DcpRemoteError:
    """Another error that says the same."""
    return type(error)(error.what, **error.details)


def _named(ranks: Sequence[int]) -> str:
    some = [str(rank) for rank in ranks[:_RANKS_NAMED_MAX]]
    more = f" and {len(ranks) - len(some)} more" if len(ranks) > len(some) else ""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(some)}{more}"
