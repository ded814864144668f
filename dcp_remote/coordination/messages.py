"""Keys and values that the ranks of a collective operation put into the store of their group.

Below the prefix of the group, for operation k, whose name has the digest w, and its round i:

    k-w/i/in/<rank>   contributions; deleted by the coordinator when it reads them
    k-w/i/out         the answer to all ranks; deleted when a later round shows that all have read it
    k-w/i/out/<rank>  answers to single ranks; deleted by their readers
    k-w/i/out/of-<n>  answers to several ranks, each of which is told n; deleted as the answer to all is
    k/failed          the verdict of the first rank that failed or gave up
    k/verdict         the verdict of the coordinator, if the operation did not end with its answers
    asked/<q>/<n>     the first answer to question q, the n-th that is asked (`RankGroup.ask_coordinator`)

When all ranks have met in a later operation nothing of operation k is left, whether it failed or not, but for what a
rank that was stopped posts when it goes on. Until then answers and verdicts are kept, for ranks that have not read
them, of at least the last 64 operations; what only the coordinator reads is deleted when operation k + 2 is under way.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from dcp_remote.errors import DcpRemoteError


@dataclass(frozen=True, slots=True)
class CollectiveKeys:
    """Keys of one collective operation.

    Attributes:
        number: Number of the operation, as counted by its group.
        what: Name of the operation.
    """

    number: int
    what: str

    def with_name(self, what: str) -> CollectiveKeys:
        """Return the keys of another operation under the same number."""
        return CollectiveKeys(self.number, what)

    def contribution(self, round_number: int, rank: int) -> str:
        """Return the key of a rank's contribution to a round."""
        return f"{self._prefix}/{round_number}/in/{rank}"

    def contributions(self, round_number: int, ranks: Iterable[int]) -> list[str]:
        """Return the keys of several ranks' contributions to a round."""
        return [self.contribution(round_number, rank) for rank in ranks]

    def answer(self, round_number: int, to: int | str | None = None) -> str:
        """Return the key of an answer: to a rank, to several (`of-<n>`), or to all."""
        return f"{self._prefix}/{round_number}/out" + (f"/{to}" if to is not None else "")

    @property
    def failed(self) -> str:
        """Key of the first failed rank's verdict, whatever operation has the number."""
        return f"{self.number}/failed"

    @property
    def verdict(self) -> str:
        """Key of the coordinator's verdict, whatever operation has the number."""
        return f"{self.number}/verdict"

    @property
    def _prefix(self) -> str:
        return f"{self.number}-{zlib.crc32(self.what.encode(errors='replace')):08x}"


class Commit(Enum):
    """State of the coordinator's commit when an operation has ended by an error, as far as a rank knows."""

    NEVER = auto()  # no commit can follow: a rank may delete the shards that it has put
    POSSIBLE = auto()  # the error says what is known of the commit; a rank raises it, and keeps its shards
    UNKNOWN = auto()  # only the object store tells: a rank looks for the commit in the run


@dataclass(frozen=True, slots=True)
class Verdict:
    """End of an operation by an error, as it stands in the store.

    Attributes:
        names: Names of the operations that end, all of them under one number.
        text: Text of the error.
        data: The error, pickled separately, since only one rank may know its class.
        commit: State of the coordinator's commit.
        is_unattended: True if some rank did not come to the operation.
    """

    names: frozenset[str]
    text: str
    data: bytes
    commit: Commit
    is_unattended: bool

    def error(self, failed: type[DcpRemoteError]) -> DcpRemoteError:
        """Return the error; if it cannot be unpickled, an error of class `failed` with the same text."""
        try:
            error = pickle.loads(self.data)  # noqa: S301  # of a rank of this job
        except Exception:  # noqa: BLE001  # its class may raise anything
            return failed(self.text)
        return error if isinstance(error, DcpRemoteError) else failed(self.text)
