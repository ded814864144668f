"""All ranks stop at one step: every interleaving of a few ranks, then threads, then processes and signals."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.joint import Ranks
from dcp_remote.preemption import Agreement, Preemption
from dcp_remote.pulse import Client
from dcp_remote.testing.rank_pool import RankPool
from tests.distributed.parties import Party, held, join, party, wait_until

# ---- every interleaving


@dataclass(frozen=True, slots=True)
class Terms:
    """What ranks do.

    Attributes:
        steps: After which they ask, of all ranks alike.
        world_size: How many ranks.
        asked: Who may get a signal.
        give_up: Who may lose patience.
        in_step: Whether each step is a collective of all.
    """

    steps: tuple[int, ...]
    world_size: int
    asked: frozenset[int]
    give_up: frozenset[int] = frozenset()
    in_step: bool = True


class World:
    """Ranks that train, one action after another."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.store = dist.HashStore()
        self.client = Client(self.store)
        self.agreements = [Agreement(rank, terms.world_size) for rank in range(terms.world_size)]
        self.done = [0] * terms.world_size  # how many steps
        self.stopped: dict[int, int] = {}
        self.waits = [False] * terms.world_size
        self.asked = [False] * terms.world_size
        self.gave_up = [False] * terms.world_size

    def actions(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for rank in range(self.terms.world_size):
            if not self.agreements[rank].settled.is_set():
                found.append(("beat", rank))
            if rank in self.terms.asked and not self.asked[rank]:
                found.append(("signal", rank))
            if rank in self.terms.give_up and self.waits[rank] and not self.gave_up[rank]:
                found.append(("give up", rank))
            if self.can_train(rank):
                found.append(("train", rank))
        return found

    def can_train(self, rank: int) -> bool:
        if rank in self.stopped or self.done[rank] == len(self.terms.steps):
            return False
        # A collective in each step: nobody is past it before all have come to it, having asked about the step before.
        return not self.terms.in_step or all(
            self.done[other] >= self.done[rank] + (other in self.stopped) for other in range(self.terms.world_size)
        )

    def act(self, action: tuple[str, int]) -> None:
        what, rank = action
        agreement = self.agreements[rank]
        if what == "signal":
            self.asked[rank] = True
        elif what == "beat":
            agreement.beat(self.client, asked=self.asked[rank])
        elif what == "give up":
            self.gave_up[rank] = True
            agreement.give_up(self.client)
        else:
            step = self.terms.steps[self.done[rank]]
            answer = agreement.ask(step)
            self.waits[rank] = answer is None
            if answer is not None:
                self.done[rank] += 1
            if answer:
                self.stopped[rank] = step
        assert len(set(self.stopped.values())) <= 1, "ranks stop at different steps"

    def finish(self) -> None:
        """Nothing more happens to anybody, and everybody goes on: all end, and all in the same way."""
        for _ in range(4 * len(self.terms.steps) + 8):
            for rank in range(self.terms.world_size):
                self.act(("beat", rank))
                if self.can_train(rank):
                    self.act(("train", rank))
        assert len(self.stopped) in (0, self.terms.world_size), "some ranks stop, and some do not"
        assert self.stopped or self.done == [len(self.terms.steps)] * self.terms.world_size, "ranks wait for ever"

    def state(self) -> object:
        return (
            [
                (one._last_step, one._here, one._published, one._step, one._reached, one.settled.is_set(), one._steps)
                for one in self.agreements
            ],
            sorted((key, self.store.get(key)) for key in self.store.list_keys()),
            (self.done, self.stopped, self.waits, self.asked, self.gave_up),
        )


def explore(terms: Terms) -> tuple[int, set[int | None]]:
    """All states that can be reached: how many, and at which steps ranks stop."""
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
        endings.add(next(iter(world.stopped.values()), None))
    return len(seen), endings


BOTH = frozenset({0, 1})


@pytest.mark.parametrize(
    ("terms", "endings"),
    [
        pytest.param(Terms((0, 1, 2), 2, BOTH), {None, 0, 1, 2}, id="two ranks"),
        pytest.param(Terms((10, 20, 30), 2, BOTH), {None, 10, 20, 30}, id="strides"),
        pytest.param(Terms((0, 1, 2), 2, BOTH, in_step=False), {None, 0, 1, 2}, id="each by itself"),
        pytest.param(Terms((0, 1), 2, BOTH, BOTH), {None, 0, 1}, id="impatient"),
        pytest.param(Terms((0, 1), 3, frozenset({2})), {None, 0, 1}, id="three ranks, one signal"),
    ],
)
def test_every_interleaving(terms: Terms, endings: set[int | None]) -> None:
    """Steps, beats, signals, ranks that give up, in any order: one step for all, or none; and nobody waits for ever."""
    states, found = explore(terms)
    assert states > 100
    assert found == endings


@pytest.mark.parametrize("seed", range(3))
def test_random_interleavings(seed: int) -> None:
    """More ranks, and longer."""
    rng = random.Random(seed)
    for _ in range(100):
        world_size = rng.randrange(2, 6)
        steps = tuple(range(0, rng.randrange(4, 30), rng.randrange(1, 4)))
        some = [frozenset(rank for rank in range(world_size) if rng.random() < 0.4) for _ in range(2)]
        world = World(Terms(steps, world_size, some[0], some[1], in_step=rng.random() < 0.7))
        for _ in range(rng.randrange(200)):
            actions = world.actions()
            if not actions:
                break
            world.act(rng.choice(actions))
        world.finish()


# ---- threads


def train(
    them: Party, preemptions: list[Preemption], *, steps: int, asked: dict[int, int], stride: int = 1
) -> list[int | None]:
    """Each rank's step at which it stopped; each step waits for all ranks, as training does."""
    barrier = threading.Barrier(them.world_size)

    def part(ranks: Ranks) -> int | None:
        for step in range(1, steps + 1):
            if asked.get(ranks.rank) == step:
                preemptions[ranks.rank].request()
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
    """Some are asked, at different steps; all stop at one step soon after, and a joint follows."""
    for seed in range(3):
        rng = random.Random(seed)
        asked = {rng.randrange(world_size): rng.randrange(1, 20), rng.randrange(world_size): rng.randrange(1, 20)}
        with party(world_size, beat_seconds=0.01) as them:
            preemptions = [Preemption(ranks, 20.0) for ranks in them.ranks]
            stopped = train(them, preemptions, steps=100_000, asked=asked, stride=stride)
            assert len(set(stopped)) == 1
            assert stopped[0] is not None
            assert stopped[0] >= min(asked.values())
            assert stopped[0] % stride == 0
            assert not any(one.reached(stopped[0] + stride) for one in preemptions)
            assert all((one.remaining_seconds() or 0) > 0 for one in preemptions)

            def save(ranks: Ranks) -> int:
                with join(ranks) as joint:
                    return joint.gather(1, sum)

            assert [one.value for one in them.run(save)] == [world_size] * world_size


def test_nobody_asks() -> None:
    """No rank stops, and nothing is counted down."""
    with party(2, beat_seconds=0.01) as them:
        preemptions = [Preemption(ranks, 20.0) for ranks in them.ranks]
        assert train(them, preemptions, steps=50, asked={}) == [None, None]
        assert [one.remaining_seconds() for one in preemptions] == [None, None]


def test_a_rank_that_has_not_begun_to_train() -> None:
    """It has never asked, and holds nobody up: the others know at once at which step; it comes to that, too."""
    with party(2, beat_seconds=0.01) as them:
        early, late = (Preemption(ranks, 20.0) for ranks in them.ranks)
        assert not early.reached(1)
        late.request()
        wait_until(early._agreement.settled.is_set)
        assert early.reached(2)
        wait_until(late._agreement.settled.is_set)
        assert [late.reached(step) for step in (1, 2, 3)] == [False, True, False]


def test_ranks_that_cannot_agree_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """One is silent: the others wait for as long as the notice, then train on, and say so once each."""
    with party(3, beat_seconds=0.01) as them, caplog.at_level(logging.WARNING):
        preemptions = [Preemption(ranks, 0.5) for ranks in them.ranks]
        with held(them.ranks[2]):
            preemptions[0].request()
            for step in (1, 2, 3):
                assert not any(them_at.reached(step) for them_at in preemptions[:2])
                wait_until(preemptions[1]._agreement.heard.is_set)
        # It comes back, and hears that nothing came of it.
        wait_until(preemptions[2]._agreement.settled.is_set)
        assert not any(one.reached(step) for step in (4, 5) for one in preemptions)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


def test_a_silent_coordinator_holds_nobody_up_for_ever() -> None:
    """It cannot decide; who gives up writes that nothing is decided, and later it hears of that."""
    with party(2, beat_seconds=0.01) as them:
        preemptions = [Preemption(ranks, 0.3) for ranks in them.ranks]
        with held(them.ranks[0]):
            preemptions[1].request()
            wait_until(preemptions[1]._agreement.heard.is_set)
            assert not preemptions[1].reached(1)
        wait_until(preemptions[0]._agreement.settled.is_set)
        assert preemptions[0]._agreement.step is None
        assert not any(one.reached(2) for one in preemptions)


def test_a_store_that_does_not_answer_holds_nobody_up_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank's own pulse is stuck, after it has said where this rank is: training goes on, and may stop later on."""
    monkeypatch.setattr("dcp_remote.preemption._LAST_WORD_SECONDS", 0.1)
    with party(2, beat_seconds=0.01) as them, caplog.at_level(logging.WARNING):
        one, other = (Preemption(ranks, 0.3) for ranks in them.ranks)
        with held(them.ranks[0]):
            other.request()
            wait_until(other._agreement.heard.is_set)
            with held(them.ranks[1]):
                assert [other.reached(step) for step in (1, 2)] == [False, False]
                # What the coordinator then decides counts where it still can.
                Client(dist.PrefixStore("party", them.store)).put_first("preempt/step", b"4")
            wait_until(other._agreement.settled.is_set)
            assert [other.reached(step) for step in (3, 4, 5)] == [False, True, False]
        wait_until(one._agreement.settled.is_set)
        assert [one.reached(step) for step in (3, 4, 5)] == [False, True, False]
    assert len(caplog.records) == 1


class LostStore:
    """Goes away when it is told to."""

    lost = False

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        if self.lost:
            raise dist.DistNetworkError("Broken pipe")
        if name == "clone":
            raise AttributeError(name)
        return getattr(self._store, name)


def test_a_store_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """Before anybody was asked: training goes on, and that SIGTERM has no effect is said once."""
    store = LostStore()
    ranks = Ranks(0, 2, store, beat_seconds=0.01)  # type: ignore[arg-type]
    preemption = Preemption(ranks, 20.0)
    store.lost = True
    wait_until(lambda: ranks.pulse.gone)  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING):
        assert not preemption.reached(1)
        assert not caplog.records
        preemption.request()
        assert [preemption.reached(step) for step in (2, 3)] == [False, False]
    assert len(caplog.records) == 1
    ranks.close()


