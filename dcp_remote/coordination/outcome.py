"""Outcome of a collective operation, as seen by one rank: its error if it was cancelled, and the number it goes by.

Only the coordinator ends an operation for all ranks: its heartbeat's thread posts the verdict. If the coordinator is
silent, or the store is gone with its host, each rank finds that out alone.

Each rank counts operations itself, so their numbers agree as long as all ranks begin equally many. But a rank may never
come to an operation that the others begin, and that then fails without it; its count would stay one behind. So a rank
that finds the verdict on other operations under its number goes on to the next number, since no other rank will do this
rank's operation under the first one.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.picklable_errors import survives_pickling
from dcp_remote.common.text import join_some
from dcp_remote.common.threads import OneTimeEvent
from dcp_remote.coordination.heartbeat import RankStatus
from dcp_remote.coordination.key_value import Client
from dcp_remote.coordination.member import OPERATIONS_KEPT, GroupMember
from dcp_remote.coordination.messages import CollectiveKeys, Commit, Verdict
from dcp_remote.errors import DcpRemoteError, StateMismatchError

# Time after the deadline in which the coordinator says who is missing, before the others give up by themselves.
GRACE_SECONDS = 2.0

# Announcement of the coordinator: the number of the last operation that it has ended by a verdict.
_VERDICT = "verdict"

# Ranks whose activity an error tells.
_RANKS_DESCRIBED_MAX = 16

# Largest pickled error: a verdict is put in one piece.
_ERROR_BYTES_MAX = 2**20


class Phase(Enum):
    """Phase of a collective operation, as seen by one rank."""

    ARRIVING = auto()  # not all ranks have met in a round, as far as this rank knows
    MET = auto()  # all ranks have met: the number is right
    COMMITTING = auto()  # on the coordinator: only the deadline cancels


@dataclass(frozen=True, slots=True)
class Terms:
    """Times of a collective operation, and the classes of its errors.

    Attributes:
        failed: Class of the error that is raised for a cause that is no `DcpRemoteError`.
        timed_out: Class of the error that is raised at the deadline.
        seconds: Seconds until the deadline, from the beginning on.
        silence_seconds: Seconds of silence that end the operation: of another rank that was heard before, of the store,
            or of this process.
        arrival_seconds: Seconds after which a rank that has not begun the operation ends it, unless its heartbeat shows
            that it is in another call of this package.
        left_seconds: Returns the seconds left for work before this process is killed; the operation ends when there are
            none, even while it commits.
    """

    failed: type[DcpRemoteError]
    timed_out: type[DcpRemoteError]
    seconds: float
    silence_seconds: float = 60.0
    arrival_seconds: float = math.inf
    left_seconds: Callable[[], float] = lambda: math.inf


@dataclass(frozen=True, slots=True)
class Cancelled:
    """End of a collective operation by an error, as seen by one rank.

    Attributes:
        error: Error that cancelled the operation.
        commit: State of the coordinator's commit, as far as this rank knows.
        is_unattended: True if the operation was cancelled because not all ranks came to it, or in time.
    """

    error: DcpRemoteError
    commit: Commit = Commit.POSSIBLE
    is_unattended: bool = False


class Outcome:
    """Outcome of a collective operation, as seen by one rank: what a `Collective` offers to any thread.

    Args:
        member: This rank as a member of the group.
        keys: Keys of the operation, by the number that this rank has counted.
        terms: Times of the operation, and the classes of its errors.
        on_renumber: Called with the new number if the operation goes by another one.

    Attributes:
        what: Name of the operation.
        terms: Times of the operation, and the classes of its errors.
        keys: Keys of the operation, by the number known so far.
        phase: Phase of the operation.
        has_left: True once this rank takes no part any more.
        ended: End of the operation by an error; None while the operation goes on.
        time_limit: Deadline that passes with time only.
        deadline: Deadline that also passes when the operation is cancelled, or no time is left for work.
    """

    def __init__(
        self, member: GroupMember, keys: CollectiveKeys, terms: Terms, *, on_renumber: Callable[[int], None]
    ) -> None:
        """Start the deadline."""
        self.what = keys.what
        self.terms = terms
        self.keys = keys
        self.phase = Phase.ARRIVING
        self.has_left = False
        self.ended: Cancelled | None = None
        self._member = member
        self._heartbeat = member.heartbeat
        self._on_renumber = on_renumber
        self._lock = threading.Lock()
        self._is_cancelled = OneTimeEvent()
        self._looked_at = member.clock()
        self.time_limit = Deadline(terms.seconds, member.clock)
        self.deadline = Deadline(terms.seconds, self._clock_of_work)

    def _clock_of_work(self) -> float:
        is_over = self._is_cancelled.is_set() or self.terms.left_seconds() <= 0
        return math.inf if is_over else self._member.clock()

    @property
    def has_met(self) -> bool:
        """True once all ranks have met in a round."""
        return self.phase is not Phase.ARRIVING

    @property
    def is_committing(self) -> bool:
        """True on a coordinator in the commit phase."""
        return self.phase is Phase.COMMITTING

    @property
    def cancelled(self) -> DcpRemoteError | None:
        """Error that cancelled the operation; None while the operation goes on."""
        return None if self.ended is None else self.ended.error

    def meet(self) -> None:
        """Note that all ranks have met in a round."""
        self.phase = Phase.MET
        self._member.last_met = self.keys.number

    def enter_commit(self) -> None:
        """Enter the commit phase: only the deadline cancels from here on. Coordinator only.

        Raises:
            DcpRemoteError: The operation was cancelled already.
        """
        with self._lock:
            if self.ended is not None:
                raise self.ended.error
            self.phase = Phase.COMMITTING

    def leave(self) -> DcpRemoteError | None:
        """Take no part any more; return the error that cancelled the operation before, if any. None can follow."""
        with self._lock:
            self.has_left = True
            return self.cancelled

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the operation is cancelled."""
        self._is_cancelled.wait(seconds)

    def check_time_and_store(self) -> None:
        """Cancel the operation if its deadline and the grace have passed, no time is left, or the store is silent.

        From any thread, at any time; never touches the store. A thread that waits for another, which may be stuck in
        the store, calls this twice a second.
        """
        now = self._member.clock()
        asleep_seconds, self._looked_at = now - self._looked_at, now
        if self.has_left or self.cancelled is not None:
            return
        heartbeat, rank, terms = self._heartbeat, self._member.rank, self.terms
        elapsed_seconds = self.time_limit.elapsed_seconds()
        if elapsed_seconds >= terms.seconds + GRACE_SECONDS:
            self._time_out_alone()
        elif terms.left_seconds() <= 0:
            message = f"There is no time left for {self.what} before rank {self.name_rank(rank)} is killed; "
            message += "it was given up."
            self.end(terms.timed_out(message, rank=rank), even_in_commit=True)
        elif heartbeat is None or self.is_committing:
            return
        elif asleep_seconds > terms.silence_seconds:
            message = (
                f"Rank {self.name_rank(rank)} ran no code for {asleep_seconds:.0f} s: its process was suspended, or "
                f"one call held the interpreter; {self.what} was given up."
            )
            self.end(terms.failed(message, rank=rank), commit=Commit.UNKNOWN)
        # Silence before the operation says nothing: after an outage the heartbeat needs a while to connect again.
        elif heartbeat.gone is not None or min(heartbeat.contact_seconds(), elapsed_seconds) > terms.silence_seconds:
            self.end_without_store(heartbeat.gone)

    def raise_if_cancelled(self) -> None:
        """Raise the error that cancelled the operation, or cancels it now; never touches the store.

        For long work between two rounds.
        """
        self.check_time_and_store()
        if self.ended is not None:
            raise self.ended.error

    # ---- where the others are

    def coordinator_status(self) -> RankStatus | None:
        """Return the coordinator's last status; None on the coordinator itself, or if it had no heartbeat."""
        return None if self._member.is_coordinator or self._heartbeat is None else self._heartbeat.last(0)

    def has_rank_left(self, status: RankStatus) -> bool:
        """Return whether a rank of this status takes no part in this operation any more."""
        number = self.keys.number
        is_out = status.operation == number and status.what == self.what and not status.is_inside
        return status.is_closed or status.operation > number or is_out

    def may_have_verdict(self, status: RankStatus) -> bool:
        """Return whether there may be a verdict for this rank where this is the coordinator's status."""
        return status.notices.get(_VERDICT, 0) >= self.keys.number or self.has_rank_left(status)

    def skip_deleted_verdicts(self, status: RankStatus) -> bool:
        """Go on to the oldest number that may have a verdict, if this rank is further behind; return whether it is.

        `read_verdict` goes on from there, one number at a time. `status` is the coordinator's.
        """
        keys, first_kept = self.keys, status.operation - OPERATIONS_KEPT + 1
        return not self.has_met and first_kept > keys.number and self._renumber(keys, first_kept)

    def read_verdict(self, client: Client) -> bool:
        """Read the verdict under this number, if there is one: cancel, or go on to the next number.

        Returns:
            Whether there was a verdict. The coordinator reads that of a failed rank, any other rank the coordinator's.
        """
        keys, is_coordinator = self.keys, self._member.is_coordinator
        key = keys.failed if is_coordinator else keys.verdict
        data = client.get(key) if client.has([key]) else b""
        if not data:
            return False  # also if the verdict was deleted just now: this rank is behind, and will find that out
        verdict = pickle.loads(data)  # noqa: S301  # of a rank of this job
        assert isinstance(verdict, Verdict), "nothing else is put there"
        if self.has_met or self.what in verdict.names:
            error = verdict.error(self.terms.failed)
            # Another thread may have found a later number meanwhile, under which all ranks have met.
            if is_coordinator:
                self.end(error, is_unattended=verdict.is_unattended, keys=keys)
            else:
                self.cancel(Cancelled(error, verdict.commit, verdict.is_unattended), keys=keys)
            return True
        if is_coordinator:
            # For ranks that come later still; before they can read that this rank has another number.
            client.put_first(keys.verdict, data)
            self._member.note_answers(keys.number, [keys.verdict])
        if self._renumber(keys, keys.number + 1) and is_coordinator:
            operations = [keys, *(CollectiveKeys(keys.number, name) for name in verdict.names)]
            self._member.note_left_keys(keys.number, [keys.failed], [one.parts(1) for one in operations])
        return True

    def _renumber(self, keys: CollectiveKeys, number: int) -> bool:
        """Change the number unless another thread has changed it since `keys` were read; return whether it did."""
        with self._lock:
            if self.keys is not keys:
                return False
            self.keys = CollectiveKeys(number, self.what)
            self._on_renumber(number)
            return True

    # ---- ends

    def _time_out_alone(self) -> None:
        """End the operation: the deadline and the grace have passed without a verdict."""
        has_begun = True
        if self._member.is_coordinator:
            message = f"The coordinator did not end {self.what} by the deadline."
        else:
            status = self.coordinator_status()
            has_begun = status is None or status.operation >= self.keys.number
            message = f"The coordinator did not end {self.what} by the deadline; it was given up."
        error = self.terms.timed_out(message, **self.rank_details([0]))
        # A rank that hears nothing knows nothing of the coordinator.
        heartbeat = self._heartbeat
        if heartbeat is not None and heartbeat.contact_seconds() > heartbeat.delay_seconds_max + GRACE_SECONDS:
            error = self._store_error(self.terms.timed_out, heartbeat.gone, until=" until the deadline")
        self.end(error, commit=Commit.UNKNOWN if has_begun else Commit.POSSIBLE, even_in_commit=True)

    def end_without_store(self, cause: Exception | None) -> None:
        """End the operation: the store is gone, or does not answer. The coordinator may live all the same."""
        self.end(self._store_error(self.terms.failed, cause), commit=Commit.UNKNOWN)

    def _store_error(self, kind: type[DcpRemoteError], cause: Exception | None, until: str = "") -> DcpRemoteError:
        """Return the error of a rank that hears nothing from the store; other ranks may be told of it later."""
        heartbeat, rank = self._heartbeat, self._member.rank
        assert heartbeat is not None, "a single rank has no store"
        address = heartbeat.address
        store = f"the key-value store of the process group{f' at {address}' if address is not None else ''}"
        coordinator = heartbeat.last_known(0)
        if address is not None and coordinator is not None and _is_host(address.host, coordinator.host):
            store += " (host of rank 0)"
        subject = f"Rank {self.name_rank(rank)}"
        if cause is not None:
            message = f"{subject} has lost the connection to {store}; {self.what} was given up. Check its host."
            return kind(message, rank=rank, cause=cause)
        seconds, awake_seconds = heartbeat.unanswered_seconds(), heartbeat.contact_seconds()
        suspended_seconds = seconds - awake_seconds
        suspended = ""
        if suspended_seconds > heartbeat.delay_seconds_max:
            suspended = f", in {suspended_seconds:.0f} s of which its own process was suspended"
        message = (
            f"{subject} has heard nothing from {store} for {seconds:.0f} s{until}{suspended}; {self.what} was given "
            f"up. Check the host of that store, and the network between the two."
        )
        return kind(message, rank=rank, cause=heartbeat.trouble)

    def end_without_verdict(self, status: RankStatus, keys: CollectiveKeys) -> None:
        """End the operation: the coordinator has gone on, and this rank did not see how the operation ended.

        Changes nothing if the operation has other keys than `keys`, or the coordinator another status, by now: the
        heartbeat's thread has found another number meanwhile, or may find one.
        """
        if self.coordinator_status() != status:
            return
        if status.is_closed:
            message = f"The coordinator has closed without a verdict on {self.what}."
        elif status.operation == keys.number:
            message = f"The coordinator has left {self.what} without an answer for this rank."
        else:
            message = f"This rank is behind: {self.what} is over for the others, and its outcome is not known any more."
        self.end(self.terms.failed(message, **self.rank_details([0])), commit=Commit.UNKNOWN, keys=keys)

    def end(
        self,
        error: DcpRemoteError,
        *,
        commit: Commit = Commit.POSSIBLE,
        even_in_commit: bool = False,
        also: Collection[str] = (),
        is_unattended: bool = False,
        keys: CollectiveKeys | None = None,
    ) -> None:
        """Cancel the operation here, and tell the others.

        Args:
            error: Error that every rank raises.
            commit: State of the commit, as far as this rank knows; ignored on the coordinator.
            even_in_commit: Cancel also in the coordinator's commit phase.
            also: Names of other operations under this number, which end as well.
            is_unattended: Some rank did not come to the operation.
            keys: End the operation only as long as these are its keys.
        """
        if not self.cancel(Cancelled(error, commit, is_unattended), even_in_commit=even_in_commit, keys=keys):
            return
        if self._member.is_coordinator:
            # Asked once the operation is cancelled: from then on the commit phase cannot begin.
            commit = Commit.UNKNOWN if self.is_committing else Commit.NEVER
        else:
            error = self.error_for_others(error)
        self.post_verdict(Cancelled(error, commit, is_unattended), also=also)

    def cancel(self, cancelled: Cancelled, *, even_in_commit: bool = False, keys: CollectiveKeys | None = None) -> bool:
        """Cancel the operation here, without telling the others; return whether that changed anything.

        Nothing changes if the operation was cancelled or left before, or is in the coordinator's commit phase.

        Args:
            cancelled: End of the operation.
            even_in_commit: Cancel also in the coordinator's commit phase.
            keys: Cancel the operation only as long as these are its keys.
        """
        with self._lock:
            if keys is not None and self.keys is not keys:
                return False
            if self.has_left or self.ended is not None or (self.is_committing and not even_in_commit):
                return False
            self.ended = cancelled
            self._is_cancelled.set()
            return True

    def post_verdict(self, cancelled: Cancelled, *, also: Collection[str] = ()) -> None:
        """Post a verdict with the next heartbeat, unless one was posted: the coordinator to all, others to it.

        Args:
            cancelled: End of the operation for the readers.
            also: Names of other operations under this number, which end as well.
        """
        heartbeat, keys = self._heartbeat, self.keys
        if heartbeat is not None:
            key = keys.verdict if self._member.is_coordinator else keys.failed
            names, error = frozenset([self.what, *also]), cancelled.error
            verdict = Verdict(names, str(error), pickle.dumps(error), cancelled.commit, cancelled.is_unattended)
            data = pickle.dumps(verdict)

            def post(client: Client) -> None:
                client.put_first(key, data)
                if self._member.is_coordinator:
                    heartbeat.announce(_VERDICT, keys.number)

            heartbeat.enqueue(post)

    def error_for_others(self, error: BaseException) -> DcpRemoteError:
        """Return the error that the other ranks raise for an error of this rank: the same, or `failed` if it is odd."""
        rank = self._member.rank
        failed = self.terms.failed(
            f"Rank {self.name_rank(rank)} failed; {self.what} was given up.", rank=rank, cause=error
        )
        if not isinstance(error, DcpRemoteError):
            return failed
        try:
            process = {} if self._heartbeat is None else {"process": self._heartbeat.status.process}
            # All ranks raise this one by themselves, and it names the ranks whose states differ.
            same = error if isinstance(error, StateMismatchError) else error.with_details(rank=rank, **process)
            fits = survives_pickling(same) and len(pickle.dumps(same)) <= _ERROR_BYTES_MAX
        except Exception:  # noqa: BLE001  # a user's own class may raise anything
            return failed
        return same if fits else failed

    def rank_details(self, ranks: Sequence[int]) -> dict[str, str]:
        """Return details for an error: the ranks, and the last known activity of each."""
        last = [f"{rank}: {self._last_activity(rank)}" for rank in ranks[:_RANKS_DESCRIBED_MAX]]
        return {"ranks": join_some(ranks), "last": "; ".join(last)}

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Return the first ranks with their hosts and processes, as in "Ranks 3 (gpu-07, pid 4711), 5 and 2 more".

        A rank whose heartbeat was never read is only a number.
        """
        return f"Rank{'s' if len(ranks) > 1 else ''} {join_some([*map(self.name_rank, ranks)])}"

    def name_rank(self, rank: int) -> str:
        """Return the number of a rank with its host and process, as far as they are known: "3 (gpu-07, pid 4711)"."""
        if self._heartbeat is None:
            return str(rank)
        if rank == self._member.rank:
            return f"{rank} ({self._heartbeat.status.process})"
        status = self._heartbeat.last_known(rank)
        return f"{rank} ({status.process})" if status is not None and status.host else str(rank)

    def _last_activity(self, rank: int) -> str:
        if self._heartbeat is None or rank == self._member.rank:
            return self.what if self._heartbeat is None else self._heartbeat.status.note
        status = self._heartbeat.last_known(rank)
        if status is None:
            return "no heartbeat yet"
        if status.operation < self.keys.number:
            return f"has not joined, {status.note or 'no activity yet'}"
        return status.note if status.what in {self.what, status.note} else f"{status.what}, {status.note}"


def _is_host(name: str, host: str) -> bool:
    """Return whether two names, one of which may have a domain, are those of one host."""
    return name == host or name.partition(".")[0] == host or name == host.partition(".")[0]
