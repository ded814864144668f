"""Outcome of a collective operation, as seen by one rank: its error if it was cancelled, and the number it goes by.

Only the coordinator ends an operation for all ranks: its heartbeat's thread posts the verdict. If the coordinator is
silent, or the store is gone with its host, each rank finds that out alone.

Each rank counts operations itself, so their numbers agree as long as all ranks begin equally many. But a rank may raise
before it begins an operation that the others begin, and that then fails without it; its count would stay one behind. So
a rank that finds the verdict on another operation under its number goes on to the next number, since no other rank will
do this rank's operation under the first one.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Sequence

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.picklable_errors import survives_pickling
from dcp_remote.common.threads import OneTimeEvent
from dcp_remote.coordination.heartbeat import RankStatus
from dcp_remote.coordination.key_value import Client
from dcp_remote.coordination.member import VERDICTS_KEPT, GroupMember
from dcp_remote.coordination.messages import CollectiveKeys, Verdict
from dcp_remote.errors import DcpRemoteError

# Time after the deadline in which the coordinator says who is missing, before the others give up by themselves.
GRACE_SECONDS = 2.0

# Ranks named in an error; the rest is counted.
_RANKS_NAMED_MAX = 16

# Largest pickled error: a verdict is put in one piece.
_ERROR_BYTES_MAX = 2**20


class Outcome:
    """Outcome of a collective operation, as seen by one rank; from any thread.

    Args:
        member: This rank as a member of the group.
        keys: Keys of the operation, by the number that this rank has counted.
        seconds: Seconds until the deadline, from now on.
        silence_seconds: Seconds without an answer of the store, or of sleep of this process, that end the operation.
        left_seconds: Returns the seconds left for work before this process is killed; the operation ends when there are
            none, even while it commits.
        failed: Class of the error that is raised for a cause that is no `DcpRemoteError`.
        timed_out: Class of the error that is raised at the deadline.
        on_renumber: Called with the new number if the operation goes by another one.
        clock: Monotonic clock, in seconds.

    Attributes:
        what: Name of the operation.
        failed: Class of the error that is raised for a cause that is no `DcpRemoteError`.
        timed_out: Class of the error that is raised at the deadline.
        keys: Keys of the operation, by the number known so far.
        contributed_keys: Keys under which this rank has contributed last; None before. Not set on the coordinator.
        error: Error that cancelled the operation; None while it goes on.
        coordinator_lost: True if the operation was cancelled and this rank cannot know what the coordinator did last.
        is_committing: True on a coordinator in the commit phase: only the deadline cancels.
        ended_before_commit: True if the coordinator's verdict says that it was not committing yet. Not set on the
            coordinator.
        is_unattended: True if the operation was cancelled because not all ranks came to it, or in time.
        has_left: True once this rank takes no part any more.
        has_met: True once all ranks have met in a round: the number is right.
        time_limit: Deadline that passes with time only.
        deadline: Deadline that also passes when the operation is cancelled, or no time is left for work.
    """

    def __init__(
        self,
        member: GroupMember,
        keys: CollectiveKeys,
        *,
        seconds: float,
        silence_seconds: float,
        left_seconds: Callable[[], float],
        failed: type[DcpRemoteError],
        timed_out: type[DcpRemoteError],
        on_renumber: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """Start the deadline."""
        self.what = keys.what
        self.failed = failed
        self.timed_out = timed_out
        self.keys = keys
        self.contributed_keys: CollectiveKeys | None = None
        self._member = member
        self._heartbeat = member.heartbeat
        self._on_renumber = on_renumber
        self._clock = clock
        self._seconds = seconds
        self._silence_seconds = silence_seconds
        self._left_seconds = left_seconds
        self._lock = threading.Lock()
        self._cancelled = OneTimeEvent()
        self.error: DcpRemoteError | None = None
        self.coordinator_lost = False
        self.is_committing = False
        self.ended_before_commit = False
        self.is_unattended = False
        self.has_left = False
        self.has_met = False
        self._looked_at = clock()
        self.time_limit = Deadline(seconds, clock)
        self.deadline = Deadline(
            seconds, lambda: math.inf if self._cancelled.is_set() or left_seconds() <= 0 else clock()
        )

    def enter_commit(self) -> None:
        """Enter the commit phase: only the deadline cancels from here on. Coordinator only.

        Raises:
            DcpRemoteError: The operation was cancelled already.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            self.is_committing = True

    def leave(self) -> DcpRemoteError | None:
        """Take no part any more; return the error that cancelled the operation before, if any. None can follow."""
        with self._lock:
            self.has_left = True
            return self.error

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the operation is cancelled."""
        self._cancelled.wait(seconds)

    def check_time_and_store(self) -> None:
        """Cancel the operation if its deadline and the grace have passed, no time is left, or the store is silent.

        From any thread, at any time; never touches the store. A thread that waits for another, which may be stuck in
        the store, calls this twice a second.
        """
        now = self._clock()
        asleep_seconds, self._looked_at = now - self._looked_at, now
        if self.has_left or self.error is not None:
            return
        heartbeat, rank, silence_seconds = self._heartbeat, self._member.rank, self._silence_seconds
        elapsed_seconds = self.time_limit.elapsed_seconds()
        if elapsed_seconds >= self._seconds + GRACE_SECONDS:
            self._time_out_alone()
        elif self._left_seconds() <= 0:
            message = f"There is no time left for {self.what} before rank {self.name_rank(rank)} is killed; "
            message += "it was given up."
            self.end(self.timed_out(message, rank=rank), even_in_commit=True)
        elif heartbeat is None or self.is_committing:
            return
        elif asleep_seconds > silence_seconds:
            message = (
                f"Rank {self.name_rank(rank)} ran no code for {asleep_seconds:.0f} s: its process was suspended, or "
                f"one call held the interpreter; {self.what} was given up."
            )
            self.end(self.failed(message, rank=rank), coordinator_lost=True)
        # Silence before the operation says nothing: after an outage the heartbeat needs a while to connect again.
        elif heartbeat.gone is not None or min(heartbeat.contact_seconds(), elapsed_seconds) > silence_seconds:
            self.end_without_store(heartbeat.gone)

    def raise_if_cancelled(self) -> None:
        """Raise the error that cancelled the operation, or that cancels it now; see `check_time_and_store`."""
        self.check_time_and_store()
        if self.error is not None:
            raise self.error

    # ---- where the others are

    def coordinator_status(self) -> RankStatus | None:
        """Return the coordinator's last status; None on the coordinator itself, or if it had no heartbeat."""
        return None if self._member.is_coordinator or self._heartbeat is None else self._heartbeat.last(0)

    def has_rank_left(self, status: RankStatus) -> bool:
        """Return whether a rank of this status takes no part in this operation any more."""
        number = self.keys.number
        is_out = status.operation == number and status.what == self.what and not status.is_inside
        return status.is_closed or status.operation > number or is_out

    def follow(self, status: RankStatus) -> bool:
        """Go on to a later number by the coordinator's status; return whether that changed this rank's.

        To the coordinator's number if the coordinator is in this operation. If this rank has missed more operations
        than there are verdicts, to the first of these; the verdicts then lead on.
        """
        keys = self.keys
        if self.has_met:
            return False
        is_same = status.what == self.what and status.is_inside
        number = status.operation if is_same else status.operation - VERDICTS_KEPT + 1
        return number > keys.number and self._renumber(keys, number)

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
        if self.has_met or verdict.what in {self.what, ""}:
            if is_coordinator:
                self.end(verdict.error(self.failed), is_unattended=verdict.is_unattended)
            else:
                self.is_unattended = verdict.is_unattended
                self.ended_before_commit = not verdict.coordinator_lost and not verdict.is_committing
                self.cancel(verdict.error(self.failed), coordinator_lost=verdict.coordinator_lost)
        elif self._renumber(keys, keys.number + 1) and is_coordinator:
            # For ranks that come later still, so that they go on to the next number, too.
            client.put_first(keys.verdict, data)
            self._member.note_verdict(keys.number, keys.verdict)
            others = range(1, self._member.world_size)
            own, theirs = (some.contributions(1, others) for some in (keys, keys.with_name(verdict.what)))
            self._member.note_left_keys(keys.number, [keys.failed, *own, *theirs])
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
        error = self.timed_out(message, **self.rank_details([0]))
        # A rank that hears nothing knows nothing of the coordinator.
        heartbeat = self._heartbeat
        if heartbeat is not None and heartbeat.contact_seconds() > heartbeat.delay_seconds_max + GRACE_SECONDS:
            error = self._store_error(self.timed_out, heartbeat.gone, until=" until the deadline")
        self.end(error, coordinator_lost=has_begun, even_in_commit=True)

    def end_without_store(self, cause: Exception | None) -> None:
        """End the operation: the store is gone, or does not answer. The coordinator may live all the same."""
        self.end(self._store_error(self.failed, cause), coordinator_lost=True)

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
        self.end(self.failed(message, **self.rank_details([0])), coordinator_lost=True, keys=keys)

    def end(
        self,
        error: DcpRemoteError,
        *,
        coordinator_lost: bool = False,
        even_in_commit: bool = False,
        any_operation: bool = False,
        is_unattended: bool = False,
        keys: CollectiveKeys | None = None,
    ) -> None:
        """Cancel the operation here, and tell the others.

        Args:
            error: Error that every rank raises.
            coordinator_lost: This rank cannot know what the coordinator does; ignored on the coordinator.
            even_in_commit: Cancel also in the coordinator's commit phase.
            any_operation: End every operation under this number, also one of another name.
            is_unattended: Some rank did not come to the operation.
            keys: End the operation only as long as these are its keys.
        """
        is_coordinator = self._member.is_coordinator
        self.is_unattended = self.is_unattended or is_unattended  # before the thread that waits can see the error
        is_lost = coordinator_lost and not is_coordinator
        if self.cancel(error, coordinator_lost=is_lost, even_in_commit=even_in_commit, keys=keys):
            if is_coordinator:
                self.post_verdict(error, coordinator_lost=self.is_committing, any_operation=any_operation)
            else:
                told = self.error_for_others(error)
                self.post_verdict(told, coordinator_lost=coordinator_lost, any_operation=any_operation)

    def cancel(
        self,
        error: DcpRemoteError,
        *,
        coordinator_lost: bool = False,
        even_in_commit: bool = False,
        keys: CollectiveKeys | None = None,
    ) -> bool:
        """Cancel the operation here, without telling the others; return whether that changed anything.

        Nothing changes if the operation was cancelled or left before, or is in the coordinator's commit phase.

        Args:
            error: Error that this rank raises.
            coordinator_lost: This rank cannot know what the coordinator did last.
            even_in_commit: Cancel also in the coordinator's commit phase.
            keys: Cancel the operation only as long as these are its keys.
        """
        with self._lock:
            if keys is not None and self.keys is not keys:
                return False
            if self.has_left or self.error is not None or (self.is_committing and not even_in_commit):
                return False
            self.error, self.coordinator_lost = error, coordinator_lost
            self._cancelled.set()
            return True

    def post_verdict(self, error: DcpRemoteError, *, coordinator_lost: bool, any_operation: bool = False) -> None:
        """Post a verdict with the next heartbeat, unless one was posted: the coordinator to all, others to it.

        Args:
            error: Error that the readers raise.
            coordinator_lost: No other rank can know what the coordinator did last.
            any_operation: End every operation under this number, also one of another name.
        """
        if self._heartbeat is not None:
            key = self.keys.verdict if self._member.is_coordinator else self.keys.failed
            what = "" if any_operation else self.what
            states = coordinator_lost, self.is_committing, self.is_unattended
            verdict = Verdict(what, str(error), pickle.dumps(error), *states)
            data = pickle.dumps(verdict)
            self._heartbeat.enqueue(lambda client: client.put_first(key, data))

    def error_for_others(self, error: BaseException) -> DcpRemoteError:
        """Return the error that the other ranks raise for an error of this rank: the same, or `failed` if it is odd."""
        rank = self._member.rank
        failed = self.failed(f"Rank {self.name_rank(rank)} failed; {self.what} was given up.", rank=rank, cause=error)
        if not isinstance(error, DcpRemoteError):
            return failed
        try:
            process = {} if self._heartbeat is None else {"process": self._heartbeat.process}
            same = error.with_details(rank=rank, **process)
            fits = survives_pickling(same) and len(pickle.dumps(same)) <= _ERROR_BYTES_MAX
        except Exception:  # noqa: BLE001  # a user's own class may raise anything
            return failed
        return same if fits else failed

    def rank_details(self, ranks: Sequence[int]) -> dict[str, str]:
        """Return details for an error: the ranks, and the last known activity of each."""
        shown = ranks[:_RANKS_NAMED_MAX]
        more = [f"{len(ranks) - len(shown)} more"] if len(ranks) > len(shown) else []
        last = [f"{rank}: {self._last_activity(rank)}" for rank in shown]
        return {"ranks": ", ".join([*map(str, shown), *more]), "last": "; ".join(last)}

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Return the first ranks with their hosts and processes, as in "Ranks 3 (gpu-07, pid 4711), 5 and 2 more".

        A rank whose heartbeat was never read is only a number.
        """
        shown = [self.name_rank(rank) for rank in ranks[:_RANKS_NAMED_MAX]]
        more = f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else ""
        return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more}"

    def name_rank(self, rank: int) -> str:
        """Return the number of a rank with its host and process, as far as they are known: "3 (gpu-07, pid 4711)"."""
        if self._heartbeat is None:
            return str(rank)
        if rank == self._member.rank:
            return f"{rank} ({self._heartbeat.process})"
        status = self._heartbeat.last_known(rank)
        return f"{rank} ({status.process})" if status is not None and status.host else str(rank)

    def _last_activity(self, rank: int) -> str:
        if self._heartbeat is None or rank == self._member.rank:
            return self.what if self._heartbeat is None else self._heartbeat.last_activity
        status = self._heartbeat.last_known(rank)
        if status is None:
            return "no heartbeat yet"
        if status.operation < self.keys.number:
            return f"has not joined, {status.note or 'no activity yet'}"
        return status.note if status.what in {self.what, status.note} else f"{status.what}, {status.note}"


def _is_host(name: str, host: str) -> bool:
    """Return whether two names, one of which may have a domain, are those of one host."""
    return name == host or name.partition(".")[0] == host or name == host.partition(".")[0]
