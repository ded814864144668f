"""Random histories, each decided by its seed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from tests.support.figures import LONG_SECONDS


def first_seed(torture_seconds: float) -> int:
    """Return where random tests begin: at 0 in the short form, or a commit would pass today and fail tomorrow."""
    return random.SystemRandom().getrandbits(32) if torture_seconds >= LONG_SECONDS else 0


def run_histories(history: Callable[[int], None], torture_seconds: float) -> None:
    """One after another until the time is over; a failure prints its seed, the argument of `history`."""
    until = time.monotonic() + torture_seconds
    for seed in itertools.count(first_seed(torture_seconds)):
        try:
            history(seed)
        except BaseException as error:
            error.add_note(f"seed={seed}")
            raise
        if time.monotonic() > until:
            return
