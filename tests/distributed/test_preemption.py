"""All ranks stop at one step: every interleaving of a few ranks, then threads, then processes and signals."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.key_value import Client
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manager.preemption import Agreement, Moment, Preemption
from dcp_remote.manager.save_policy import SavePolicy
from dcp_remote.storage import MemoryStore
from tests.support.rank_pool import RankPool
from tests.support.rank_threads import (
    Clock,
    LostStore,
    RankThreads,
    held,
    join,
    manager_threads,
    rank_threads,
    wait_until,
)

# ---- every interleaving


@dataclass(frozen=True, slots=True)
class Terms:
    """Conditions of a simulated training.

    Attributes:
        steps: Steps after which every rank asks; at None all ranks restore, and count anew.
        world_size: Number of ranks.
        asked: Ranks that may get a signal.
        give_up: Ranks that may give up waiting.
        in_step: True if each step is a collective operation of all ranks.
        stops: Number of notices until a rank ends; a rank outlives each notice but the last.
        earliest: First moment at which the ranks may stop, and wait; None if rank 0 gives none.
    """

    steps: tuple[int | None, ...]
    world_size: int
    asked: frozenset[int]
    give_up: frozenset[int] = frozenset()
    in_step: bool = True
    stops: int = 1
    earliest: Moment | None = None


class World:
    """Ranks that train, one action after another."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.store = dist.HashStore()
        self.client = Client(self.store)
        self.agreements = [Agreement(rank, terms.world_size) for rank in range(terms.world_size)]
        self.done = [0] * terms.world_size  # number of steps
        self.stops: list[list[int]] = [[] for _ in range(terms.world_size)]  # calls at which it stopped
        self.waits = [False] * terms.world_size
        self.asked = [0] * terms.world_size  # the number of the notice
        self.gave_up = [False] * terms.world_size

    def actions(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for rank in range(self.terms.world_size):
            if not self.agreements[rank].settled.is_set() or self.terms.stops > 1:
                found.append(("beat", rank))
            if rank in self.terms.asked and self.can_be_asked(rank):
                found.append(("signal", rank))
            if rank in self.terms.give_up and self.waits[rank] and not self.gave_up[rank]:
                found.append(("give up", rank))
            if self.can_train(rank):
                found.append(("train", rank))
        return found

    def can_be_asked(self, rank: int) -> bool:
        """Return whether a notice may come: the one before is outlived once this rank knows the step decided on."""
        agreement = self.agreements[rank]
        next_notice = agreement.round + agreement.settled.is_set()
        return self.asked[rank] < next_notice <= self.terms.stops

    def has_stopped(self, rank: int) -> bool:
        return len(self.stops[rank]) == self.terms.stops

    def can_train(self, rank: int) -> bool:
        if self.has_stopped(rank) or self.done[rank] == len(self.terms.steps):
            return False
        # A collective in each step: no rank passes it before all have come to it, having asked about the step before.
        return not self.terms.in_step or all(
            self.done[other] >= self.done[rank] + self.has_stopped(other) for other in range(self.terms.world_size)
        )

    def act(self, action: tuple[str, int]) -> None:
        what, rank = action
        agreement = self.agreements[rank]
        if what == "signal":
            self.asked[rank] = agreement.round + agreement.settled.is_set()
        elif what == "beat":
            agreement.exchange(self.client, notice=self.asked[rank], earliest=self.terms.earliest)
        elif what == "give up":
            self.gave_up[rank] = True
            agreement.give_up(self.client, agreement.round)
        else:
            step = self.terms.steps[self.done[rank]]
            if step is None:
                agreement.count_restore()
            answer = False if step is None else agreement.ask(step)
            self.waits[rank] = answer is None
            if answer is None and step is not None and self.terms.earliest is not None:
                assert Moment(agreement._restores, step) >= self.terms.earliest, "a rank waits too early"
            if answer:
                self.stops[rank].append(self.done[rank])
            if answer is not None:
                self.done[rank] += 1
        for stops in zip(*self.stops, strict=False):
            assert len(set(stops)) == 1, "ranks stop at different steps"

    def finish(self) -> None:
        """Let all ranks go on without further events; check that all end, and all at the same call."""
        for _ in range(4 * len(self.terms.steps) + 8):
            for rank in range(self.terms.world_size):
                self.act(("beat", rank))
                if self.can_train(rank):
                    self.act(("train", rank))
        assert len(set(map(tuple, self.stops))) == 1, "some ranks stop, and some do not"
        assert self.has_stopped(0) or self.done == [len(self.terms.steps)] * self.terms.world_size, (
            "ranks wait for ever"
        )

    def state(self) -> object:
        return (
            [
                {name: value for name, value in vars(one).items() if name not in ("_lock", "heard", "settled")}
                | {"settled": one.settled.is_set()}
                for one in self.agreements
            ],
            sorted((key, self.store.get(key)) for key in self.store.list_keys()),
            (self.done, self.stops, self.waits, self.asked, self.gave_up),
        )


def explore(terms: Terms) -> tuple[int, set[int | None]]:
    """Return the number of states that can be reached, and the calls at which ranks stop."""
    seen: set[str] = set()
    endings: set[int | None] = set()
    paths: deque[tuple[tuple[str, int], ...]] = deque([()])
    while paths:
        path = paths.popleft()
        world = World(terms)
        for action in path:
            world.act(action)
        state = repr(world.state())
        if state in seen:
            continue
        seen.add(state)
        paths.extend((*path, action) for action in world.actions())
        world.finish()
        endings.add(world.stops[0][-1] if world.has_stopped(0) else None)
    return len(seen), endings


BOTH, FIRST = frozenset({0, 1}), frozenset({0})


@pytest.mark.torture
@pytest.mark.parametrize(
    ("terms", "endings"),
    [
        pytest.param(Terms((0, 1, 2), 2, BOTH), {None, 0, 1, 2}, id="two ranks"),
        pytest.param(Terms((10, 20, 30), 2, BOTH), {None, 0, 1, 2}, id="strides"),
        pytest.param(Terms((0, 1, 2), 2, BOTH, in_step=False), {None, 0, 1, 2}, id="each by itself"),
        pytest.param(Terms((0, 0, 1, 1), 2, BOTH), {None, 0, 2}, id="several calls of a step"),
        pytest.param(Terms((8, 9, None, 4, 5), 2, BOTH), {None, 0, 1, 3, 4}, id="back to an earlier step"),
        pytest.param(
            Terms((8, None, 8, 9), 2, BOTH, in_step=False), {None, 0, 2, 3}, id="back to the same step, each by itself"
        ),
        pytest.param(Terms((0, 1), 2, BOTH, BOTH), {None, 0, 1}, id="impatient"),
        pytest.param(Terms((0, 1), 3, frozenset({2})), {None, 0, 1}, id="three ranks, one signal"),
        pytest.param(Terms((0, 1, 2), 2, BOTH, stops=2), {None, 1, 2}, id="outlived once"),
        pytest.param(
            Terms((0, 1, 2), 2, frozenset({1}), stops=2, in_step=False), {None, 1, 2}, id="outlived by itself"
        ),
        pytest.param(Terms((0, 1, None, 0), 2, frozenset({1}), stops=2), {None, 1, 3}, id="outlived and back"),
        pytest.param(Terms((0, 1), 2, frozenset({1}), frozenset({0}), stops=2), {None, 1}, id="outlived and impatient"),
        pytest.param(Terms((0, 1, 2, 3), 2, FIRST, earliest=Moment(0, 2)), {None, 2, 3}, id="not before a step"),
        pytest.param(
            Terms((0, 1, 2), 2, FIRST, in_step=False, earliest=Moment(0, 1)), {None, 1, 2}, id="by itself, not before"
        ),
        pytest.param(
            Terms((8, 9, None, 4, 5), 2, FIRST, earliest=Moment(0, 9)), {None, 1, 3, 4}, id="not before, and back"
        ),
        pytest.param(
            Terms((0, 1, 2), 2, FIRST, BOTH, earliest=Moment(0, 1)), {None, 1, 2}, id="not before, and impatient"
        ),
    ],
)
def test_every_interleaving(terms: Terms, endings: set[int | None]) -> None:
    """Play steps, beats, signals and ranks that give up in every order: one step for all or none, no endless wait."""
    states, found = explore(terms)
    assert states > 100
    assert found == endings


class SilentStore:
    """Store to which a value does not arrive, and that answers nothing after that."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._is_silent = False

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == "clone":
            raise AttributeError(name)

        def ask(*arguments: object) -> object:
            if self._is_silent:
                raise dist.DistNetworkError("silent")
            self._is_silent = name == "set"
            return None if self._is_silent else getattr(self._store, name)(*arguments)

        return ask


def test_a_moment_that_did_not_arrive_is_published_again() -> None:
    """Another rank finds all keys for this one, so that only an answer to this rank says that its put was lost."""
    store = dist.HashStore()
    client, agreement = Client(store), Agreement(1, 2)
    client.put("preempt/1/asked", Moment(0, -1).encode())
    find = lambda _, key: client.get(key)  # noqa: E731
    with pytest.raises(dist.DistNetworkError):
        agreement.exchange(Client(SilentStore(store)), notice=0, find=find)  # type: ignore[arg-type]
    assert not client.has(["preempt/1/at/1"])
    agreement.exchange(client, notice=0, find=find)
    assert client.has(["preempt/1/at/1"])


# ---- threads


def train(
    them: RankThreads, preemptions: list[Preemption], *, steps: int, asked: dict[int, int], stride: int = 1
) -> list[int | None]:
    """Return the step at which each rank stopped; each step waits for all ranks, as training does."""
    barrier = threading.Barrier(them.world_size)

    def part(ranks: RankGroup) -> int | None:
        for step in range(1, steps + 1):
            if asked.get(ranks.rank) == step:
                preemptions[ranks.rank].record_signal()
            barrier.wait(20)  # as a collective, which hangs if a rank does not come
            time.sleep(0.001)
            if step % stride == 0 and preemptions[ranks.rank].reached(step):
                return step
        return None

    ended = them.run(part)
    assert [one.error for one in ended] == [None] * them.world_size
    return [one.value for one in ended]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 3])
def test_ranks_that_train_in_step(world_size: int, stride: int) -> None:
    """Ask some ranks at different steps: all stop at one step soon after, and a collective operation follows."""
    for seed in range(3):
        rng = random.Random(seed)
        asked = {rng.randrange(world_size): rng.randrange(1, 20), rng.randrange(world_size): rng.randrange(1, 20)}
        with rank_threads(world_size, beat_seconds=0.01) as them:
            preemptions = [Preemption(ranks, 20.0) for ranks in them.ranks]
            stopped = train(them, preemptions, steps=100_000, asked=asked, stride=stride)
            assert len(set(stopped)) == 1
            assert stopped[0] is not None
            assert stopped[0] >= min(asked.values())
            assert stopped[0] % stride == 0
            assert not any(one.reached(stopped[0] + stride) for one in preemptions)
            assert all(0 < one.remaining_seconds() < math.inf for one in preemptions)

            def save(ranks: RankGroup) -> int:
                with join(ranks) as joint:
                    return joint.gather(1, sum)

            assert [one.value for one in them.run(save)] == [world_size] * world_size


def test_ranks_that_outlive_their_notice_can_be_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """Let ranks stop and go on: another rank gets the next notice, each has new time, and all stop again."""
    clock = Clock()
    with rank_threads(3, beat_seconds=0.01) as them, caplog.at_level(logging.WARNING):
        preemptions = [Preemption(ranks, 20.0, clock=clock) for ranks in them.ranks]

        def is_settled(number: int) -> bool:
            return all(one.agreement.round == number and one.agreement.settled.is_set() for one in preemptions)

        for notice, (rank, step) in enumerate([(0, 1), (2, 5), (1, 7)], start=1):
            assert not any(one.reached(step) for one in preemptions)
            preemptions[rank].record_signal()
            wait_until(partial(is_settled, notice))
            assert [one.remaining_seconds() for one in preemptions] == [20.0] * 3
            for _ in range(2):  # as where gradients are accumulated
                assert [one.reached(step + 1) for one in preemptions] == [True] * 3
            clock.now += 10
            preemptions[rank].record_signal()  # again, of the same notice
            time.sleep(0.1)
            assert [one.agreement.round for one in preemptions] == [notice] * 3
            clock.now += 10
            for one in preemptions:
                one.forget_expired_notice()
                assert one.remaining_seconds() == math.inf
                assert one.reached(step + 1)
                assert not one.reached(step + 2)
    texts = [record.getMessage() for record in caplog.records]
    assert [sum(begin in text for text in texts) for begin in ("has expired", "SIGTERM has arrived:")] == [9, 3]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of ranks that stop without a save."""
    return [text for record in caplog.records if "agree on no step" in (text := record.getMessage())]


def test_ranks_that_cannot_agree_stop_without_a_save(caplog: pytest.LogCaptureFixture) -> None:
    """Keep one rank silent: the others wait for a part of the notice, then stop, and each says why."""
    with rank_threads(3, beat_seconds=0.01) as them, caplog.at_level(logging.WARNING):
        preemptions = [Preemption(ranks, 0.5) for ranks in them.ranks]
        with held(them.ranks[2]):
            preemptions[0].record_signal()
            for step in (1, 2, 3):
                assert not any(them_at.reached(step) for them_at in preemptions[:2])
                wait_until(preemptions[1].agreement.heard.is_set)
            assert [one.must_stop for one in preemptions] == [True, True, False]
        # It comes back, and hears that nothing came of it.
        wait_until(preemptions[2].agreement.settled.is_set)
        assert not any(one.reached(step) for step in (4, 5) for one in preemptions)
        assert all(one.must_stop for one in preemptions)
    assert "rank 0: SIGTERM has arrived: the ranks agree on a step" in caplog.text
    texts = warnings_of(caplog)
    assert len(texts) == 3
    (first,) = [text for text in texts if text.startswith("rank 0")]
    assert f"there is no answer of rank 2 ({them.ranks[2].heartbeat.status.process})" in first  # type: ignore[union-attr]


def test_a_store_that_does_not_answer_holds_nobody_up_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block the rank's heartbeat after it has published its moment: it may stop without a save, or at a step later."""
    monkeypatch.setattr("dcp_remote.manager.preemption._LAST_ANSWER_SECONDS", 0.1)
    with rank_threads(2, beat_seconds=0.01) as them, caplog.at_level(logging.WARNING):
        one, other = (Preemption(ranks, 0.3) for ranks in them.ranks)
        with held(them.ranks[0]):
            other.record_signal()
            wait_until(other.agreement.heard.is_set)
            with held(them.ranks[1]):
                assert [other.reached(step) for step in (1, 2)] == [False, False]
                # What the coordinator then decides counts where it still can.
                Client(dist.PrefixStore("group", them.store)).put_first("preempt/1/step", Moment(0, 4).encode())
            wait_until(other.agreement.settled.is_set)
            assert [other.reached(step) for step in (3, 4, 5)] == [False, True, False]
        wait_until(one.agreement.settled.is_set)
        assert [one.reached(step) for step in (3, 4, 5)] == [False, True, False]
    assert len(warnings_of(caplog)) == 1


def wait_for_heartbeats(groups: Sequence[RankGroup]) -> None:
    """Wait until each rank has written its heartbeat, and then each has read those of the others."""
    for _ in range(2):
        beats = [threading.Semaphore(0) for _ in groups]
        for group, beat in zip(groups, beats, strict=True):
            assert group.heartbeat is not None
            group.heartbeat.hooks.append(lambda _, beat=beat: beat.release())  # type: ignore[misc]  # mypy infers no default
        assert all(beat.acquire(timeout=30) for beat in beats for _ in range(2))


def test_silence_is_longer_where_heartbeats_are_seldom() -> None:
    """Thousands of ranks write a heartbeat every few seconds: a rank counts as gone after two of the longest pauses."""
    clock = Clock()
    with rank_threads(3, beat_seconds=0.01) as them:
        preemptions = [Preemption(ranks, 600.0, clock=clock) for ranks in them.ranks]
        assert not any(one.reached(1) for one in preemptions)
        living = [them.ranks[0], them.ranks[2]]
        for ranks in living:
            assert ranks.heartbeat is not None
            ranks.heartbeat.delay_seconds_max = 10.0
        with held(them.ranks[1]):
            preemptions[0].record_signal()
            wait_until(lambda: all(preemptions[ranks.rank]._watched_round for ranks in living))
            for seconds in (5.0, 10.0, 15.0, 20.0):
                assert not preemptions[0].agreement.settled.is_set(), seconds
                clock.now += 5.0
                wait_for_heartbeats(living)
            wait_until(preemptions[0].agreement.settled.is_set)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_known_to_be_gone_is_not_waited_for(lost: int, caplog: pytest.LogCaptureFixture) -> None:
    """A rank leaves, as by an error; or is silent for long, as if killed. The log says which, and where that was."""
    for is_closed in (True, False):
        clock = Clock()
        with rank_threads(3, beat_seconds=0.01) as them:
            preemptions = [Preemption(ranks, 60.0, clock=clock) for ranks in them.ranks]
            assert not any(one.reached(1) for one in preemptions)
            living = [rank for rank in range(3) if rank != lost]
            with contextlib.nullcontext() if is_closed else held(them.ranks[lost]):
                if is_closed:
                    them.ranks[lost].close()
                caplog.clear()
                preemptions[living[0]].record_signal()
                if not is_closed:
                    wait_until(lambda: all(preemptions[rank]._watched_round for rank in living))  # noqa: B023
                    for _ in range(2):  # a rank that lives is seen in between
                        clock.now += 5.0
                        wait_for_heartbeats([them.ranks[rank] for rank in living])
                for rank in living:
                    wait_until(preemptions[rank].agreement.settled.is_set)
                    assert not preemptions[rank].reached(2)
                    assert preemptions[rank].must_stop
            text = "\n".join(warnings_of(caplog))
            process = them.ranks[lost].heartbeat.status.process  # type: ignore[union-attr]
            assert f"rank {lost} ({process}) has {'left' if is_closed else 'been silent for 1'}" in text


def test_a_rank_that_is_cut_off_stops_in_time(caplog: pytest.LogCaptureFixture) -> None:
    """Its heartbeat is stuck in the store before anyone hears of the signal, and its training asks for each step."""
    clock = Clock()
    with rank_threads(2, beat_seconds=0.01) as them:
        preemptions = [Preemption(ranks, 30.0, clock=clock) for ranks in them.ranks]
        with held(them.ranks[1]):
            preemptions[1].record_signal()
            wait_until(lambda: "rank 1: SIGTERM has arrived" in caplog.text)  # by the heartbeat's thread
            assert not preemptions[1].reached(1)
            assert [one.must_stop for one in preemptions] == [False, False]
            clock.now += 22.0
            assert not preemptions[1].reached(2)
            assert preemptions[1].must_stop
        (text,) = warnings_of(caplog)
        assert "waited_seconds=22" in text
        assert preemptions[1].remaining_seconds() == 8.0


def test_what_a_loop_is_told_if_the_ranks_cannot_agree() -> None:
    """It saves no more, since the others would not come, and ends; the next notice counts like the first."""
    policy = SavePolicy(every_steps=10)
    with manager_threads(2, MemoryStore(), beat_seconds=0.01, save_policy=policy, notice_seconds=0.3) as ranks:
        manager = ranks.managers[1]
        with held(ranks.groups.ranks[0]):
            manager._preemption.record_signal()
            assert [manager.should_save(step) for step in (1, 2)] == [False, False]
            wait_until(lambda: manager.should_stop)
            assert not manager.reached_preemption(3)
        wait_until(lambda: manager._preemption.remaining_seconds() == 0.0)
        manager._preemption.forget_expired_notice()
        assert not manager.should_stop


def test_a_training_that_nobody_stops_asks_the_store_nothing() -> None:
    """Answer each call by what this rank knows: only the heartbeat's thread uses the store."""
    store = LostStore()
    ranks = RankGroup(0, 2, store, beat_seconds=0.01)  # type: ignore[arg-type]
    preemption = Preemption(ranks, 20.0)
    store.threads.clear()
    assert not any(preemption.reached(step) for step in range(1000))
    wait_until(lambda: store.threads)
    assert threading.get_ident() not in store.threads
    ranks.close()


def test_a_store_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """Lose the store before a signal: the rank stops at once, without a save, and says why."""
    store = LostStore()
    ranks = RankGroup(0, 2, store, beat_seconds=0.01)  # type: ignore[arg-type]
    preemption = Preemption(ranks, 20.0)
    store.is_lost = True
    wait_until(lambda: ranks.heartbeat.gone)  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING):
        assert not preemption.reached(1)
        assert not caplog.records
        preemption.record_signal()
        assert [preemption.reached(step) for step in (2, 3)] == [False, False]
        assert preemption.must_stop
    (text,) = warnings_of(caplog)
    assert "the key-value store of the process group is gone" in text
    ranks.close()


