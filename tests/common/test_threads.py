"""`OneTimeEvent`: an event whose waiting thread may be interrupted anywhere."""

from __future__ import annotations

import threading

import pytest

from dcp_remote.common import threads
from dcp_remote.common.threads import OneTimeEvent
from tests.manager.test_interrupts import Place, at_each_line


def test_threads_that_wait_go_on_when_the_event_is_set() -> None:
    """Also those that come later, and after it was set twice."""
    event, answers = OneTimeEvent(), []
    waiting = [threading.Thread(target=lambda: answers.append(event.wait(30)), daemon=True) for _ in range(4)]
    for thread in waiting:
        thread.start()
    assert not event.wait(0.01)
    assert not event.is_set()
    event.set()
    event.set()
    for thread in waiting:
        thread.join(30)
    assert answers == [True] * 4
    assert event.is_set()
    assert event.wait(0.0)
    assert event.wait(1e20)


@pytest.mark.parametrize("is_set", [True, False])
def test_a_wait_that_is_interrupted_anywhere(*, is_set: bool) -> None:
    """The event can be set afterwards, and is seen by whoever waits then."""
    interrupted = 0
    for number in range(10):
        event, lines = OneTimeEvent(), iter(range(100))
        if is_set:
            event._lock.release()  # as if it were set while the thread waits

        def interrupt(place: Place) -> None:
            if place[0] == threads.__file__ and next(lines) == number:  # noqa: B023  # called at once
                raise KeyboardInterrupt

        try:
            with at_each_line(interrupt):
                event.wait(0.01)
        except KeyboardInterrupt:
            interrupted += 1
        event.set()
        assert event.is_set()
        assert event.wait(0.01)
    assert interrupted >= 2


def test_an_error_is_raised_while_earlier_calls_go_on() -> None:
    """The second of four calls fails; the first ends long after that."""
    has_raised = threading.Event()

    def call(number: int) -> None:
        if number == 1:
            raise ValueError("boo")
        has_raised.wait(30)

    with pytest.raises(ValueError, match="boo"):
        threads.in_parallel(call, range(4))
    has_raised.set()
    assert threads.in_parallel(lambda number: -number, range(9)) == [-number for number in range(9)]
