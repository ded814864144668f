"""Random states: the next draws are those that would have come, whatever was drawn and wherever it goes on.

No machine with CUDA is needed: `Devices` stands for torch's functions that give and take the states of devices.
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
    """What these tests draw and seed is nobody else's business."""
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
    """From each global source; of normal numbers, which come in pairs, an odd number."""
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
    """Each value encoded and decoded, as JSON: nothing needs pickle, or a stream of torch's."""
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
    """Saved after so many draws; more are drawn, and everything is seeded anew, before it is loaded."""
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
def test_torch_s_words_are_joined_again(number: int, drawn: int) -> None:
    """Seeds of 64 bits, any place in the cycle of 624 words, a normal number kept or not."""
    generator = torch.Generator().manual_seed(number)
    torch.rand(drawn, generator=generator)
    torch.randn(drawn % 3, generator=generator)
    saved = RandomStates(one=generator).state_dict()
    again = torch.Generator()
    RandomStates(one=again).load_state_dict(through_storage(saved))
    assert torch.equal(again.get_state(), generator.get_state())


def _of(kind: type[np.random.BitGenerator]) -> Callable[[int], np.random.Generator]:
    return lambda number: np.random.Generator(kind(number))


def _draw_halves(one: np.random.Generator) -> object:
    return one.random(), one.integers(9, dtype=np.uint32), one.standard_normal()


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "torch": (lambda number: torch.Generator().manual_seed(number), lambda one: torch.rand(3, generator=one).tolist()),
    "random": (random.Random, lambda one: (one.random(), one.gauss(0, 1))),
    "RandomState": (np.random.RandomState, lambda one: (float(one.rand()), float(one.randn()))),
    "PCG64": (np.random.default_rng, _draw_halves),
    "MT19937": (_of(np.random.MT19937), _draw_halves),
    "Philox": (_of(np.random.Philox), _draw_halves),
    "SFC64": (_of(np.random.SFC64), _draw_halves),
    "PCG64DXSM": (_of(np.random.PCG64DXSM), _draw_halves),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_that_are_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each kind goes on in a generator of another seed; more is drawn from the first one before it is stored."""
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
    """Workers of an epoch draw from children: those of the next epoch come next, if the seed was the same."""
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

    for other in (np.random.default_rng(6), again):  # of another seed; and one that has spawned more
        caplog.clear()
        RandomStates(epochs=other).load_state_dict(saved)
        [told] = warnings_in(caplog)
        assert "'epochs'" in told
        assert "children will be others" in told


def test_numpy_s_functions_on_another_bit_generator(caplog: pytest.LogCaptureFixture) -> None:
    """They go on where the kind is the same; where it is not they are left, and everything else goes on."""
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
    [told] = warnings_in(caplog)
    assert "PCG64" in told


def test_small() -> None:
    """Every rank saves one: 10.3 KiB, where each of the three generators has 2.5 KB of words, plus 33 % for base64."""
    seed(2**31 + 5)
    draws()
    state = RandomStates().state_dict()
    assert len(encode_object("all", state).data) < 10.5 * 1024
    assert len(encode_object("torch", state["torch"]).data) < 3.6 * 1024


def test_torch_s_planner_takes_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `dcp.save` and `dcp.load`: five objects, no tensors; so it loads where other devices are, and names."""
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
    """torch's functions for the random states of CUDA devices. Each has 16 bytes; here, the first is its number.

    Seeds that are given before CUDA is initialized are applied last when it is, after states: that is torch's way.
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
        assert self.initialized, "what is set now would be lost to an earlier seed"
        assert state.shape == (16,)
        self.states[device] = state.clone()

    @property
    def numbers(self) -> list[int]:
        return [int(state[0]) for state in self.states]


BEGINNING = 100


def restored(monkeypatch: pytest.MonkeyPatch, saved: Devices, here: Devices) -> list[int]:
    """Whose state each device has afterwards; one that draws on as it was has its number plus a hundred."""
    saved.install(monkeypatch)
    state = through_storage(RandomStates().state_dict())
    for one in here.states:
        one[0] += BEGINNING
    here.install(monkeypatch)
    RandomStates().load_state_dict(state)
    return here.numbers


@pytest.mark.parametrize(
    ("saved", "here", "numbers", "told"),
    [
        (Devices(8), Devices(8), [0, 1, 2, 3, 4, 5, 6, 7], ""),
        (Devices(2, current=1), Devices(2, current=1, initialized=False), [0, 1], ""),
        # Fewer, none, more.
        (Devices(8), Devices(2), [0, 1], "8 CUDA devices were in use, and here are 2"),
        (Devices(8), Devices(0), [], "8 CUDA devices were in use, and here are 0"),
        (Devices(2), Devices(3), [0, 1, 102], "2 CUDA devices were in use, and here are 3"),
        # A rank's own device has another number.
        (Devices(8, current=3), Devices(1), [3], "8 CUDA devices were in use, and here are 1"),
        (Devices(4, current=3), Devices(4, current=1), [0, 3, 2, 1], ""),
        # Not in use, there, or neither there nor here.
        (Devices(2, initialized=False), Devices(2), [100, 101], "CUDA is in use, and was not when they were saved"),
        (Devices(2, initialized=False), Devices(2, initialized=False), [100, 101], ""),
        (Devices(0), Devices(0), [], ""),
    ],
)
def test_devices(  # noqa: PLR0917  # the table's columns, and two fixtures
    saved: Devices,
    here: Devices,
    numbers: list[int],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What fits is taken, the current device goes on for the one that was current, and one warning tells the rest."""
    assert restored(monkeypatch, copy.deepcopy(saved), copy.deepcopy(here)) == numbers
    assert len(warnings_in(caplog)) == bool(told)
    assert told in "".join(warnings_in(caplog))