# ---- signals


@pytest.fixture
def alone() -> Iterator[tuple[Preemption, Clock]]:
    clock = Clock()
    preemption = Preemption(RankGroup(0, 1, None), 30.0, clock=clock)
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield preemption, clock
    finally:
        preemption.close()
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal(alone: tuple[Preemption, Clock]) -> None:
    """Send a signal: the process goes on, the next step is the one, and the notice counts from the first signal.

    One after the notice, which nothing has noted as expired so far, is a notice of its own.
    """
    preemption, clock = alone
    preemption.install()
    preemption.install()
    assert not preemption.reached(1)
    assert preemption.remaining_seconds() == math.inf
    signal.raise_signal(signal.SIGTERM)
    clock.now += 10
    signal.raise_signal(signal.SIGTERM)
    assert preemption.remaining_seconds() == 20.0
    assert [preemption.reached(step) for step in (2, 2, 3)] == [True, True, False]
    clock.now += 1000
    assert preemption.remaining_seconds() == 0.0
    signal.raise_signal(signal.SIGTERM)
    assert preemption.remaining_seconds() == 30.0
    assert [preemption.reached(step) for step in (4, 4, 5)] == [True, True, False]


def test_a_signal_long_after_one_whose_notice_is_not_known() -> None:
    """A loop that goes on: a signal within a minute is of the same notice, a later one stops the loop again."""
    clock = Clock()
    preemption = Preemption(RankGroup(0, 1, None), clock=clock)
    preemption.record_signal()
    assert [preemption.reached(step) for step in (1, 2)] == [True, False]
    clock.now += 59
    preemption.record_signal()
    assert not preemption.reached(3)
    clock.now += 2
    preemption.record_signal()
    assert preemption.remaining_seconds() == math.inf
    assert [preemption.reached(step) for step in (4, 5)] == [True, False]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([1, 1], [1, 1, 1, 2, 2], id="several calls of a step"),
        pytest.param([1, 2, 30], [6, 6, 7], id="back to an earlier step"),
        pytest.param([], [0, 1], id="the first"),
    ],
)
def test_a_rank_that_is_alone(before: list[int], after: list[int]) -> None:
    """Stop a rank that is alone at the next call, whatever the step, and in all calls with that step."""
    preemption = Preemption(RankGroup(0, 1, None))
    assert not any(preemption.reached(step) for step in before)
    preemption.record_signal()
    assert [preemption.reached(step) for step in after] == [step == after[0] for step in after]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Install a handler of the user's own first; return the signals that it gets."""
    found: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        found.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        yield found
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def alone_too() -> Preemption:
    return Preemption(RankGroup(0, 1, None))


