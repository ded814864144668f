"""What a rank's training draws its random numbers from, as a part of the state that is saved.

    random_states = RandomStates(loader=generator)
    checkpoints.save(step, {"model": ..., "random": random_states})

After the state is loaded, the next draws are those that would have come. All of it is stored without pickle, in 10 KB
a rank: the 624 words of a Mersenne Twister as an array, which is half of what JSON's integers take.
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
    """The random states of this process: a `torch.distributed.checkpoint.stateful.Stateful`.

    Of Python's `random`, of numpy's global functions, of torch on the CPU and on every CUDA device if CUDA is in use,
    and of the generators that are named here. Each rank draws its own numbers, and so must save its own states.

    `state_dict` gives copies, under the same five keys everywhere:

        python      what `random.getstate()` gives, its words as an array
        numpy       a RandomState that draws on as numpy's functions would have
        torch       what `torch.get_rng_state()` gives, its words of 64 bits in two parts: an array of their lower
                    halves, and of the upper halves, which are hardly used, place and value of those that are not zero
        cuda        the current device, and an array with the state of each one as a row; None if CUDA is not in use
        generators  name, kind and state of each: numpy's as copies of themselves, the others as above

    None of these values is a dict, a list or a tensor. torch's planners take such values apart, and a template would
    then ask for names that another machine, with other devices, has not saved.

    Args:
        **generators: Any that training draws from, by names of your choice.

    Raises:
        InvalidArgumentError: One of them is none whose state can be taken and given.
    """

    def __init__(self, **generators: RandomSource) -> None:
        """See the class."""
        for name, generator in generators.items():
            if not _has_state(generator):
                raise InvalidArgumentError(
                    "Not a generator of random numbers of torch, numpy or Python that has a state.",
                    name=name,
                    type=type(generator).__name__,
                )
        self._generators = generators

    def __repr__(self) -> str:
        """The names."""
        return f"RandomStates({', '.join(self._generators)})"

    def state_dict(self) -> dict[str, Any]:
        """All states as they are now. What is drawn later does not change them."""
        return {
            "python": _python_state(random),
            "numpy": _numpy_copy(),
            "torch": _split(torch.get_rng_state()),
            "cuda": _cuda_states(),
            "generators": tuple((name, _kind(one), _state(one)) for name, one in self._generators.items()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Draw on from where these states were taken. If it raises, nothing has changed.

        What does not fit goes on as it is, and one warning says what that is: devices that are not here, or were not
        there; generators of other names or kinds. The current CUDA device draws on for the one that was current, the
        others for those of their number. Where there is a device and a state for it, this initializes CUDA: what torch
        is told before, it does when it initializes, and seeds that it was given win over states.

        Children that a numpy Generator spawns later are those that would have come if it was made of the same seed.

        Raises:
            InvalidArgumentError: It is not what `state_dict` gives.
        """
        if state_dict.get("cuda") is not None and torch.cuda.is_available():
            torch.cuda.init()
        left: list[str] = []
        try:
            if state_dict.keys() != _KEYS:
                raise KeyError(f"expected {sorted(_KEYS)}, found {sorted(state_dict)}")
            # All of it is checked before any of it is restored.
            restoring: list[_Restore] = [
                _restoring_python(random, state_dict["python"]),
                _restoring_numpy(state_dict["numpy"], left),
                partial(torch.set_rng_state, _joined(state_dict["torch"])),
                *_restoring_cuda(state_dict["cuda"], left),
                *self._restoring_generators(state_dict["generators"], left),
            ]
        except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                "These are no random states that RandomStates.state_dict gives; nothing was changed.", cause=error
            ) from error
        for restore in restoring:
            restore()
        if left:
            logger.warning("Not all random states could be restored: %s.", "; ".join(left))

    def _restoring_generators(self, saved: Any, left: list[str]) -> list[_Restore]:
        restoring: list[_Restore] = []
        states = {name: (kind, state) for name, kind, state in saved}
        for name, generator in self._generators.items():
            kind, state = states.pop(name, (None, None))
            if kind == _kind(generator):
                restoring += _restoring(name, generator, state, left)
            else:
                left.append(f"generator {name!r} is a {_kind(generator)}, and {kind or 'none'} was saved")
        left += [f"generator {name!r} was saved, and is not here" for name in states]
        return restoring


def _has_state(generator: object) -> bool:
    return isinstance(generator, RandomSource) and not isinstance(generator, random.SystemRandom)


