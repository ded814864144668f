"""What ranks that do something together put in the store of their group, and under which keys.

Below the prefix of the ranks, for joint k, which is what `w` is the digest of, and its round i:

    k-w/i/in/<rank>   contributions; deleted by the coordinator when it reads them
    k-w/i/out         the answer to all; deleted when a later round shows that all have read it
    k-w/i/out/<rank>  answers one by one; deleted by their readers
    k-w/i/out/of-<n>  answers to several, each of whom is told its number; deleted as the answer to all is
    k/failed          the first rank that failed or gave up, and why
    k/verdict         how the coordinator ended it, if not by its answers

When joint k + 2 is under way nothing of joint k is left, failed or not, but for what a rank that was stopped posts when
it wakes up.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from dcp_remote.errors import DcpRemoteError


@dataclass(frozen=True, slots=True)
class Place:
    """Where things of a joint lie in the store.

    Attributes:
        number: Of the joint.
        what: It is.
    """

    number: int
    what: str

    def of(self, what: str) -> Place:
        """The same number, taken by something else."""
        return Place(self.number, what)

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
class End:
    """How a joint ended, as it stands in the store.

    Attributes:
        what: It was; "" is an end of all that goes by that number.
        text: Of the error.
        data: The error, pickled apart: its class may be known on one rank alone.
        lost: Nobody but the coordinator knows what it did last.
        past_return: The coordinator was committing already.
    """

    what: str
    text: str
    data: bytes
    lost: bool
    past_return: bool

    def error(self, failed: type[DcpRemoteError]) -> DcpRemoteError:
        """The error, or one that says the same."""
        try:
            error = pickle.loads(self.data)  # noqa: S301  # of a rank of this job
        except Exception:  # noqa: BLE001  # whatever its class does
            return failed(self.text)
        return error if isinstance(error, DcpRemoteError) else failed(self.text)