@pytest.mark.parametrize("closed_first", [0, 1])
def test_two_that_listen(heard: list[int], closed_first: int) -> None:
    """Call all listeners and the former handler; closed in any order, the former handler is back after the last."""
    two = [alone_too(), alone_too()]
    for one in two:
        one.install()
    signal.raise_signal(signal.SIGTERM)
    assert [one.reached(1) for one in two] == [True, True]
    assert heard == [signal.SIGTERM]
    first, last = two[closed_first], two[1 - closed_first]
    first.close()
    late = alone_too()
    late.install()
    last.close()
    signal.raise_signal(signal.SIGTERM)
    assert late.reached(1)
    late.close()
    signal.raise_signal(signal.SIGTERM)
    assert len(heard) == 3


def test_the_former_handler_comes_last(heard: list[int]) -> None:
    """Let the former handler raise: the listeners were called before, and are called at the next signal."""

    def leave(number: int, frame: FrameType | None) -> None:
        assert preemptions[-1].reached(1)
        raise SystemExit(7)

    own = signal.signal(signal.SIGTERM, leave)
    preemptions: list[Preemption] = []
    for _ in range(2):
        preemptions.append(alone_too())
        preemptions[-1].install()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    for one in preemptions:
        one.close()
    assert signal.getsignal(signal.SIGTERM) is leave
    signal.signal(signal.SIGTERM, own)
    assert not heard