def test_cuda_stays_uninitialized_where_nothing_is_to_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither taking states nor restoring those of a machine without CUDA takes a device."""
    here = Devices(2, initialized=False)
    restored(monkeypatch, Devices(0), here)
    RandomStates().state_dict()
    assert not here.initialized


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_no_two_devices_draw_the_same(saved: int, here: int, data: st.DataObject) -> None:
    """The current one goes on for the current one; every other for one of the others at most."""
    current, here_current = data.draw(st.integers(0, saved - 1)), data.draw(st.integers(0, here - 1))
    sources = device_sources(current, saved, here_current=here_current, here=here)
    assert sources[here_current] == current
    assert len(set(sources.values())) == len(sources)
    assert set(sources) <= set(range(here))
    assert set(sources.values()) <= set(range(saved))
    if saved == here:
        assert len(sources) == here


# ---- what does not fit


def test_what_does_not_fit_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Another name, another kind, fewer devices: one warning that names them all; the rest goes on."""
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
    [told] = warnings_in(caplog)
    for part in (
        "'gone' was saved, and is not here",
        "'new' is a torch.Generator on cpu, and none was saved",
        "'other' is a torch.Generator on cpu, and numpy.random.Generator of PCG64 was saved",
        "'bits' is a numpy.random.Generator of SFC64, and numpy.random.Generator of PCG64 was saved",
        "8 CUDA devices were in use, and here are 2",
    ):
        assert part in told
    assert "kept" not in told


RNG_KIND = "numpy.random.Generator of PCG64"
WORDS = np.zeros(624, dtype=np.uint32)

DAMAGED: dict[str, dict[str, Any]] = {
    "python: too short": {"python": (3, WORDS, None)},
    "python: a later version": {"python": (4, np.zeros(625, dtype=np.uint32), None)},
    "python: beyond its words": {"python": (3, np.full(625, 625, dtype=np.uint32), None)},
    "python: text": {"python": (3, np.zeros(625, dtype=np.uint32), "x")},
    "python: None": {"python": None},
    "numpy: words": {"numpy": WORDS},
    "torch: too short": {"torch": (WORDS, ())},
    "torch: zeros": {"torch": (np.zeros(632, dtype=np.uint32), ())},
    "torch: no such place": {"torch": (np.zeros(632, dtype=np.uint32), ((632, 1),))},
    "torch: too large": {"torch": (np.zeros(632, dtype=np.uint32), ((0, 2**32),))},
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
    """Refused as a whole, before anything is restored."""
    seed(1)
    mine = torch.Generator().manual_seed(5)
    states = RandomStates(mine=mine, rng=np.random.default_rng(5))
    saved = states.state_dict() | DAMAGED[damage]
    seed(2)
    mine.manual_seed(6)
    with pytest.raises(InvalidArgumentError, match="nothing was changed"):
        states.load_state_dict(saved)
    found = draws()
    seed(2)
    assert found == draws()
    assert mine.initial_seed() == 6


def test_a_key_is_missing() -> None:
    """As in states that somebody else made."""
    with pytest.raises(InvalidArgumentError, match="nothing was changed"):
        RandomStates().load_state_dict({})


@pytest.mark.parametrize("generator", [random.SystemRandom(), random, 3, torch.get_rng_state(), np.random.PCG64(1)])
def test_no_generator(generator: Any) -> None:
    """Refused when it is named, not when it is saved."""
    with pytest.raises(InvalidArgumentError, match="name='odd'"):
        RandomStates(odd=generator)


def test_repr() -> None:
    """Names, and no state."""
    assert repr(RandomStates(loader=random.Random(1), noise=np.random.default_rng(1))) == "RandomStates(loader, noise)"
