"""Count of the operations of this process at torch's key-value store: by who asks, about what, with which method.

Counted are the calls of the store's own methods, below every class of the package, so that no call is missed and no
class has to be known. A `get` and a `multi_get` are two operations: torch waits for the key first.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch.distributed as dist

# Requests that one call sends to a TCPStore (TCPStore.cpp of torch 2.13).
_OPERATIONS = dict.fromkeys(("set", "add", "append", "check", "compare_set", "delete_key", "multi_set", "wait"), 1) | {
    "get": 2,
    "multi_get": 2,
}

# Subject of a key, by the first pattern that is found in the key. A status is below `beat/` or is a bulletin of many.
_SUBJECTS = (
    ("heartbeat", re.compile(r"\bbeat/|\bbulletin\b")),
    ("contribution", re.compile(r"/in\b|/slots\b")),
    ("answer", re.compile(r"/out\b")),
    ("verdict", re.compile(r"/(failed|verdict)\b")),
    ("numbering", re.compile(r"/used\b")),
)


class Kind(NamedTuple):
    """Kind of operations.

    Attributes:
        by_heartbeat: True for the thread that publishes heartbeats, False for all others.
        subject: Subject of the key: "heartbeat", "contribution", "answer", "verdict", "numbering" or "other".
        method: Method of the store.
        in_vain: True for a look for a key that had not come, and for each look at a counter. How many there are depends
            on time; all other operations are the same in each run.
    """

    by_heartbeat: bool
    subject: str
    method: str
    in_vain: bool

    @property
    def is_of_round(self) -> bool:
        """True for what belongs to a round: the rank that speaks for its host lets its heartbeat ask for it."""
        return not self.by_heartbeat or self.subject in {"answer", "contribution"}

    @property
    def is_look(self) -> bool:
        """True for a look of a rank that waits in a round, in vain so far."""
        return self.in_vain and self.subject in {"answer", "contribution"}


class _Counts:
    """Counts of one thread: its operations by subject, method and success, its heartbeats, and bytes of values."""

    def __init__(self) -> None:
        self.operations: Counter[tuple[str, str, bool]] = Counter()
        self.beats = self.value_bytes = 0
        self.by_heartbeat = False  # true once the thread has published one, also of what it did before


class _Caller(threading.local):
    """Counts of the calling thread, made at its first use; `register` is called with them, once in each thread."""

    def __init__(self, register: Callable[[_Counts], None]) -> None:
        self.counts = _Counts()
        register(self.counts)


class OperationCounter:
    """Count of the operations of this process from `install` on; there is one in a process."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._lock = threading.Lock()
        self._all: list[_Counts] = []
        self._caller = _Caller(self._all.append)

    def install(self) -> None:
        """Count each call of a method of torch's stores from now on."""
        for method, operations in _OPERATIONS.items():
            setattr(dist.Store, method, self._counted(method, operations, getattr(dist.Store, method)))

    def take(self) -> tuple[Counter[Kind], int, int]:
        """Return the operations by kind, the heartbeats and the bytes of values since the last call."""
        taken: Counter[Kind] = Counter()
        beats = value_bytes = 0
        with self._lock:
            for counts in self._all:
                for what, count in counts.operations.items():
                    taken[Kind(counts.by_heartbeat, *what)] += count
                beats += counts.beats
                value_bytes += counts.value_bytes
                counts.operations.clear()
                counts.beats = counts.value_bytes = 0
        return taken, beats, value_bytes

    def _counted(self, method: str, operations: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def count(store: dist.Store, keys: Any, *args: Any) -> Any:
            key = keys if isinstance(keys, str) else keys[0]
            subject = next((name for name, pattern in _SUBJECTS if pattern.search(key)), "other")
            counts = self._caller.counts
            answer = original(store, keys, *args)
            in_vain = (
                (method == "check" and not answer)
                or (method == "compare_set" and args == (answer, answer))  # a `get` of a key that is not there
                or (method == "add" and args == (0,))
            )
            with self._lock:
                counts.operations[subject, method, in_vain] += operations
                counts.value_bytes += sum(_length(value) for value in (*args, answer))
                if subject == "heartbeat" and method == "set":
                    counts.by_heartbeat = True
                    counts.beats += 1
            return answer

        return count


def _length(value: object) -> int:
    """Return the bytes of a value, or of several, as an argument or an answer."""
    if isinstance(value, list):
        return sum(map(_length, value))
    return len(value) if isinstance(value, str | bytes) else 0