def test_a_handler_that_was_put_in_its_place(heard: list[int]) -> None:
    """Install a handler on top: it stays, and may call ours as the former one without an endless recursion."""
    own = signal.getsignal(signal.SIGTERM)
    one, two = alone_too(), alone_too()
    one.install()
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)
    calls: list[int] = []

    def on_top(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        ours(number, frame)

    signal.signal(signal.SIGTERM, on_top)
    signal.raise_signal(signal.SIGTERM)
    assert one.reached(1)
    assert (len(calls), len(heard)) == (1, 1)
    two.install()
    signal.raise_signal(signal.SIGTERM)
    assert two.reached(1)
    assert len(calls) == 2
    one.close()
    two.close()
    assert signal.getsignal(signal.SIGTERM) is on_top
    signal.raise_signal(signal.SIGTERM)
    assert len(calls) == 3
    signal.signal(signal.SIGTERM, own)


def test_what_was_ignored_is_heard_of(heard: list[int]) -> None:
    """Begin with SIGTERM ignored, as by a launcher: listeners are called, and afterwards it is ignored again."""
    own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    preemption = alone_too()
    preemption.install()
    signal.raise_signal(signal.SIGTERM)
    assert preemption.reached(1)
    preemption.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    preemption.install()
    in_a_thread(preemption.close)
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, own)


