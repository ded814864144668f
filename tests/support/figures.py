"""What the campaign against the core did, counted where it is done and printed at the end of a run of the tests."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

Figure: TypeAlias = Literal[
    "requests failed",  # by a fault that a store was given
    "crashes",  # of simulated processes, at a request
    "ranks killed",  # SIGKILL to a real process
    "ranks stopped",  # SIGSTOP
    "hooks that raised",  # on a real rank
    "attacks",  # hostile inputs written by hand
    "generated attacks",  # by hypothesis
    "histories simulated",  # of several programs in one run
    "requests simulated",  # in the thousand that are always simulated
    "fuzz executions",  # by atheris
]

# From this many seconds on, `--torture-seconds` asks for the whole campaign: what is large then is as large as it gets.
LONG_SECONDS = 60

figures: Counter[str] = Counter()


def count(figure: Figure, number: int = 1) -> None:
    """Add to a figure."""
    figures[figure] += number
