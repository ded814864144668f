"""Keys and values that the ranks of a collective operation put into the store of their group.

Below the prefix of the group, for operation k, whose name has the digest w, and its round i:

    k-w/i/in          count of the parts; deleted with them
    k-w/i/in/<n>      parts, each with the contributions of some ranks; deleted once the answers are put
    k-w/i/out         the answers to all ranks; deleted once a later round shows that all have read them
    k-w/i/out/<n>     blocks of the answers, if they are too large for one key; deleted with it
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from dcp_remote.coordination.key_value import Client, series_key
from dcp_remote.errors import DcpRemoteError

# Parts that are read at a time: of a host with 8 ranks, whose plans have 100 kB each, 50 MB.
_PARTS_PER_READ = 64

# Size of a block of answers, in bytes: a rank that needs one answer reads no more than some blocks.
_BLOCK_BYTES = 32 * 2**10


@dataclass(frozen=True, slots=True)
class CollectiveKeys:
    """Keys of one collective operation.

    Attributes:
        number: Number of the operation, as counted by its group.
        what: Name of the operation.
    """

    number: int
    what: str

    def parts(self, round_number: int) -> str:
        """Return the name of the series of parts, in which the contributions to a round are."""
        return f"{self._prefix}/{round_number}/in"

    def answer(self, round_number: int) -> str:
        """Return the key of the answers of a round."""
        return f"{self._prefix}/{round_number}/out"

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


class Contributions:
    """Contributions to one round, which the coordinator reads as they come.

    A part is a pickled dictionary: by rank, what the rank contributes. A rank that is in two parts counts once. A part
    that was counted, and never put because its rank died, changes nothing.

    Args:
        series: Name of the series of parts.
        ranks: Ranks that are to contribute.

    Attributes:
        data: Contributions that were read, by rank.
        missing: Ranks whose contributions have not been read.
    """

    def __init__(self, series: str, ranks: Iterable[int]) -> None:
        """Read nothing."""
        self._series = series
        self._count = 0
        self._unread: list[str] = []
        self._sizes = {series: 0}
        self.data: dict[int, bytes] = {}
        self.missing = set(ranks)

    def read(self, client: Client) -> bool:
        """Read the parts that are new, and return whether all contributions have been read."""
        count = client.add(self._series, 0)
        new = [series_key(self._series, number) for number in range(self._count + 1, count + 1)]
        self._count, self._unread = count, [*self._unread, *new]
        for first in range(0, len(self._unread), _PARTS_PER_READ):
            for key, part in client.get_present(self._unread[first : first + _PARTS_PER_READ]).items():
                self._sizes[key] = len(part)
                contributions: dict[int, bytes] = pickle.loads(part)  # noqa: S301  # of a rank of this job
                self.data.update(contributions)
                self.missing.difference_update(contributions)
        self._unread = [key for key in self._unread if key not in self._sizes]
        return not self.missing

    def delete(self, client: Client) -> None:
        """Delete the parts that were counted, and their count."""
        client.delete([*self._sizes, *self._unread], self._sizes)


def encode_answers(key: str, answers: Sequence[object]) -> dict[str, bytes]:
    """Return what is put for the answers to all ranks but the coordinator, by key: `key`, after the blocks, if any.

    An object that is the answer to several ranks is pickled once.
    """
    different = {id(answer): answer for answer in answers}
    positions = {identity: position for position, identity in enumerate(different)}
    pickles = [pickle.dumps(answer) for answer in different.values()]
    numbers: Sequence[int] = [positions[id(answer)] for answer in answers] if len(pickles) > 1 else []
    if len(pickles) == len(answers):
        numbers = range(len(answers))  # a few bytes
    per_block = max(1, len(pickles) * _BLOCK_BYTES // sum(map(len, pickles)))
    if len(pickles) <= per_block:
        return {key: pickle.dumps((numbers, per_block, pickles))}
    blocks = [pickles[first : first + per_block] for first in range(0, len(pickles), per_block)]
    encoded = {series_key(key, number): pickle.dumps(block) for number, block in enumerate(blocks, start=1)}
    return {**encoded, key: pickle.dumps((numbers, per_block, None))}


def decode_answer(key: str, data: bytes, rank: int, read: Callable[[str], bytes]) -> Any:
    """Return the answer to a rank, from the value of `key`; `read` is called for the block if that has none."""
    numbers, per_block, pickles = pickle.loads(data)  # noqa: S301  # of a rank of this job
    number = numbers[rank - 1] if numbers else 0
    if pickles is None:
        pickles = pickle.loads(read(series_key(key, number // per_block + 1)))  # noqa: S301  # as above
    return pickle.loads(pickles[number % per_block])  # noqa: S301  # as above


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