def test_other_threads_cannot_listen(alone: tuple[Preemption, Clock], heard: list[int]) -> None:
    """Install in another thread than the main one: an error says so. Closed in a thread, the former one is called."""
    preemption, _ = alone
    errors: list[BaseException] = []

    def install() -> None:
        try:
            preemption.install()
        except InvalidArgumentError as error:
            errors.append(error)

    in_a_thread(install)
    assert "main thread" in str(errors[0])
    preemption.install()
    in_a_thread(preemption.close)
    signal.raise_signal(signal.SIGTERM)
    assert not preemption.reached(1)
    assert heard == [signal.SIGTERM]
    preemption.install()
    signal.raise_signal(signal.SIGTERM)
    assert preemption.reached(1)
    preemption.close()
    assert len(heard) == 2


def in_a_thread(action: object) -> None:
    thread = threading.Thread(target=action)  # type: ignore[arg-type]
    thread.start()
    thread.join()


# ---- processes


BEGINNING = """
import multiprocessing, os, signal, sys, threading
from dcp_remote.coordination.group import RankGroup
from dcp_remote.manager.preemption import Preemption

preemption = Preemption(RankGroup(0, 1, None))
preemption.install()

def in_a_thread(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()

def ending_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

"""


def run_script(script: str) -> tuple[int, str]:
    """Return exit status and output of a program; kill what it leaves behind."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGINNING + script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def test_children_that_are_forked_can_be_ended() -> None:
    """End the workers of a pool of processes by SIGTERM, however early: it ends, and this process still listens."""
    code, said = run_script(
        """
