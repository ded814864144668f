"""Random states of one rank's training, as a part of the state that is saved.

    random_states = RandomStates(loader=generator)
    checkpoints.save(step, {"model": ..., "random": PerRank(random_states)})

After a load, the next draws are those that would have followed the save. The states are stored without pickle, in about
14 KB per rank: words are arrays, which take half the space of integers in JSON.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from dcp_remote.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

RandomSource: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

# Holds the state of numpy's global functions, which are its methods.
_NUMPY: np.random.RandomState = np.random.mtrand._rand

_KEYS = frozenset({"python", "numpy", "torch", "cuda", "generators"})


class RandomStates:
    """Random states of this process: a `torch.distributed.checkpoint.stateful.Stateful`.

    Covers Python's `random`, numpy's global functions, torch on the CPU, torch on every CUDA device if CUDA is in use,
    and the generators that are named here. Each rank draws its own numbers, and so must save its own states: wrap the
    object in `PerRank`.

    `state_dict` returns copies, always under the same five keys:

        python      `random.getstate()`, its words as a uint32 array
        numpy       a RandomState in the state of numpy's global functions
        torch       `torch.get_rng_state()` as a uint8 array
        cuda        number of the current device, and a uint8 array with one row per device; None if CUDA is not in use
        generators  name, kind and state of each: a copy of a numpy generator, the others as above

    No value is a dict, a list or a tensor, because torch's planners flatten these: a template would then ask for names
    that a machine with other devices has not saved.

    Args:
        **generators: Further generators that training draws from, by names of your choice.

    Raises:
        InvalidArgumentError: A generator is of an unsupported type, or has no state, such as `random.SystemRandom`.
    """

    def __init__(self, **generators: RandomSource) -> None:
        """Take the generators, without drawing from them."""
        given: Mapping[str, object] = generators  # callers without types may give anything
        for name, generator in given.items():
            if not isinstance(generator, RandomSource) or isinstance(generator, random.SystemRandom):
                raise InvalidArgumentError(
                    "The state of this generator cannot be saved. Give a torch.Generator, a numpy.random.Generator or "
                    "RandomState, or a random.Random.",
                    name=name,
                    type=type(generator).__name__,
                )
        self._generators = generators

    def __repr__(self) -> str:
        """Return the names of the generators, without states."""
        return f"RandomStates({', '.join(self._generators)})"

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all current states; later draws do not change them."""
        return {
            "python": _state(random),
            "numpy": _state(_NUMPY),
            "torch": _state(torch.default_generator),
            "cuda": _cuda_states(),
            "generators": tuple((name, _kind(source), _state(source)) for name, source in self._generators.items()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states, so that the next draws are those that would have followed `state_dict`.

        A source without a matching state keeps its own, and one warning names all mismatches: CUDA devices that are
        missing here or were missing there, generators of other names or kinds. The current CUDA device gets the state
        of the device that was current, every other device the state of its number. If there are a device and a state
        for it, this method initializes CUDA, because seeds given before that are applied during the initialization and
        would replace the states.

        A numpy Generator that was made of the same seed also spawns the children that would have come next.

        Raises:
            InvalidArgumentError: The argument is not a return value of `state_dict`; no state has changed.
        """
        if state_dict.get("cuda") is not None and torch.cuda.is_available():
            torch.cuda.init()
        # Every state is checked before any is restored, so that an error changes nothing.
        restore = _Restore()
        try:
            if state_dict.keys() != _KEYS:
                raise KeyError(f"expected {sorted(_KEYS)}, found {sorted(state_dict)}")
            restore.add("python", random, state_dict["python"])
            restore.add_numpy(state_dict["numpy"])
            restore.add("torch", torch.default_generator, state_dict["torch"])
            restore.add_cuda(state_dict["cuda"])
            restore.add_generators(self._generators, state_dict["generators"])
        except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                "The random states are damaged, or not from RandomStates.state_dict; nothing was changed.", cause=error
            ) from error
        for call in restore.calls:
            call()
        if restore.mismatches:
            logger.warning("Not all random states could be restored: %s.", "; ".join(restore.mismatches))


def _kind(generator: object) -> str:
    """Return the kind of a generator; a state fits only a generator of its kind."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        return f"numpy.random.RandomState of {_bits_of(generator)}"
    return "random.Random"


def _bits_of(state: np.random.RandomState) -> str:
    return str(state.get_state(legacy=False)["bit_generator"])


def _state(generator: Any) -> object:
    """Return a copy of the state of a generator, or of the module `random`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().copy()
    if isinstance(generator, np.random.RandomState):
        return copy.deepcopy(generator)
    if not isinstance(generator, np.random.Generator):
        version, words, gauss = generator.getstate()
        return version, np.array(words, dtype=np.uint32), gauss
    bits = generator.bit_generator
    is_from_numpy = getattr(np.random, type(bits).__name__, None) is type(bits)
    if not (is_from_numpy and isinstance(bits.seed_seq, np.random.SeedSequence)):
        return copy.deepcopy(generator)
    # numpy 1's deepcopy loses the seed sequence, from which children are spawned.
    twin = type(bits)(copy.deepcopy(bits.seed_seq))
    twin.state = bits.state
    return np.random.Generator(twin)


def _cuda_states() -> object:
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_device(), np.stack([state.numpy() for state in torch.cuda.get_rng_state_all()])


class _Restore:
    """Calls that restore states, each of which was checked, and the states that fit nothing here."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.mismatches: list[str] = []

    def add(self, name: str, source: Any, state: Any) -> None:
        """Check the state of a generator, or of the module `random`; raise if it is none of its kind."""
        if isinstance(source, torch.Generator):
            checked = torch.from_numpy(state.copy())
            if source.device.type == "cpu":
                torch.Generator().set_state(checked)  # raises if the state is invalid
            elif checked.dtype != torch.uint8 or checked.shape != source.get_state().shape:
                raise ValueError(f"{name}: {checked.dtype} of {checked.shape} is no state on {source.device.type}")
            self.calls.append(partial(source.set_state, checked))
        elif isinstance(source, np.random.Generator | np.random.RandomState):
            if _kind(state) != _kind(source):
                raise ValueError(f"the state of {name!r} is of another kind than the generator saved with it")
            if isinstance(source, np.random.RandomState):
                self.calls.append(partial(source.set_state, state.get_state(legacy=False)))
            else:
                self.calls.append(partial(setattr, source.bit_generator, "state", state.bit_generator.state))
                self._add_spawning(name, source.bit_generator.seed_seq, state.bit_generator.seed_seq)
        else:
            version, words, gauss = state
            whole = (version, tuple(words.tolist()), gauss)
            random.Random(0).setstate(whole)  # raises if the state is invalid
            if not (gauss is None or isinstance(gauss, float)):
                raise TypeError(f"the normal number kept for the next draw is a {type(gauss).__name__}")
            self.calls.append(partial(source.setstate, whole))

    def _add_spawning(self, name: str, here: object, there: object) -> None:
        """Move a seed sequence on to the number of children spawned; it cannot move back."""
        if not (isinstance(here, np.random.SeedSequence) and isinstance(there, np.random.SeedSequence)):
            return
        missing = there.n_children_spawned - here.n_children_spawned
        if missing >= 0 and np.array_equal(here.pool, there.pool):
            self.calls.append(partial(here.spawn, missing))
        elif there.n_children_spawned:
            self.mismatches.append(
                f"generator {name!r} has another seed than the saved one, or has spawned more: its children will be "
                "others"
            )

    def add_numpy(self, state: Any) -> None:
        """Check the state of numpy's global functions, which may draw from another bit generator here."""
        if isinstance(state, np.random.RandomState) and _bits_of(state) != _bits_of(_NUMPY):
            self.mismatches.append(
                f"numpy's functions draw from {_bits_of(_NUMPY)}, but a state of {_bits_of(state)} was saved"
            )
        else:
            self.add("numpy", _NUMPY, state)

    def add_generators(self, generators: Mapping[str, RandomSource], saved: Any) -> None:
        """Check the states of named generators: names, kinds and states."""
        states = {name: (kind, state) for name, kind, state in saved}
        for name, generator in generators.items():
            kind, state = states.pop(name, (None, None))
            if kind == _kind(generator):
                self.add(name, generator, state)
            else:
                self.mismatches.append(f"generator {name!r} is a {_kind(generator)}, but {kind or 'none'} was saved")
        self.mismatches += [f"generator {name!r} was saved, but does not exist here" for name in states]

    def add_cuda(self, saved: Any) -> None:
        """Check the states of CUDA devices."""
        here = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        if saved is None:
            if here:
                self.mismatches.append("CUDA is in use, but was not when the states were saved")
            return
        current, states = saved
        if states.ndim != 2 or states.dtype != np.uint8 or not 0 <= current < len(states):  # noqa: PLR2004  # rows
            raise ValueError("states of CUDA must be rows of bytes, one row of them of the current device")
        if here != len(states):
            self.mismatches.append(f"{len(states)} CUDA devices were in use, but {here} are in use here")
        if here:
            sources = device_sources(current, len(states), here_current=torch.cuda.current_device(), here=here)
            self.calls += [
                partial(torch.cuda.set_rng_state, torch.from_numpy(states[source].copy()), device)
                for device, source in sources.items()
            ]


def device_sources(current: int, saved: int, *, here_current: int, here: int) -> dict[int, int]:
    """Return, for each CUDA device that gets a state, the number of the saved device whose state it gets.

    A rank draws from its current device, whose number depends on the placement of ranks and on `CUDA_VISIBLE_DEVICES`:
    rank 3 of 8 has device 3, or device 0 if it sees only its own. The two devices that this displaces are exchanged.
    `saved` and `here` are numbers of devices, `current` and `here_current` those of the current ones.
    """
    sources = {device: device for device in range(min(saved, here))}
    displaced = sources.pop(here_current, None)
    if sources.pop(current, None) is not None and displaced is not None:
        sources[current] = displaced
    return sources | {here_current: current}
