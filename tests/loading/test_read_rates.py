"""Rates of the ways to a byte: the rule is played through with fair links, and compared with each way alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.loading.read_rates import ReadRates, comes_sooner_from_store
from tests.support.clocks import SleepClock

TICK_SECONDS = 0.1
RATES = st.floats(0.01, 100.0)  # units a second


def play(units: int, peers: float, store: float) -> tuple[float, int]:
    """Receive units that other ranks send, all at a time, looking ten times a second whether to move one.

    Args:
        units: Number of units.
        peers: Rate of the other ranks together, in units a second.
        store: Rate of the store, in units a second.

    Returns:
        Seconds until all has arrived, and the number of units that were moved to the store.
    """
    sent, left, moved, now = [0.0] * units, [], 0, 0.0  # by unit: bytes that have arrived; what the store is to send
    while sent or left:
        now += TICK_SECONDS
        share = peers * TICK_SECONDS / max(1, len(sent))
        sent = [size + share for size in sent if size + share < 1.0]
        left = [size - store * TICK_SECONDS / len(left) for size in left]
        left = [size for size in left if size > 1e-9]
        for size in list(sent):
            if comes_sooner_from_store(size, now, store_bytes_per_second=store, requests=len(sent) + len(left)):
                sent.remove(size)
                left.append(1.0 - size)
                moved += 1
    return now, moved


@given(st.integers(1, 16), RATES, RATES)
def test_no_way_is_much_faster(units: int, peers: float, store: float) -> None:
    """All has arrived within 1.35 times what the faster of the two takes alone, and a few looks."""
    seconds, moved = play(units, peers, store)
    assert seconds <= 1.35 * units / max(peers, store) + 4 * TICK_SECONDS
    if peers >= store:
        assert moved == 0


@given(st.integers(0, 100), st.floats(0.1, 100.0), RATES, st.integers(1, 32), st.floats(1.0, 10.0))
def test_more_never_speaks_for_the_store(
    received: int, seconds: float, store: float, requests: int, factor: float
) -> None:
    """A unit that stays where it is would stay with a slower store, and with more transfers that share the store."""
    if not comes_sooner_from_store(received, seconds, store_bytes_per_second=store, requests=requests):
        assert not comes_sooner_from_store(received, seconds, store_bytes_per_second=store / factor, requests=requests)
        assert not comes_sooner_from_store(received, seconds, store_bytes_per_second=store, requests=requests + 1)


def test_the_rate_of_the_store() -> None:
    """Two requests overlap, one fails, and there is a pause: 300 bytes in three seconds, shared by four transfers."""
    clock = SleepClock()
    rates = ReadRates(clock)
    with rates.reading(100):
        clock.sleep(1.0)
        with rates.reading(200):
            clock.sleep(1.0)
    clock.sleep(50.0)
    with pytest.raises(OSError, match="refused"), rates.reading(10**9):
        clock.sleep(1.0)
        raise OSError("refused")
    assert (rates._read_bytes, rates._read_seconds) == (300, 3.0)
    with rates.receiving(), rates.receiving(), rates.receiving(), rates.reading(1):
        assert rates.prefers_store(18, 1.0)
        assert not rates.prefers_store(19, 1.0)


def test_a_store_whose_rate_is_unknown_is_asked_once() -> None:
    """A rank that owns nothing moves a unit after a second, and no other while that one is under way."""
    rates = ReadRates(SleepClock())
    with rates.receiving():
        assert not rates.prefers_store(1, 0.9)
        assert rates.prefers_store(1, 1.0)
        with rates.reading(5):
            assert not rates.prefers_store(1, 1.0)
