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

_Restore: TypeAlias = Callable[[], object]

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
            "python": _python_state(random),
            "numpy": _copy_global_numpy(),
            "torch": torch.get_rng_state().numpy().copy(),
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
        mismatches: list[str] = []
        try:
            if state_dict.keys() != _KEYS:
                raise KeyError(f"expected {sorted(_KEYS)}, found {sorted(state_dict)}")
            # Every state is checked before any is restored, so that an error changes nothing.
            restores: list[_Restore] = [
                _prepare_python(random, state_dict["python"]),
                _prepare_global_numpy(state_dict["numpy"], mismatches),
                partial(torch.set_rng_state, _checked_torch(state_dict["torch"], torch.Generator())),
                *_prepare_cuda(state_dict["cuda"], mismatches),
                *self._prepare_generators(state_dict["generators"], mismatches),
            ]
        except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                "The random states are damaged, or not from RandomStates.state_dict; nothing was changed.", cause=error
            ) from error
        for restore in restores:
            restore()
        if mismatches:
            logger.warning("Not all random states could be restored: %s.", "; ".join(mismatches))

    def _prepare_generators(self, saved: Any, mismatches: list[str]) -> list[_Restore]:
        restores: list[_Restore] = []
        states = {name: (kind, state) for name, kind, state in saved}
        for name, generator in self._generators.items():
            kind, state = states.pop(name, (None, None))
            if kind == _kind(generator):
                restores += _prepare_generator(name, generator, state, mismatches)
            else:
                mismatches.append(f"generator {name!r} is a {_kind(generator)}, but {kind or 'none'} was saved")
        mismatches += [f"generator {name!r} was saved, but does not exist here" for name in states]
        return restores


