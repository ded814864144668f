"""Collective operations: each rank contributes, the coordinator decides, and all ranks get the answer, or an error.

All messages go over the key-value store of the process group, never through a torch collective, which nothing could
interrupt. An operation ends on every living rank: with its answers; with the error of the rank that failed, a heartbeat
or two later; with the names of ranks that did not come or fell silent; or at its deadline, with the names of ranks that
did not report. A rank in the middle of a long upload is reached through the `Deadline` of the operation, which passes
at once.

The coordinator is rank 0 of the group. The other ranks of one host contribute together, in one part, and one of them
polls for the answer; see `host_link`.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch.distributed as dist

from dcp_remote.common.threads import HelperThread
from dcp_remote.coordination.failure_detector import FailureDetector
from dcp_remote.coordination.heartbeat import one_line
from dcp_remote.coordination.host_link import HostLink
from dcp_remote.coordination.key_value import Client, HelperClient
from dcp_remote.coordination.member import POLLING_SECONDS_MAX, GroupMember
from dcp_remote.coordination.messages import (
    CollectiveKeys,
    Commit,
    Contributions,
    decode_answer,
    encode_answers,
)
from dcp_remote.coordination.outcome import Cancelled, Outcome, Phase, Terms
from dcp_remote.errors import DcpRemoteError

logger = logging.getLogger(__name__)

V = TypeVar("V")
R = TypeVar("R")
T = TypeVar("T")

# Longest text of the consequence of a cancellation, in the error that cancelled.
_HERE_CHARACTERS_MAX = 500

# Exceptions that end a process in any case: they are raised unchanged, never replaced by the error that cancelled.
_PROCESS_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Collective(Outcome):
    """One operation that all ranks do together; a context manager. `RankGroup.prepare` makes it.

    One thread uses it; other threads may call only the methods of `Outcome`, `abort` and `share`.

    An exception that leaves the block on one rank is told to all the others, which raise it: a `DcpRemoteError` as one
    of the same class, with `rank=`; any other as `failed`. The rank itself raises its own unchanged. An exception that
    a block raises after the operation was cancelled is a consequence: the error that cancelled leaves the block then.
    A block that ends without an exception has succeeded, whatever happened to other ranks after its last round.

    Args:
        member: This rank as a member of the group.
        keys: Keys of the operation, by the number that this rank has counted.
        terms: Times of the operation, and the classes of its errors.
        on_renumber: Called with the new number if the operation goes by another one.
        on_leave: Called when this rank has left the operation.

    Attributes:
        failed: Class of the error that is raised for a cause that is no `DcpRemoteError`.
        failure_detector: Detector of ranks that keep the operation from going on.
        has_failed_here: True once this rank has left with an error of its own, which the others are to be told.
    """

    def __init__(
        self,
        member: GroupMember,
        keys: CollectiveKeys,
        terms: Terms,
        *,
        on_renumber: Callable[[Collective, int], None],
        on_leave: Callable[[Collective], None],
    ) -> None:
        """Start the deadline; other ranks hear of the operation by `RankGroup.begin`."""
        super().__init__(member, keys, terms, on_renumber=partial(on_renumber, self))
        self.failure_detector = FailureDetector(member, self)
        self.failed = terms.failed
        self.has_failed_here = False
        self._on_leave = on_leave
        self._client: HelperClient | None = None
        self._round = 0
        # On the coordinator: sizes of the answers that are in the store, by key.
        self._answers: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Collective({self.what!r}, number={self.keys.number}, rank={self._member.rank})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the operation. Never blocks: the heartbeat's thread tells the other ranks."""
        cancelled, keys = self.leave(), self.keys
        if self._member.is_coordinator:
            # Ranks may have contributed to this round, which is not over, or to the next.
            unread = range(max(1, self._round), self._round + 2) if error is not None else ()
            self._member.note_left_keys(keys.number, [keys.failed], map(keys.parts, unread))
            self._member.note_answers(keys.number, [keys.verdict, *self._answers])
            if self._heartbeat is not None and self._heartbeat.is_asked:
                self._heartbeat.enqueue(self._heartbeat.stop_asking)
            if error is not None and self._heartbeat is not None:
                # An operation that fails before its first round deletes nothing by itself.
                self._heartbeat.enqueue(lambda client: self._member.delete_left_keys(client, keys.number - 1))
        self.has_failed_here = error is not None and cancelled is None
        if error is not None and cancelled is None:
            # A `DcpRemoteError` of the commit says itself whether it was carried out; any other error does not.
            in_commit = Commit.POSSIBLE if isinstance(error, DcpRemoteError) else Commit.UNKNOWN
            commit = in_commit if self.is_committing else Commit.NEVER
            self.post_verdict(Cancelled(self.error_for_others(error), commit))
        if self._client is not None:
            self._member.return_client(self._client)
        self._on_leave(self)
        # An error of the coordinator's commit says more than that the time is over.
        is_unchanged = isinstance(error, _PROCESS_ENDS) or self.is_committing
        if error is not None and cancelled is not None and error is not cancelled and not is_unchanged:
            raise _copy_error(cancelled, error) from error

    # ---- for callers

    @property
    def is_commit_unknown(self) -> bool:
        """True if the operation was cancelled and this rank cannot know what the coordinator did last.

        The coordinator fell silent, or the store is gone; or the coordinator was committing, and never said how that
        ended. Always False on the coordinator.
        """
        return not self._member.is_coordinator and self.ended is not None and self.ended.commit is Commit.UNKNOWN

    @property
    def is_unattended(self) -> bool:
        """True if the operation was cancelled because some rank did not come to it; the same on all ranks that did."""
        return self.ended is not None and self.ended.is_unattended

    @property
    def ended_before_commit(self) -> bool:
        """True if the operation failed, and it is certain that the coordinator has not committed and never will."""
        if self._member.is_coordinator:
            return not self.is_committing
        return self.ended is not None and self.ended.commit is Commit.NEVER

    def set_activity(self, text: str) -> None:
        """Set the activity of this rank, which other ranks show if this one is late or falls silent."""
        if self._heartbeat is not None and not self.has_left:
            self._heartbeat.set_activity(text)

    def gather(self, value: V, decide: Callable[[list[V]], R]) -> R:
        """Send every rank's value to the coordinator, and return its decision on every rank.

        Values are pickled, but for the coordinator's own. One rank of each host puts the values of its ranks, and polls
        a key that all hosts share. The coordinator deletes the values once it has put its decision.

        Args:
            value: Value of this rank.
            decide: Called on the coordinator, in this thread, with the values of all ranks, by rank. What it raises,
                all ranks raise.

        Raises:
            DcpRemoteError: The operation was cancelled; see the class for the error.
        """
        return self.scatter(value, lambda values: [decide(values)] * len(values))

    def scatter(self, value: V, decide: Callable[[list[V]], Sequence[R]]) -> R:
        """Send every rank's value to the coordinator, and return on each rank its own of the answers.

        Args:
            value: Value of this rank.
            decide: As for `gather`; returns one answer for each rank. An object that is the answer to several ranks is
                put once.

        Raises:
            DcpRemoteError: The operation was cancelled; see the class for the error.
        """
        self.raise_if_cancelled()
        self._round += 1
        if self.is_committing:
            self.phase = Phase.MET  # the others are needed again
        if self._heartbeat is None:
            return decide([value])[0]
        if not self._member.is_coordinator:
            answer: R = self._contribute(value)  # which `decide` made on the coordinator
            return answer
        contributions = self._collect()
        others = range(1, self._member.world_size)
        answers = decide([value, *(self._unpickle(rank, contributions.data.pop(rank)) for rank in others)])
        assert len(answers) == self._member.world_size, "one answer for each rank"
        self._publish(answers[1:], contributions)
        return answers[0]

    def run_in_thread(self, call: Callable[[], R]) -> R:
        """Make a call that may block forever, in a thread of its own, and return its result if the operation goes on.

        Raises:
            DcpRemoteError: The operation was cancelled; the thread is left behind.
        """
        helper = HelperThread("dcp_remote-request")
        try:
            return helper.run(call, self.raise_if_cancelled)
        finally:
            helper.close()

    def share(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """Return a document that one rank of each host fetches for all ranks of the host; from any thread.

        Args:
            key: Key of the document, whose content never changes.
            fetch: Fetches the document; called here if no other rank of this host sends it within five seconds.
        """
        link = self._member.link()
        return fetch() if link is None else link.share(key, fetch)

    def begin_commit(self) -> None:
        """Enter the commit phase: only the deadline cancels from here on, not the others' silence or failure.

        The phase ends when another round begins. Called by the coordinator, just before its commit; costs one operation
        on the store, which reads whether a rank has failed or given up before: a coordinator that was stopped, and for
        which the others do not wait any more, goes no further.

        Raises:
            DcpRemoteError: The operation was cancelled already, or its deadline has passed.
        """
        assert self._member.is_coordinator, "the others commit nothing"
        self.raise_if_cancelled()
        if self._heartbeat is not None:
            self._ask(self.read_verdict)
        if self.time_limit.expired():
            message = f"The deadline passed before {self.what} was committed; it was given up."
            self.end(self.terms.timed_out(message, rank=0))
        self.enter_commit()

    def abort(self, error: BaseException) -> bool:
        """Cancel the operation from another thread, and tell the other ranks, as if its block had raised this error.

        Returns:
            Whether the operation is cancelled; False in the commit phase, or if this rank has left.
        """
        self.end(self.error_for_others(error))
        return self.cancelled is not None

    # ---- rounds, in the thread of the block

    def _contribute(self, value: object) -> Any:
        """Send this rank's value and return the answer; send again under each new number."""
        rank, data = self._member.rank, pickle.dumps(value)
        while True:
            # Once all ranks have met, the heartbeat's thread is soon enough.
            if not (self.has_met or self._member.last_met == self.keys.number - 1):
                self._ask(self._read_verdicts)
            self.raise_if_cancelled()
            keys, pauses, link = self.keys, self._member.polling_pauses(), self._member.link()
            series, key = keys.parts(self._round), keys.answer(self._round)
            try:
                if link is not None and link.begin(series, key, data):
                    answers = self._wait_for(partial(Client.get, key=key), keys, pauses, (link, key))
                else:
                    if link is None:  # else nothing is free for another connection either
                        self._client = self._client or self._member.take_client()
                    part, is_confirmed = pickle.dumps({rank: data}), link is not None  # asked again if it breaks
                    self._ask(partial(Client.append, series=series, value=part, is_confirmed=is_confirmed))
                    self.wait(next(pauses))  # the coordinator has not even looked yet
                    answers = self._wait_for(partial(Client.get, key=key), keys, pauses)
            except Exception as error:
                if link is None or link.failure is not error:
                    raise
                continue  # this rank speaks for itself from now on
            finally:
                if link is not None:
                    link.end(key)
            if answers is not None:
                break
            self._ask(partial(Client.delete_series, series=series))  # the coordinator never comes under this number
        self.meet()
        return decode_answer(key, answers, rank, self._read_block)

    def _read_block(self, key: str) -> bytes:
        block = self._ask(lambda client: client.get(key))
        if not block:
            raise self.failed(f"This rank is behind: {self.what} is over for the others.")
        return block

    def _collect(self) -> Contributions:
        """Return the contributions of all other ranks; wait again under each new number of the operation."""
        if not self.has_met:
            self._ask(self._delete_left_keys_and_read_verdicts)
        self.failure_detector.is_waiting = True
        has_all = None
        while has_all is None:
            keys = self.keys
            contributions = Contributions(keys.parts(self._round), range(1, self._member.world_size))
            self.failure_detector.expect(self._round, contributions)
            has_all = self._wait_for(contributions.read, keys, self._member.polling_pauses(self._member.world_size))
        self.failure_detector.is_waiting = False
        self.meet()
        return contributions

    def _unpickle(self, rank: int, data: bytes) -> Any:
        try:
            return pickle.loads(data)  # noqa: S301  # of a rank of this job
        except Exception as error:
            name = self.name_rank(rank)
            message = f"The coordinator cannot unpickle what rank {name} sent; {self.what} was given up."
            raise self.failed(message, rank=rank, cause=error) from error

    def _publish(self, answers: Sequence[object], contributions: Contributions) -> None:
        """Put the answers to the other ranks, and delete what they have sent to get them, and the answers before.

        In the commit phase an error is only logged, since it changes nothing of what was decided.
        """
        data = encode_answers(self.keys.answer(self._round), answers)
        if not self.is_committing:
            self.raise_if_cancelled()
        # All ranks have contributed to this round, and so have read the answers of the one before.
        old, new = self._answers, {key: len(answer) for key, answer in data.items()}
        self._answers = {**old, **new}
        self.failure_detector.expect(self._round + 1)

        def put(client: Client) -> None:
            for key, answer in data.items():
                client.put(key, answer)
            # The store's answer to a deletion says that the answers have arrived, before a heartbeat says that this
            # rank has gone on.
            contributions.delete(client)
            client.delete(old, old)
            self._member.delete_left_keys(client, self.keys.number, have_all_come=True)

        try:
            self._ask(put)
            self._answers = new
        except DcpRemoteError as error:
            if not self.is_committing:
                raise
            logger.warning("%s: the other ranks could not be told that it has ended: %s", self.what, error)

    def _delete_left_keys_and_read_verdicts(self, client: Client) -> None:
        # Deletes before it reads, because a verdict ends the operation at once; again under the number that it finds.
        self._member.delete_left_keys(client, self.keys.number - 1)
        self._read_verdicts(client)
        self._member.delete_left_keys(client, self.keys.number - 1)

    def _read_verdicts(self, client: Client) -> None:
        """Go on to the next number for as long as there is a verdict on another operation under this one."""
        while self.read_verdict(client):
            self.raise_if_cancelled()

    def _wait_for(
        self,
        look: Callable[[Client], T],
        keys: CollectiveKeys,
        pauses: Iterator[float],
        heard: tuple[HostLink, str] | None = None,
    ) -> T | bytes | None:
        """Look until something is found, and return it; None once the operation has other keys than `keys`.

        Args:
            look: Looks into the store.
            keys: Keys of the operation.
            pauses: Pauses between two looks, in seconds.
            heard: Link over which another rank sends what it finds under a key; `look` is then the last resort.

        Raises:
            DcpRemoteError: The operation was cancelled.
        """
        while self.keys is keys:
            status = self.coordinator_status()
            has_left = status is not None and self.has_rank_left(status)
            # The news that the coordinator has left may come before the answer that it has left behind.
            found: T | bytes | None = None if heard is None else self._hear(*heard)
            if not found and (heard is None or has_left):
                found = self._ask(look)
            if found:
                return found
            # The coordinator posts its verdict before it publishes that it has left. The verdict is read first: a rank
            # that followed without it would take part in the next operation of the same name.
            if (
                status is not None
                and has_left
                and not self._ask(self.read_verdict)
                and not self.skip_deleted_verdicts(status)
            ):
                self.end_without_verdict(status, keys)
            self.raise_if_cancelled()
            if heard is None:
                self.wait(next(pauses))
        return None

    def _hear(self, link: HostLink, key: str) -> bytes | None:
        """Wait for the answer that comes over a link; return None if it does not come soon."""
        try:
            return link.answer(key, POLLING_SECONDS_MAX)
        except dist.DistError as error:
            self._raise_without_store(error)

    def _ask(self, request: Callable[[Client], T]) -> T:
        """Make a request to the store and return its answer, for as long as the operation goes on.

        A store whose host was stopped never answers, so the request is made in a helper thread. Where this rank may be
        linked to others, that is the heartbeat's.

        Raises:
            DcpRemoteError: The operation was cancelled, or the store is gone.
        """
        assert self._heartbeat is not None, "a single rank needs no store"
        if self._heartbeat.gone is not None:  # to connect anew would take minutes
            self.end_without_store(self._heartbeat.gone)
            self.raise_if_cancelled()
        client, self._client = self._client, None
        if client is None and not self._member.may_link:
            client = self._member.take_client()
        try:
            answer = (client or self._heartbeat).ask(request, self.raise_if_cancelled)
        except BaseException as error:
            if client is not None:
                client.abandon()
            if isinstance(error, dist.DistError):
                self._raise_without_store(error)
            raise
        self._client = client
        return answer

    def _raise_without_store(self, error: Exception) -> NoReturn:
        self.end_without_store(error)
        if self.cancelled is None:  # in the commit phase
            raise self.failed("The key-value store of the process group is gone.", cause=error) from error
        raise self.cancelled from error


def _copy_error(error: DcpRemoteError, consequence: BaseException) -> DcpRemoteError:
    """Return another error of the same class and text, which takes a cause of its own.

    What this rank was doing when the operation was cancelled often says why: a store that does not answer the rank.
    """
    here = {}
    if isinstance(consequence, DcpRemoteError):
        here = {"here": one_line(f"{type(consequence).__name__}: {consequence}", _HERE_CHARACTERS_MAX)}
    return error.with_details(**here)