def _kind(generator: RandomSource) -> str:
    """What a state must be of, to fit."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        return f"numpy.random.RandomState of {generator.get_state(legacy=False)['bit_generator']}"
    return "random.Random"


def _state(generator: RandomSource) -> object:
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return _split(state) if generator.device.type == "cpu" else state.numpy().copy()
    if isinstance(generator, random.Random):
        return _python_state(generator)
    return _numpy_twin(generator) if isinstance(generator, np.random.Generator) else copy.deepcopy(generator)


def _restoring(name: str, generator: RandomSource, state: Any, left: list[str]) -> list[_Restore]:
    """What makes a generator draw on from a state of its kind."""
    if isinstance(generator, torch.Generator):
        words = _joined(state) if generator.device.type == "cpu" else torch.from_numpy(state.copy())
        if words.shape != generator.get_state().shape:
            raise ValueError(f"a state of generator {name!r} has {words.numel()} bytes")
        return [partial(generator.set_state, words)]
    if isinstance(generator, random.Random):
        return [_restoring_python(generator, state)]
    if _kind(state) != _kind(generator):
        raise ValueError(f"a state of generator {name!r} is of another kind than it says")
    if isinstance(generator, np.random.RandomState):
        return [partial(generator.set_state, state.get_state(legacy=False))]
    here, there = generator.bit_generator, state.bit_generator
    return [partial(setattr, here, "state", there.state), *_respawning(name, here.seed_seq, there.seed_seq, left)]


def _respawning(name: str, here: object, there: object, left: list[str]) -> list[_Restore]:
    """What makes a sequence of seeds go on with the children that would have come next; it can only go forward."""
    if not (isinstance(here, np.random.SeedSequence) and isinstance(there, np.random.SeedSequence)):
        return []
    missing = there.n_children_spawned - here.n_children_spawned
    if missing >= 0 and np.array_equal(here.pool, there.pool):
        return [partial(here.spawn, missing)]
    if there.n_children_spawned:
        left.append(f"generator {name!r} was made of another seed, or has spawned more: its children will be others")
    return []


def _python_state(source: Any) -> object:
    """Of the module `random`, or of a Random."""
    version, words, gauss = source.getstate()
    return version, np.array(words, dtype=np.uint32), gauss


def _restoring_python(source: Any, state: Any) -> _Restore:
    version, words, gauss = state
    whole = (version, tuple(words.tolist()), gauss)
    random.Random(0).setstate(whole)  # raises if it is none
    if not (gauss is None or isinstance(gauss, float)):
        raise TypeError(f"the normal number that is kept for the next draw is a {type(gauss).__name__}")
    return partial(source.setstate, whole)


def _numpy_twin(generator: np.random.Generator) -> np.random.Generator:
    bits = generator.bit_generator
    is_numpy_s = getattr(np.random, type(bits).__name__, None) is type(bits)
    if not (is_numpy_s and isinstance(bits.seed_seq, np.random.SeedSequence)):
        return copy.deepcopy(generator)
    # A copy of numpy 1's is without its seeds.
    twin = type(bits)(copy.deepcopy(bits.seed_seq))
    twin.state = bits.state
    return np.random.Generator(twin)


def _numpy_copy() -> np.random.RandomState:
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public since numpy 1.24
    twin = np.random.RandomState(copy.deepcopy(bits))
    # With the normal number that is kept for the next draw.
    twin.set_state(np.random.get_state(legacy=False))  # noqa: NPY002  # what training draws from is not ours to choose
    return twin


def _restoring_numpy(saved: Any, left: list[str]) -> _Restore:
    state, here = saved.get_state(legacy=False), _numpy_copy().get_state(legacy=False)
    if state["bit_generator"] == here["bit_generator"]:
        return partial(np.random.set_state, state)
    left.append(f"numpy's functions draw from {here['bit_generator']}, and {state['bit_generator']} was saved")
    return lambda: None


def _split(state: torch.Tensor) -> object:
    """A state of torch's CPU generator at half its size; see the class."""
    words = state.numpy().view(np.uint64)
    upper = words >> np.uint64(32)
    return words.astype(np.uint32), tuple((place, int(upper[place])) for place in np.flatnonzero(upper).tolist())


def _joined(state: Any) -> torch.Tensor:
    lower, upper = state
    words = lower.astype(np.uint64)
    for place, value in upper:
        words[place] |= np.uint64(value << 32)
    joined = torch.from_numpy(words.view(np.uint8))
    torch.Generator().set_state(joined)  # raises if it is none
    return joined


def _cuda_states() -> object:
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_device(), np.stack([state.numpy() for state in torch.cuda.get_rng_state_all()])


def _restoring_cuda(saved: Any, left: list[str]) -> list[_Restore]:
    here = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    if saved is None:
        if here:
            left.append("CUDA is in use, and was not when they were saved")
        return []
    current, states = saved
    if states.ndim != 2 or states.dtype != np.uint8 or not 0 <= current < len(states):  # noqa: PLR2004  # a row each
        raise ValueError("states of CUDA are rows of bytes, one of them of the current device")
    if here != len(states):
        left.append(f"{len(states)} CUDA devices were in use, and here are {here}")
    if not here:
        return []
    sources = device_sources(current, len(states), here_current=torch.cuda.current_device(), here=here)
    return [
        partial(torch.cuda.set_rng_state, torch.from_numpy(states[source].copy()), device)
        for device, source in sources.items()
    ]


def device_sources(current: int, saved: int, *, here_current: int, here: int) -> dict[int, int]:
    """For each CUDA device that can draw on, the number of the one that it draws on for.

    A rank draws from its current device. Which number that has depends on how ranks are placed and devices are shown
    to them: rank 3 of 8 has number 3, or 0 if it is shown its own alone. The two that this displaces are exchanged.

    Args:
        current: The device that was current.
        saved: How many there were.
        here_current: The current device.
        here: How many there are.
    """
    sources = {device: device for device in range(min(saved, here))}
    displaced = sources.pop(here_current, None)
    if sources.pop(current, None) is not None and displaced is not None:
        sources[current] = displaced
    return sources | {here_current: current}
