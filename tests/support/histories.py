"""Random histories, each given by a seed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from tests.support.figures import LONG_SECONDS


def first_seed(torture_seconds: float) -> int:
    """Return the first seed: 0 in the short form, so that a commit that passes today passes tomorrow."""
    return random.SystemRandom().getrandbits(32) if torture_seconds >= LONG_SECONDS else 0


def run_histories(history: Callable[[int], None], torture_seconds: float) -> None:
    """Run one history after another until the time is over; a failure prints its seed, the argument of `history`."""
    until = time.monotonic() + torture_seconds
    for seed in itertools.count(first_seed(torture_seconds)):
        try:
            history(seed)
        except BaseException as error:
            error.add_note(f"seed={seed}")
            raise
        if time.monotonic() > until:
            return