def _kind(generator: RandomSource) -> str:
    """Return the kind of a generator; a state fits only a generator of its kind."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        return f"numpy.random.RandomState of {generator.get_state(legacy=False)['bit_generator']}"
    return "random.Random"


def _state(generator: RandomSource) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().copy()
    if isinstance(generator, random.Random):
        return _python_state(generator)
    return _copy_numpy(generator) if isinstance(generator, np.random.Generator) else copy.deepcopy(generator)


def _prepare_generator(name: str, generator: RandomSource, state: Any, mismatches: list[str]) -> list[_Restore]:
    """Check a state against a generator of its kind, and return the calls that restore it."""
    if isinstance(generator, torch.Generator):
        return [partial(generator.set_state, _checked_torch(state, generator))]
    if isinstance(generator, random.Random):
        return [_prepare_python(generator, state)]
    if _kind(state) != _kind(generator):
        raise ValueError(f"the state of generator {name!r} is of another kind than the one saved with it")
    if isinstance(generator, np.random.RandomState):
        return [partial(generator.set_state, state.get_state(legacy=False))]
    here, there = generator.bit_generator, state.bit_generator
    return [
        partial(setattr, here, "state", there.state),
        *_prepare_spawning(name, here.seed_seq, there.seed_seq, mismatches),
    ]


def _prepare_spawning(name: str, here: object, there: object, mismatches: list[str]) -> list[_Restore]:
    """Return the call that moves a seed sequence on to the number of children spawned; it cannot move back."""
    if not (isinstance(here, np.random.SeedSequence) and isinstance(there, np.random.SeedSequence)):
        return []
    missing = there.n_children_spawned - here.n_children_spawned
    if missing >= 0 and np.array_equal(here.pool, there.pool):
        return [partial(here.spawn, missing)]
    if there.n_children_spawned:
        mismatches.append(
            f"generator {name!r} has another seed than the saved one, or has spawned more: its children will be others"
        )
    return []


def _python_state(source: Any) -> object:
    """Return the state of a `random.Random`, or of the module `random`."""
    version, words, gauss = source.getstate()
    return version, np.array(words, dtype=np.uint32), gauss


def _prepare_python(source: Any, state: Any) -> _Restore:
    version, words, gauss = state
    whole = (version, tuple(words.tolist()), gauss)
    random.Random(0).setstate(whole)  # raises if the state is invalid
    if not (gauss is None or isinstance(gauss, float)):
        raise TypeError(f"the normal number kept for the next draw is a {type(gauss).__name__}")
    return partial(source.setstate, whole)


def _copy_numpy(generator: np.random.Generator) -> np.random.Generator:
    bits = generator.bit_generator
    is_from_numpy = getattr(np.random, type(bits).__name__, None) is type(bits)
    if not (is_from_numpy and isinstance(bits.seed_seq, np.random.SeedSequence)):
        return copy.deepcopy(generator)
    # numpy 1's deepcopy loses the seed sequence, from which children are spawned.
    twin = type(bits)(copy.deepcopy(bits.seed_seq))
    twin.state = bits.state
    return np.random.Generator(twin)


def _copy_global_numpy() -> np.random.RandomState:
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public since numpy 1.24
    twin = np.random.RandomState(copy.deepcopy(bits))
    # Copies also the normal number kept for the next draw, which the bit generator does not hold.
    twin.set_state(np.random.get_state(legacy=False))  # noqa: NPY002  # training may draw from numpy's global functions
    return twin


def _prepare_global_numpy(saved: Any, mismatches: list[str]) -> _Restore:
    state, here = saved.get_state(legacy=False), _copy_global_numpy().get_state(legacy=False)
    if state["bit_generator"] == here["bit_generator"]:
        return partial(np.random.set_state, state)
    mismatches.append(
        f"numpy's functions draw from {here['bit_generator']}, but a state of {state['bit_generator']} was saved"
    )
    return lambda: None


def _checked_torch(state: Any, generator: torch.Generator) -> torch.Tensor:
    """Return the state of a torch generator as a tensor that owns its memory; raise if the generator cannot take it."""
    checked = torch.from_numpy(state.copy())
    if generator.device.type == "cpu":
        torch.Generator().set_state(checked)  # raises if the state is invalid
    elif checked.dtype != torch.uint8 or checked.shape != generator.get_state().shape:
        raise ValueError(f"not a state of a generator on {generator.device.type}: {checked.dtype}, {checked.shape}")
    return checked


def _cuda_states() -> object:
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_device(), np.stack([state.numpy() for state in torch.cuda.get_rng_state_all()])


def _prepare_cuda(saved: Any, mismatches: list[str]) -> list[_Restore]:
    here = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    if saved is None:
        if here:
            mismatches.append("CUDA is in use, but was not when the states were saved")
        return []
    current, states = saved
    if states.ndim != 2 or states.dtype != np.uint8 or not 0 <= current < len(states):  # noqa: PLR2004  # rows of bytes
        raise ValueError("states of CUDA must be rows of bytes, one row of them of the current device")
    if here != len(states):
        mismatches.append(f"{len(states)} CUDA devices were in use, but {here} are in use here")
    if not here:
        return []
    sources = device_sources(current, len(states), here_current=torch.cuda.current_device(), here=here)
    return [
        partial(torch.cuda.set_rng_state, torch.from_numpy(states[source].copy()), device)
        for device, source in sources.items()
    ]


def device_sources(current: int, saved: int, *, here_current: int, here: int) -> dict[int, int]:
    """Return, for each CUDA device that gets a state, the number of the saved device whose state it gets.

    A rank draws from its current device, whose number depends on the placement of ranks and on `CUDA_VISIBLE_DEVICES`:
    rank 3 of 8 has device 3, or device 0 if it sees only its own. The two devices that this displaces are exchanged.

    Args:
        current: Number of the device that was current.
        saved: Number of devices that were saved.
        here_current: Number of the current device here.
        here: Number of devices here.
    """
    sources = {device: device for device in range(min(saved, here))}
    displaced = sources.pop(here_current, None)
    if sources.pop(current, None) is not None and displaced is not None:
        sources[current] = displaced
    return sources | {here_current: current}
