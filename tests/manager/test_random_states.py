"""Random states: after a restore, the next draws are those that would have followed the save.

No machine with CUDA is needed: `Devices` replaces torch's functions that return and set the states of devices.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manager.random_states import RandomStates, device_sources
from dcp_remote.serialization.objects import decode_object, encode_object
from dcp_remote.storage import MemoryStore


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the global random states after each test."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    np.random.set_bit_generator(bits)  # type: ignore[attr-defined]
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draws() -> list[object]:
    """Draw from each global source; an odd number of normal numbers, because these are made in pairs."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1, dtype=torch.float64).item(),
        torch.randn(17).tolist(),
    ]


def through_storage(state: dict[str, Any]) -> dict[str, Any]:
    """Encode and decode each value; assert that JSON is enough, without pickle or a stream of torch."""
    decoded = {}
    for key, value in state.items():
        encoded = encode_object(key, value)
        assert encoded.encoding == "json"
        decoded[key] = decode_object(key, encoded)
    return decoded


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("number", [0, 7, 2**31 + 5])
@pytest.mark.parametrize("drawn", [0, 1, 2, 30])
def test_next_draws_are_those_that_would_have_come(number: int, drawn: int, caplog: pytest.LogCaptureFixture) -> None:
    """Save after some draws, draw more, seed anew, load: the draws after the save repeat."""
    seed(number)
    for _ in range(drawn):
        draws()
    saved = RandomStates().state_dict()
    would_have_come = [draws(), draws()]
    seed(99)
    RandomStates().load_state_dict(through_storage(saved))
    assert [draws(), draws()] == would_have_come
    assert warnings_in(caplog) == []


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 700))
def test_any_state_of_a_torch_generator(number: int, drawn: int) -> None:
    """Restore seeds of 64 bits, any position in the cycle of 624 words, with and without a kept normal number."""
    generator = torch.Generator().manual_seed(number)
    torch.rand(drawn, generator=generator)
    torch.randn(drawn % 3, generator=generator)
    saved = RandomStates(one=generator).state_dict()
    again = torch.Generator()
    RandomStates(one=again).load_state_dict(through_storage(saved))
    assert torch.equal(again.get_state(), generator.get_state())


def _seeded(kind: type[np.random.BitGenerator]) -> Callable[[int], np.random.Generator]:
    return lambda number: np.random.Generator(kind(number))


def _draw_halves(generator: np.random.Generator) -> object:
    return generator.random(), generator.integers(9, dtype=np.uint32), generator.standard_normal()


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "torch": (lambda number: torch.Generator().manual_seed(number), lambda rng: torch.rand(3, generator=rng).tolist()),
    "random": (random.Random, lambda rng: (rng.random(), rng.gauss(0, 1))),
    "RandomState": (np.random.RandomState, lambda rng: (float(rng.rand()), float(rng.randn()))),
    "PCG64": (np.random.default_rng, _draw_halves),
    "MT19937": (_seeded(np.random.MT19937), _draw_halves),
    "Philox": (_seeded(np.random.Philox), _draw_halves),
    "SFC64": (_seeded(np.random.SFC64), _draw_halves),
    "PCG64DXSM": (_seeded(np.random.PCG64DXSM), _draw_halves),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_that_are_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Restore each kind into a generator of another seed; draws after `state_dict` do not change what is stored."""
    make, draw = GENERATORS[kind]
    generator = make(1)
    draw(generator)
    saved = RandomStates(loader=generator).state_dict()
    would_have_come = [draw(generator), draw(generator)]
    again = make(2)
    RandomStates(loader=again).load_state_dict(through_storage(saved))
    assert [draw(again), draw(again)] == would_have_come
    assert warnings_in(caplog) == []


def test_children_of_a_numpy_generator(caplog: pytest.LogCaptureFixture) -> None:
    """Spawn the children that would have come next if the seed is the same; warn if they cannot be the same."""
    generator = np.random.default_rng(5)
    generator.spawn(4)
    state = RandomStates(epochs=generator).state_dict()
    would_have_come = [child.random() for child in generator.spawn(3)]
    saved = through_storage(state)

    again = np.random.default_rng(5)
    again.spawn(1)
    RandomStates(epochs=again).load_state_dict(saved)
    assert [child.random() for child in again.spawn(3)] == would_have_come
    assert warnings_in(caplog) == []

    for other in (np.random.default_rng(6), again):  # another seed; more children spawned
        caplog.clear()
        RandomStates(epochs=other).load_state_dict(saved)
        [warning] = warnings_in(caplog)
        assert "'epochs'" in warning
        assert "children will be others" in warning


def test_numpy_s_functions_on_another_bit_generator(caplog: pytest.LogCaptureFixture) -> None:
    """Restore numpy's functions if the bit generator is of the same kind; otherwise warn, and restore the rest."""
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    seed_of_python = random.getstate()
    np.random.randn()
    saved = through_storage(RandomStates().state_dict())
    would_have_come = np.random.randn(3).tolist()
    np.random.set_bit_generator(np.random.PCG64(4))  # type: ignore[attr-defined]
    RandomStates().load_state_dict(saved)
    assert np.random.randn(3).tolist() == would_have_come
    assert warnings_in(caplog) == []

    np.random.set_bit_generator(np.random.MT19937(4))  # type: ignore[attr-defined]
    random.seed(8)
    RandomStates().load_state_dict(saved)
    assert random.getstate() == seed_of_python
    [warning] = warnings_in(caplog)
    assert "PCG64" in warning


