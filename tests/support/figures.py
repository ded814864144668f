"""Counts of the campaign's work, printed at the end of a run of the tests."""

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

# Value of `--torture-seconds` from which the campaign runs whole, with its largest cases.
LONG_SECONDS = 60

figures: Counter[str] = Counter()


def count(figure: Figure, number: int = 1) -> None:
    figures[figure] += number
