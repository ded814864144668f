"""Swaps of a catalog under lost, late and refused requests: each result agrees with the stored catalog.

For each change and each fault the first request fails, then the second, until one run ends before its fault.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import pytest

from dcp_remote.errors import (
    CommitUnknownError,
    ConditionFailedError,
    DcpRemoteError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.format.catalog import (
    CATALOG_KEY,
    BeginAgainError,
    Catalog,
    add_entry,
    pin_entry,
    retire_entries,
    take_fence,
)
from dcp_remote.run.catalog_store import Change
from dcp_remote.storage.wrapper import Verb
from dcp_remote.testing import Fault, FaultyStore, RecordingStore, matching, nth
from tests.support.catalogs import ONE, SECONDS, Clock, attempt, commit, identity, store_of, stored, swapped
from tests.support.figures import count
from tests.support.histories import run_histories

pytestmark = pytest.mark.torture


def is_put(verb: Verb, _key: str, _number: int) -> bool:
    return verb == "put"


def is_get(verb: Verb, _key: str, _number: int) -> bool:
    return verb == "get"


Way: TypeAlias = Literal[
    "request lost",
    "response lost",
    "late by one request",
    "late by all requests",
    "409",  # another conditional write was under way; nothing was written
    "412 on our own write",  # carried out, repeated by a client that lost the answer, and refused then
    "403 on the way back",  # carried out, whatever the answer says
    "503 for a while",
    "503 for ever",
    "responses lost for ever",
    "409 for ever",
    "412 on our own write, then 503 for ever",
    "403 for ever",
]
ONCE: tuple[Way, ...] = (
    "request lost",
    "response lost",
    "late by one request",
    "late by all requests",
    "409",
    "412 on our own write",
    "503 for a while",
)
FOR_EVER: tuple[Way, ...] = (
    "503 for ever",
    "responses lost for ever",
    "409 for ever",
    "412 on our own write, then 503 for ever",
    "403 for ever",
)


def faults(way: Way, number: int) -> list[Fault]:
    """Return faults from the `number`-th request on; only a conditional PUT can be refused."""

    def conditional(verb: Verb, _key: str, now: int) -> bool:
        return now >= number and verb == "put"

    def condition() -> ConditionFailedError:
        return ConditionFailedError("An injected refusal.", key=CATALOG_KEY)

    ours_refused = matching(conditional, "response", error=condition)
    known: dict[Way, list[Fault]] = {
        "request lost": [nth(number, "request")],
        "response lost": [nth(number, "response")],
        "late by one request": [nth(number, "late", later_by=1)],
        "late by all requests": [nth(number, "late")],
        "409": [matching(conditional, "request", error=condition)],
        "412 on our own write": [ours_refused],
        "403 on the way back": [matching(conditional, "response", error=denied)],
        "503 for a while": [matching(lambda _verb, _key, now: number <= now < number + 3, "request", persistent=True)],
        "503 for ever": [nth(number, "request", persistent=True)],
        "responses lost for ever": [nth(number, "response", persistent=True)],
        "409 for ever": [matching(conditional, "request", error=condition, persistent=True)],
        "412 on our own write, then 503 for ever": [ours_refused, nth(number + 1, "request", persistent=True)],
        "403 for ever": [matching(conditional, "request", error=denied, persistent=True)],
    }
    return known[way]


@dataclass(frozen=True, slots=True)
class Operation:
    """Change of a catalog, and a predicate that tells whether it was made.

    Attributes:
        before: Catalog before the change.
        change: Change to apply.
        done: Predicate of a catalog: True if the change is in it.
    """

    before: Catalog | None
    change: Change
    done: Callable[[Catalog | None], bool]


def done_by(change: Change) -> Callable[[Catalog | None], bool]:
    return lambda run: run is not None and change(run) is None


OPERATIONS: dict[str, Operation] = {
    "commit": Operation(ONE, commit(2), lambda run: run is not None and run.holds(identity(2, "b"))),
    "fence": Operation(ONE, take_fence, lambda run: run is not None and run.token > 1),
    "retire": Operation(
        ONE, lambda run: retire_entries(run, [identity(1)]), done_by(lambda run: retire_entries(run, [identity(1)]))
    ),
    "pin": Operation(ONE, partial(pin_entry, step=1, pin=True), done_by(partial(pin_entry, step=1, pin=True))),
    "begin": Operation(None, take_fence, lambda run: run is not None and run.token > 0),
}


def check_told(operation: Operation, way: Way, number: int) -> tuple[DcpRemoteError | None, FaultyStore]:
    """Swap under a fault; compare the result with the stored catalog, now and when late requests have arrived."""
    store = store_of(operation.before)
    faulty = FaultyStore(store, faults(way, number))
    error: DcpRemoteError | None = None
    try:
        after = swapped(faulty, operation.change, create=operation.before is None)
    except DcpRemoteError as caught:
        error = caught
    count("requests failed", len(faulty.hits))
    for _ in range(2):
        if error is None:
            assert stored(store) == after
            assert operation.done(after)
        elif not isinstance(error, CommitUnknownError):
            assert stored(store) == operation.before
        faulty.settle()
    swapped(store, commit(9), create=True)
    faulty.settle()
    now = stored(store)
    assert now is not None
    assert now.holds(identity(9, "b"))
    assert error is not None or operation.done(now)
    return error, faulty


@pytest.mark.parametrize("way", ONCE)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_swap_survives_what_happens_once(operation: str, way: Way) -> None:
    """Fail each request in turn, once or for a while: the change is made."""
    for number in itertools.count(1):
        error, faulty = check_told(OPERATIONS[operation], way, number)
        assert error is None
        if not faulty.hits:
            assert number > 2
            return


@pytest.mark.parametrize("way", FOR_EVER)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_swap_that_cannot_go_on_says_what_is_true(operation: str, way: Way) -> None:
    """Fail all from each request on: `CommitUnknownError`, unless certainly nothing was written."""
    told: set[type[DcpRemoteError] | None] = set()
    for number in itertools.count(1):
        error, faulty = check_told(OPERATIONS[operation], way, number)
        told.add(None if error is None else type(error))
        if not faulty.hits:
            break
    expected: dict[Way, set[type[DcpRemoteError] | None]] = {
        "503 for ever": {CommitUnknownError, None},
        "responses lost for ever": {CommitUnknownError, None},
        "409 for ever": {StorageError, None},
        "412 on our own write, then 503 for ever": {CommitUnknownError, None},
        "403 for ever": {PermissionDeniedError, None},
    }
    # The first read failed, so nothing was sent, and its error is raised as it is.
    assert told - {TransientStorageError} == expected[way]


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in {"fence", "begin"}])
def test_a_refusal_of_what_was_carried_out(operation: str) -> None:
    """Refuse PUTs that were carried out: the swap reads the catalog, and finds its change made."""
    error, faulty = check_told(OPERATIONS[operation], "403 on the way back", 1)
    assert error is None
    assert [request.verb for request in faulty.hits] == ["put"]


def denied() -> PermissionDeniedError:
    return PermissionDeniedError("An injected 403.", key=CATALOG_KEY)


def test_what_is_on_its_way_is_not_denied() -> None:
    """Delay the first swap and refuse the second for good: the outcome is unknown, since the first may arrive."""
    store = store_of()
    late, refused = matching(is_put, "late"), matching(is_put, "request", error=denied, persistent=True)
    faulty = FaultyStore(store, [late, refused])
    with pytest.raises(CommitUnknownError):
        swapped(faulty, commit(2))
    assert stored(store) == ONE
    faulty.settle()
    assert stored(store) == commit(2)(ONE)


def test_what_can_never_arrive_is_denied() -> None:
    """Do the same after another's swap: the late PUT can no longer succeed, so the refusal is certain."""
    store = store_of()
    others = iter([None, commit(7)])

    def change(run: Catalog) -> Catalog | None:
        other = next(others, None)
        return commit(2)(run if other is None else swapped(store, other))

    late, refused = matching(is_put, "late"), matching(is_put, "request", error=denied, persistent=True)
    faulty = FaultyStore(store, [late, refused])
    with pytest.raises(PermissionDeniedError):
        swapped(faulty, change)
    faulty.settle()
    assert stored(store) == commit(7)(ONE)