# ---- signals


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def alone() -> Iterator[tuple[Preemption, Clock]]:
    clock = Clock()
    preemption = Preemption(Ranks(0, 1, None), 30.0, clock=clock)
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield preemption, clock
    finally:
        preemption.close()
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal(alone: tuple[Preemption, Clock]) -> None:
    """It does not end the process; the next step is the one, and the notice counts from the first signal."""
    preemption, clock = alone
    preemption.install()
    preemption.install()
    assert not preemption.reached(1)
    assert preemption.remaining_seconds() is None
    signal.raise_signal(signal.SIGTERM)
    clock.now += 10
    signal.raise_signal(signal.SIGTERM)
    assert preemption.remaining_seconds() == 20.0
    assert [preemption.reached(step) for step in (2, 2, 3)] == [True, True, False]
    clock.now += 1000
    assert preemption.remaining_seconds() == 0.0


def test_without_a_notice_nothing_counts_down() -> None:
    """It is not known how long there is."""
    preemption = Preemption(Ranks(0, 1, None))
    preemption.request()
    assert preemption.remaining_seconds() is None
    assert preemption.reached(1)


def test_handlers_are_put_back(alone: tuple[Preemption, Clock]) -> None:
    """The one before; but not over one that somebody has put in place since."""
    preemption, _ = alone
    before = signal.getsignal(signal.SIGTERM)

    def other(number: int, frame: FrameType | None) -> None:
        """Of somebody else."""

    try:
        signal.signal(signal.SIGTERM, other)
        preemption.install()
        preemption.close()
        assert signal.getsignal(signal.SIGTERM) is other
        preemption.install()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        preemption.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_cannot_listen(alone: tuple[Preemption, Clock], caplog: pytest.LogCaptureFixture) -> None:
    """Python allows it in the main thread alone: said by an error; and by a warning where a thread closes."""
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
    assert "stays ignored" in caplog.text
    preemption._installed = True  # so that the fixture can put back what was before


def in_a_thread(action: object) -> None:
    thread = threading.Thread(target=action)  # type: ignore[arg-type]
    thread.start()
    thread.join()


# ---- processes


def test_one_process_of_three_gets_a_signal(rank_pool: RankPool) -> None:
    """They train with a collective in each step; rank 1 gets SIGTERM, twice; all stop at one step, alive, and save."""
    told = rank_pool.run(_train, ranks=range(3))
    assert len({step for step, _ in told}) == 1
    assert told[0][0] > 20
    assert [saved for _, saved in told] == [3, 3, 3]


def _train() -> tuple[int, int]:
    ranks = Ranks.of(None, "checkpoints", beat_seconds=0.1)
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
                with join(ranks, seconds=preemption.remaining_seconds() or 0.0) as joint:
                    return step, joint.gather(1, sum)
        raise AssertionError("it never came")
    finally:
        preemption.close()
        ranks.close()