def test_saved_by_torch_s_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save and load through torch's planners: five objects and no tensors, so other devices and names do not matter."""
    store = MemoryStore()
    Devices(8, current=3).install(monkeypatch)
    generator = torch.Generator().manual_seed(3)
    dcp.save({"random": RandomStates(loader=generator, gone=random.Random())}, storage_writer=RemoteWriter(store))
    would_have_come = [draws(), torch.rand(2, generator=generator).tolist()]
    metadata = RemoteReader(store).read_metadata()
    names = ["python", "numpy", "torch", "cuda", "generators"]
    assert set(metadata.state_dict_metadata) == {f"random.{name}" for name in names}

    Devices(0).install(monkeypatch)
    seed(9)
    generator.manual_seed(9)
    states = RandomStates(new=np.random.default_rng(), loader=generator)
    assert isinstance(states, Stateful)
    dcp.load({"random": states}, storage_reader=RemoteReader(store))
    assert [draws(), torch.rand(2, generator=generator).tolist()] == would_have_come


# ---- devices


class Devices:
    """Replacement of torch's functions for random states of CUDA devices: 16 bytes each, the first is the number.

    Like torch, it applies seeds that were given before CUDA is initialized during the initialization, after states.
    """

    def __init__(self, count: int, *, current: int = 0, initialized: bool = True) -> None:
        self.states = [torch.tensor([number, *range(1, 16)], dtype=torch.uint8) for number in range(count)]
        self.current = current
        self.initialized = initialized and count > 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("is_available", "is_initialized", "init", "device_count", "current_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in self.states])
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set_rng_state)

    def is_available(self) -> bool:
        return bool(self.states)

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self) -> None:
        assert self.states
        self.initialized = True

    def device_count(self) -> int:
        return len(self.states)

    def current_device(self) -> int:
        assert self.initialized
        return self.current

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        assert self.initialized, "a state set now would be replaced by an earlier seed"
        assert state.shape == (16,)
        self.states[device] = state.clone()

    @property
    def numbers(self) -> list[int]:
        return [int(state[0]) for state in self.states]


UNCHANGED = 100


def restored(monkeypatch: pytest.MonkeyPatch, saved: Devices, here: Devices) -> list[int]:
    """Return the number of the saved device whose state each device has; its own plus 100 if nothing was restored."""
    saved.install(monkeypatch)
    state = through_storage(RandomStates().state_dict())
    for device_state in here.states:
        device_state[0] += UNCHANGED
    here.install(monkeypatch)
    RandomStates().load_state_dict(state)
    return here.numbers