def test_a_lost_answer_costs_one_look() -> None:
    """Lose one answer: three requests in all."""
    recording = RecordingStore(FaultyStore(store_of(), [matching(is_put, "response")]))
    swapped(recording, commit(2))
    assert [verb for verb, _ in recording.calls] == ["get", "put", "get"]


def test_a_lost_swap_costs_two_requests_more() -> None:
    """Let another process swap between GET and PUT: a GET and a PUT more, and both changes are there."""
    store = store_of()
    recording = RecordingStore(store)
    others = iter([commit(7), commit(8)])

    def change(run: Catalog) -> Catalog | None:
        other = next(others, None)
        if other is not None:
            swapped(store, other)
        return commit(2)(run)

    assert swapped(recording, change) == stored(store)
    assert [verb for verb, _ in recording.calls] == ["get", "put"] * 3
    now = stored(store)
    assert now is not None
    assert [one.step for one in now.entries] == [1, 2, 7, 8]


def test_a_lost_answer_and_then_a_fence() -> None:
    """Lose the answer to a commit, and fence the job: the commit is found, and succeeds."""
    store = store_of()
    ours = attempt(2, "b")
    asked = iter([None, take_fence])

    def change(run: Catalog) -> Catalog | None:
        then = next(asked)
        if then is not None:
            run = swapped(store, then)
        return add_entry(run, ours)

    faulty = FaultyStore(store, [matching(is_put, "response")])
    assert swapped(faulty, change).holds(ours.entry.save_id)


