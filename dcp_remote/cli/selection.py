"""Checkpoints as a command line names them: a step or a name."""

from __future__ import annotations


def parse_step(text: str) -> int | str:
    """Return digits as a step, any other text as a name or a word for the newest checkpoint (`NEWEST_WORDS`).

    A name of digits alone is only given to its own step.
    """
    return int(text) if text.isdecimal() else text
