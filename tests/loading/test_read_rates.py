"""Rates of the ways to a byte: the rule is played through with fair links, and compared with each way alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.loading.read_rates import ReadRates
from tests.support.clocks import SleepClock

UNIT, TICK_SECONDS = 8_000_000, 0.1
RATES = st.floats(0.01, 100.0)  # units a second


class _Coming:
    """Unit that is on its way: the part that has arrived, its weight among others, and its entry in the rates."""

    def __init__(self, weight: float, block: AbstractContextManager[Any], size: float = 0.0) -> None:
        self.weight, self.size, self.block = weight, size, ExitStack()
        self.comes_sooner = self.block.enter_context(block)


def play(weights: list[float], peers: float, store: float) -> tuple[float, int]:
    """Receive units that other ranks send, all at a time, looking ten times a second whether to move one.

    Args:
        weights: Weight of each unit when units share the link from the other ranks.
        peers: Rate of that link, in units a second.
        store: Rate of the store, in units a second.

    Returns:
        Seconds until all has arrived, and the number of units that were moved to the store.
    """
    # At 100 s, where sums of ticks round down: after exactly 0.3 s, from which a rate counts, the third look would have
    # the bytes of the first unit alone, and might move that one.
    clock, moved = SleepClock(100.0), 0
    rates = ReadRates(clock)
    with rates.reading(int(store * UNIT)):
        clock.sleep(1.0)
    begin = clock.now
    sent = [_Coming(weight, rates.receiving()) for weight in weights]
    left: list[_Coming] = []
    while sent or left:
        clock.sleep(TICK_SECONDS)
        for coming, rate in ((sent, peers), (left, store)):
            weight = sum(unit.weight for unit in coming)
            for unit in coming:
                unit.size += rate * TICK_SECONDS * unit.weight / weight
        for unit in [unit for unit in left if unit.size >= 1.0]:
            left.remove(unit)
            unit.block.close()
        for unit in list(sent):
            is_moved = unit.comes_sooner(int(min(1.0, unit.size) * UNIT)) and unit.size < 1.0
            if is_moved:
                left.append(_Coming(1.0, rates.reading(0), unit.size))
                moved += 1
            if is_moved or unit.size >= 1.0:
                sent.remove(unit)
                unit.block.close()
    return clock.now - begin, moved


@given(st.lists(st.floats(0.3, 1.0), min_size=1, max_size=16), RATES, RATES)
def test_no_way_is_much_faster(weights: list[float], peers: float, store: float) -> None:
    """All has arrived within 1.35 times what the faster of the two takes alone, and a few looks.

    As long as the other ranks are as fast as the store, nothing moves, however unevenly the units share their link.
    """
    seconds, moved = play(weights, peers, store)
    assert seconds <= 1.35 * len(weights) / max(peers, store) + 6 * TICK_SECONDS
    if peers >= store:
        assert moved == 0


def test_the_rate_of_the_store() -> None:
    """Two requests overlap, one fails, and there is a pause: 300 bytes in three seconds."""
    clock = SleepClock()
    rates = ReadRates(clock)
    with rates.reading(100):
        clock.sleep(1.0)
        with rates.reading(200):
            clock.sleep(1.0)
    clock.sleep(50.0)
    with suppress(OSError), rates.reading(10**9):
        clock.sleep(1.0)
        raise OSError
    assert (rates._store.received_bytes, rates._store.seconds) == (300, 3.0)
    # Two units and two requests: in the store, the units would have half of 100 bytes a second.
    with rates.receiving() as unit, rates.receiving() as other, rates.reading(1), rates.reading(1):
        clock.sleep(1.0)
        assert unit(37)
        assert not other(1)
        assert not unit(37 + 1)


def test_a_host_that_becomes_slow() -> None:
    """A unit arrives ten times as fast as from the store for ten seconds, and then stalls: it is left within six."""
    clock = SleepClock()
    rates = ReadRates(clock)
    with rates.reading(100):
        clock.sleep(1.0)
    with rates.receiving() as unit:
        for seconds in range(1, 11):
            clock.sleep(1.0)
            assert not unit(1000 * seconds)
        for _ in range(6):
            clock.sleep(1.0)
            is_left = unit(10_000)
        assert is_left


def test_a_store_whose_rate_is_unknown_is_asked_once() -> None:
    """A rank that owns nothing leaves a unit to the store after a second, and no other while that one is under way."""
    clock = SleepClock()
    rates = ReadRates(clock)
    with rates.receiving() as unit:
        clock.sleep(1.0)
        assert not unit(1)
        clock.sleep(0.1)
        assert unit(1)
        with rates.reading(5):
            assert not unit(1)


def test_another_rank_is_overdue() -> None:
    """After a second and half of the time of its own requests a rank waits no longer, unless it has read nothing."""
    clock = SleepClock()
    rates, idle = ReadRates(clock), ReadRates(clock)
    with rates.reading(UNIT):
        clock.sleep(4.0)
        assert not rates.is_overdue()
    clock.sleep(3.0)
    assert not rates.is_overdue()
    clock.sleep(0.1)
    assert rates.is_overdue()
    assert not idle.is_overdue()
    with rates.reading(UNIT):
        assert not rates.is_overdue()