def test_what_was_committed_and_retired_is_not_committed_again() -> None:
    """Lose the answer to a commit, and retire the checkpoint: not committed again, since its shards may be gone."""
    store = store_of()
    ours = attempt(2, "b")
    retirements = iter([None, lambda run: retire_entries(run, [ours.entry.save_id])])

    def change(run: Catalog) -> Catalog | None:
        then = next(retirements)
        return add_entry(swapped(store, then) if then is not None else run, ours)

    with pytest.raises(BeginAgainError):
        swapped(FaultyStore(store, [matching(is_put, "response")]), change)
    now = stored(store)
    assert now is not None
    assert not now.holds(ours.entry.save_id)


def test_pauses_double_and_end_at_the_deadline() -> None:
    """Fail all: pauses double up to five seconds, then one more read, since the last PUT may have succeeded."""
    clock = Clock()
    recording = RecordingStore(FaultyStore(store_of(), [matching(is_put, "request", persistent=True)]))
    with pytest.raises(CommitUnknownError) as caught:
        swapped(recording, commit(2), seconds=20, clock=clock)
    assert clock.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [verb for verb, _ in recording.calls] == ["get", "put"] * 10 + ["get"]
    assert "TransientStorageError" in str(caught.value.details["cause"])


@pytest.mark.parametrize("lost", ["request", "response"])
def test_the_deadline_has_passed(lost: Literal["request", "response"]) -> None:
    """Swap after the deadline: one attempt and one read, which finds a PUT that was carried out."""
    store = store_of()
    faulty = FaultyStore(store, [matching(is_put, lost)])
    if lost == "response":
        assert swapped(faulty, commit(2), seconds=0) == stored(store)
    else:
        with pytest.raises(CommitUnknownError):
            swapped(faulty, commit(2), seconds=0)
        assert stored(store) == ONE


def test_reads_are_retried() -> None:
    """Fail reads: retried under the same deadline, by the same clock."""
    clock = Clock()
    faulty = FaultyStore(store_of(), [matching(is_get, "request", persistent=True)])
    with pytest.raises(TransientStorageError):
        swapped(faulty, commit(2), clock=clock)
    assert len(clock.pauses) > 3
    assert clock.now_seconds <= SECONDS


def test_many_things_go_wrong(torture_seconds: float) -> None:
    """Swap many times on one store, with faults drawn from a seed: each result agrees with the stored catalog."""
    run_histories(history, torture_seconds)


def history(seed: int) -> None:
    """Commit and fence ten times, drawn from a seed; late requests arrive after any of these, or at the end."""
    draw = random.Random(seed)
    store = store_of()
    sure, possible = {identity(1)}, {identity(1)}
    faulties: list[FaultyStore] = []
    for step in range(2, 12):
        ways = [draw.choice(ONCE + FOR_EVER[:2]) for _ in range(draw.randint(0, 3))]
        faulty = FaultyStore(store, [fault for way in ways for fault in faults(way, draw.randint(1, 8))])
        faulties.append(faulty)
        before = stored(store)
        try:
            swapped(faulty, take_fence if draw.random() < 0.2 else commit(step))
        except CommitUnknownError:
            possible.add(identity(step, "b"))
        except DcpRemoteError:
            assert stored(store) == before
        else:
            now = stored(store)
            assert now is not None
            sure |= {identity(step, "b")} & {one.save_id for one in now.entries}
            possible |= sure
        count("requests failed", len(faulty.hits))
        for earlier in faulties:
            if draw.random() < 0.5:
                earlier.settle()
    for faulty in faulties:
        faulty.settle()
    now = stored(store)
    assert now is not None
    assert sure <= {one.save_id for one in now.entries} <= possible
