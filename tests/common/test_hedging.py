"""Latencies of requests, and the number of second requests that they allow."""

from __future__ import annotations

import math

from dcp_remote.common.hedging import LATE_SECONDS_MIN, SAMPLES_MIN, LatencyTracker
from dcp_remote.common.units import MiB


def test_late_seconds() -> None:
    """Note latencies: nothing is late before enough are known, and then never below a second."""
    pace = LatencyTracker()
    for number in range(SAMPLES_MIN):
        assert pace.late_seconds(8 * MiB) == math.inf
        pace.record(8 * MiB, 0.1 + number / 1000)
    assert pace.late_seconds(8 * MiB) == LATE_SECONDS_MIN
    assert pace.late_seconds(64 * MiB) == math.inf
    for _ in range(1000):
        pace.record(8 * MiB, 3.0)
    assert pace.late_seconds(8 * MiB) == 6.0


def test_few_are_sent_twice() -> None:
    """Note a thousand late requests: a twentieth of them may be hedged, and a few after a quiet time."""
    pace = LatencyTracker()
    repeated = 0
    for _ in range(1000):
        pace.record(1, 100.0)
        repeated += pace.may_repeat()
    assert 45 <= repeated <= 55