def told_early():
    child = os.fork()
    if child == 0:
        signal.sigwait([signal.SIGUSR1])
    os.kill(child, signal.SIGTERM)
    return ending_of(child)

for _ in range(3):
    with multiprocessing.get_context("fork").Pool(2):
        pass
print("left", flush=True)
endings = {told_early() for _ in range(20)}
in_a_thread(lambda: endings.add(told_early()))
print(endings, flush=True)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert not preemption.reached(1)
signal.raise_signal(signal.SIGTERM)
assert preemption.reached(2)
"""
    )
    assert (code, said.splitlines()) == (0, ["left", f"{{{-signal.SIGTERM}}}"])


def test_what_a_child_says_itself_counts() -> None:
    """Fork a child: its own handler stays, it may listen itself, and its mask of signals is the parent's."""
    code, said = run_script(
        """
def child_of(part):
    child = os.fork()
    if child == 0:
        part()
        os._exit(3)
    return ending_of(child)

def with_its_own():
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(4))
    os.kill(os.getpid(), signal.SIGTERM)

def that_listens():
    preemption.install()
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(5 if preemption.reached(1) else 6)

def that_blocks():
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGTERM}
    os.kill(os.getpid(), signal.SIGTERM)

print(child_of(with_its_own), child_of(that_listens))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(child_of(that_blocks))
"""
    )
    assert (code, said.split()) == (0, ["4", "5", "3"])


