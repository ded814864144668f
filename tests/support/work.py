"""Counts of what Python does in a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

_Answer = TypeVar("_Answer")


def count_work(call: Callable[[], _Answer]) -> tuple[_Answer, int, int]:
    """Return the result of a call, the number of function calls, and the number of new objects that remain."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    blocks, profile = sys.getallocatedblocks(), sys.getprofile()
    sys.setprofile(count)
    try:
        answer = call()
    finally:
        sys.setprofile(profile)
    return answer, calls, sys.getallocatedblocks() - blocks
