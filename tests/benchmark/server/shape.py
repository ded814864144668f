"""How the benchmark's server behaves: its latency and bandwidth, and which requests fail. No sockets here.

What fails is drawn from a seed and from what is asked, so runs that ask alike fail alike, whatever their threads do.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from dcp_remote.errors import InvalidArgumentError

# At a bandwidth, slices of 20 ms: finer ones cost CPU, coarser ones arrive in bursts.
_SLICE_SECONDS = 0.02
_SLICE_BYTES_MIN = 4 * 1024


class Fault(Enum):
    """What may become of a request.

    Attributes:
        SLOW_DOWN: Answered 503, not carried out.
        RESET: Its connection is reset in the middle of its body, or of the answer's.
        STALL: Nothing moves for a while in the middle of its body, or of the answer's.
    """

    SLOW_DOWN = "slow_down"
    RESET = "reset"
    STALL = "stall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the server behaves. Shares are of requests, drawn by the seed, the key and how often that key was asked for.

    So two runs that ask alike fail alike, whatever their threads do. What failed once passes the next time: no key
    fails twice in a row.

    Attributes:
        latency_ms: Waited before each answer.
        bandwidth_bytes_per_second: Of each connection, each direction; None for all there is.
        slow_down_share: Answered 503 SlowDown, the body having been read.
        reset_share: Reset in mid-body; a request without any body passes.
        stall_share: Stalled in mid-body, likewise.
        stall_seconds: How long; the request then goes on.
        seed: Of the shares.
    """

    latency_ms: float = 0.0
    bandwidth_bytes_per_second: float | None = None
    slow_down_share: float = 0.0
    reset_share: float = 0.0
    stall_share: float = 0.0
    stall_seconds: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no server could do.

        Raises:
            InvalidArgumentError: A share is none, all together are more than 1, or a time or a bandwidth is negative.
        """
        shares = (self.slow_down_share, self.reset_share, self.stall_share)
        if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1:
            raise InvalidArgumentError("Shares lie between 0 and 1, all together, too.", shares=shares)
        if not (0 <= self.latency_ms < math.inf and 0 <= self.stall_seconds < math.inf):
            raise InvalidArgumentError(
                "Times are finite and not negative.", latency_ms=self.latency_ms, stall_seconds=self.stall_seconds
            )
        bandwidth = self.bandwidth_bytes_per_second
        if bandwidth is not None and not 0 < bandwidth < math.inf:
            raise InvalidArgumentError("A bandwidth is positive and finite.", bandwidth_bytes_per_second=bandwidth)


def parse_shape(text: str | bytes) -> Shape:
    """Read a shape from JSON; what is not named is at its default.

    Raises:
        InvalidArgumentError: It is no object of JSON, or has another name or type than those of `Shape`.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError("A shape is an object of JSON.", text=text) from error
    known = {field_.name for field_ in fields(Shape)}
    if not isinstance(values, dict) or values.keys() - known:
        raise InvalidArgumentError(f"A shape is an object of {', '.join(sorted(known))}.", text=text)
    if any(isinstance(value, bool) or not isinstance(value, int | float | None) for value in values.values()):
        raise InvalidArgumentError("The values of a shape are numbers.", text=text)
    try:
        return Shape(**values)
    except TypeError as error:
        raise InvalidArgumentError("The values of a shape are numbers.", text=text) from error


class Fates:
    """Which requests fail, drawn from a shape."""

    def __init__(self, shape: Shape) -> None:
        self._seed = shape.seed
        self._shares = (
            (Fault.SLOW_DOWN, shape.slow_down_share),
            (Fault.RESET, shape.reset_share),
            (Fault.STALL, shape.stall_share),
        )
        self._any = any(share for _, share in self._shares)
        self._lock = threading.Lock()
        self._asked: dict[str, int] = {}
        self._failed: set[str] = set()

    def draw(self, name: str) -> Fault | None:
        """What becomes of the next request for this key."""
        if not self._any:
            return None
        with self._lock:
            asked = self._asked[name] = self._asked.get(name, 0) + 1
            if name in self._failed:
                self._failed.remove(name)
                return None
            digest = hashlib.blake2b(f"{self._seed} {asked} {name}".encode(), digest_size=8).digest()
            point = int.from_bytes(digest, "big") / 2**64
            for fault, share in self._shares:
                if point < share:
                    self._failed.add(name)
                    return fault
                point -= share
        return None


class Pacer:
    """A token bucket of one direction of one connection, which sleeps until what it is asked for has had its time."""

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.slice_bytes = max(_SLICE_BYTES_MIN, int(bytes_per_second * _SLICE_SECONDS))
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._paid_until = -math.inf

    def pay(self, size_bytes: int) -> None:
        """Let so many bytes pass. Time that went by unused is lost, but for one slice's."""
        now = self._clock()
        self._paid_until = max(self._paid_until, now - _SLICE_SECONDS) + size_bytes / self._bytes_per_second
        if self._paid_until > now:
            self._sleep(self._paid_until - now)