@pytest.mark.torture
@pytest.mark.parametrize("close", ["preemption.close()", "in_a_thread(preemption.close)"])
def test_once_closed_a_signal_ends_the_process(close: str) -> None:
    """Close in any thread, after others or not: a signal ends the process as if there had been no listener."""
    code, said = run_script(
        f"""
other = Preemption(RankGroup(0, 1, None))
other.install()
other.close()
signal.raise_signal(signal.SIGTERM)
print(preemption.reached(1), flush=True)
{close}
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
"""
    )
    assert (code, said.split()) == (-signal.SIGTERM, ["True"])


def test_one_process_of_three_gets_a_signal(rank_pool: RankPool) -> None:
    """Train with a collective in each step; send rank 1 SIGTERM twice: all ranks stop at one step, alive, and save."""
    told = rank_pool.run(_train, ranks=range(3))
    assert len({step for step, _ in told}) == 1
    assert told[0][0] > 20
    assert [saved for _, saved in told] == [3, 3, 3]


def _train() -> tuple[int, int]:
    ranks = RankGroup.from_process_group(None, "checkpoints", beat_seconds=0.1)
    preemption = Preemption(ranks, 60.0)
    try:
        preemption.install()
        for step in range(1, 100_000):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 3
            if dist.get_rank() == 1 and step in (20, 21):
                os.kill(os.getpid(), signal.SIGTERM)
            if preemption.reached(step):
                with join(ranks, seconds=preemption.remaining_seconds()) as joint:
                    return step, joint.gather(1, sum)
        raise AssertionError("it never came")
    finally:
        preemption.close()
        ranks.close()