@pytest.mark.parametrize(
    ("saved", "here", "numbers", "warning"),
    [
        (Devices(8), Devices(8), [0, 1, 2, 3, 4, 5, 6, 7], ""),
        (Devices(2, current=1), Devices(2, current=1, initialized=False), [0, 1], ""),
        # Fewer, none, more.
        (Devices(8), Devices(2), [0, 1], "8 CUDA devices were in use, but 2 are in use here"),
        (Devices(8), Devices(0), [], "8 CUDA devices were in use, but 0 are in use here"),
        (Devices(2), Devices(3), [0, 1, 102], "2 CUDA devices were in use, but 3 are in use here"),
        # The current device has another number.
        (Devices(8, current=3), Devices(1), [3], "8 CUDA devices were in use, but 1 are in use here"),
        (Devices(4, current=3), Devices(4, current=1), [0, 3, 2, 1], ""),
        # CUDA not in use there; neither there nor here.
        (
            Devices(2, initialized=False),
            Devices(2),
            [100, 101],
            "CUDA is in use, but was not when the states were saved",
        ),
        (Devices(2, initialized=False), Devices(2, initialized=False), [100, 101], ""),
        (Devices(0), Devices(0), [], ""),
    ],
)
def test_devices(  # noqa: PLR0917  # the table's columns, and two fixtures
    saved: Devices,
    here: Devices,
    numbers: list[int],
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Restore what fits, the current device from the one that was current; name the rest in one warning."""
    assert restored(monkeypatch, copy.deepcopy(saved), copy.deepcopy(here)) == numbers
    assert len(warnings_in(caplog)) == bool(warning)
    assert warning in "".join(warnings_in(caplog))


def test_cuda_stays_uninitialized_where_nothing_is_to_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialize CUDA neither by `state_dict`, nor by restoring the states of a machine without CUDA."""
    here = Devices(2, initialized=False)
    restored(monkeypatch, Devices(0), here)
    RandomStates().state_dict()
    assert not here.initialized


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_no_two_devices_draw_the_same(saved: int, here: int, data: st.DataObject) -> None:
    """Give the current device the state of the current one, and no two devices the same state."""
    current, here_current = data.draw(st.integers(0, saved - 1)), data.draw(st.integers(0, here - 1))
    sources = device_sources(current, saved, here_current=here_current, here=here)
    assert sources[here_current] == current
    assert len(set(sources.values())) == len(sources)
    assert set(sources) <= set(range(here))
    assert set(sources.values()) <= set(range(saved))
    if saved == here:
        assert len(sources) == here


# ---- mismatches


def test_mismatches_are_named_in_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Warn once of other names, other kinds and fewer devices; restore the rest."""
    Devices(8).install(monkeypatch)
    kept = random.Random(1)
    saved = RandomStates(
        kept=kept, gone=random.Random(2), other=np.random.default_rng(3), bits=np.random.default_rng(4)
    ).state_dict()
    would_have_come = [kept.random(), draws()]
    Devices(2).install(monkeypatch)
    seed(9)
    kept.seed(9)
    new, other = torch.Generator(), torch.Generator()
    bits = np.random.Generator(np.random.SFC64(4))
    before = new.get_state(), other.get_state(), bits.bit_generator.state
    RandomStates(kept=kept, new=new, other=other, bits=bits).load_state_dict(through_storage(saved))
    assert [kept.random(), draws()] == would_have_come
    assert torch.equal(new.get_state(), before[0])
    assert torch.equal(other.get_state(), before[1])
    np.testing.assert_equal(bits.bit_generator.state, before[2])
    [warning] = warnings_in(caplog)
    for part in (
        "'gone' was saved, but does not exist here",
        "'new' is a torch.Generator on cpu, but none was saved",
        "'other' is a torch.Generator on cpu, but numpy.random.Generator of PCG64 was saved",
        "'bits' is a numpy.random.Generator of SFC64, but numpy.random.Generator of PCG64 was saved",
        "8 CUDA devices were in use, but 2 are in use here",
    ):
        assert part in warning
    assert "kept" not in warning


RNG_KIND = "numpy.random.Generator of PCG64"
WORDS = np.zeros(624, dtype=np.uint32)

DAMAGED: dict[str, dict[str, Any]] = {
    "python: too short": {"python": (3, WORDS, None)},
    "python: a later version": {"python": (4, np.zeros(625, dtype=np.uint32), None)},
    "python: beyond its words": {"python": (3, np.full(625, 625, dtype=np.uint32), None)},
    "python: text": {"python": (3, np.zeros(625, dtype=np.uint32), "x")},
    "python: None": {"python": None},
    "numpy: words": {"numpy": WORDS},
    "torch: too short": {"torch": torch.get_rng_state().numpy()[:-1]},
    "torch: zeros": {"torch": np.zeros(5056, dtype=np.uint8)},
    "torch: another dtype": {"torch": torch.get_rng_state().numpy().view(np.uint32)},
    "torch: the form of earlier drafts": {"torch": (np.zeros(632, dtype=np.uint32), ((0, 1),))},
    "cuda: no such device": {"cuda": (2, np.zeros((2, 16), dtype=np.uint8))},
    "cuda: one row": {"cuda": (0, np.zeros(16, dtype=np.uint8))},
    "generators: pairs": {"generators": (("a", 1),)},
    "generators: no state": {"generators": (("mine", "torch.Generator on cpu", WORDS),)},
    "generators: of another kind": {"generators": (("rng", RNG_KIND, np.random.Generator(np.random.SFC64(1))),)},
    "generators: no generator": {"generators": (("rng", RNG_KIND, WORDS),)},
    "another key": {"more": 1},
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_states_change_nothing(damage: str) -> None:
    """Raise before any state is restored."""
    seed(1)
    mine = torch.Generator().manual_seed(5)
    states = RandomStates(mine=mine, rng=np.random.default_rng(5))
    saved = states.state_dict() | DAMAGED[damage]
    seed(2)
    mine.manual_seed(6)
    for damaged in (saved, {}):
        with pytest.raises(InvalidArgumentError, match="nothing was changed"):
            states.load_state_dict(damaged)
    found = draws()
    seed(2)
    assert found == draws()
    assert mine.initial_seed() == 6


@pytest.mark.parametrize("generator", [random.SystemRandom(), random, 3, torch.get_rng_state(), np.random.PCG64(1)])
def test_unsupported_generators(generator: Any) -> None:
    """Raise in the constructor, and not during a save."""
    with pytest.raises(InvalidArgumentError, match="name='odd'"):
        RandomStates(odd=generator)


def test_repr() -> None:
    """Show the names, and no states."""
    assert repr(RandomStates(loader=random.Random(1), noise=np.random.default_rng(1))) == "RandomStates(loader, noise)"
