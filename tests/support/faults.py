"""Faults of a store by name, at any of its requests; and pauses so short that thousands of faults take a minute."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import pytest

from dcp_remote.common.deadline import RetryPolicy
from dcp_remote.errors import ConditionFailedError, PermissionDeniedError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.run import conditional_put
from dcp_remote.storage import retrying
from dcp_remote.storage.wrapper import Verb
from dcp_remote.testing import Fault, nth
from dcp_remote.testing.wrappers import Predicate

Way: TypeAlias = Literal[
    "request lost",
    "response lost",
    "late by one request",
    "late by three requests",
    "late by all requests",
    "409",  # another conditional write is under way; nothing was written
    "412 on our own write",  # carried out, repeated by a client that lost the answer, and refused then
    "403 on the way back",  # a write that was carried out, whatever the answer says
    "503 for a while",
    "crash before the request",
    "crash after the request",
    "403",
    "503 for ever",
    "responses lost for ever",
    "403 for ever",
    "409 for ever",
]
ONCE: tuple[Way, ...] = (
    "request lost",
    "response lost",
    "late by one request",
    "late by three requests",
    "late by all requests",
    "409",
    "412 on our own write",
    "403 on the way back",
    "503 for a while",
)
CRASHES: tuple[Way, ...] = ("crash before the request", "crash after the request")
NO_ANSWER: tuple[Way, ...] = ("503 for ever", "responses lost for ever")
THE_END: tuple[Way, ...] = (*CRASHES, "403", *NO_ANSWER, "403 for ever", "409 for ever")


class CrashError(BaseException):
    """End of the process: no code of the package catches this."""


def denied() -> PermissionDeniedError:
    return PermissionDeniedError("An injected 403.")


def verb_is(*verbs: Verb) -> Predicate:
    """Return a predicate of requests that is true for these verbs."""
    return lambda verb, key, number: verb in verbs


def fault(way: Way, number: int, *, key: str = CATALOG_KEY) -> Fault:
    """Return a fault of the `number`-th request, of three requests from that one on, or of all from that one on.

    Requests are numbered from 1. 409 and 412 hit the object of the key, which is put on a condition.
    """

    def conditional(verb: Verb, of: str, now: int) -> bool:
        return now >= number and verb == "put" and of == key

    def refusal() -> ConditionFailedError:
        return ConditionFailedError("An injected refusal.", key=key)

    faults: dict[Way, Fault] = {
        "request lost": nth(number, "request"),
        "response lost": nth(number, "response"),
        "late by one request": nth(number, "late", later_by=1),
        "late by three requests": nth(number, "late", later_by=3),
        "late by all requests": nth(number, "late"),
        "409": Fault(conditional, "request", error=refusal),
        "412 on our own write": Fault(conditional, "response", error=refusal),
        "403 on the way back": Fault(conditional, "response", error=denied),
        "503 for a while": Fault(lambda _verb, _key, now: number <= now < number + 3, "request", persistent=True),
        "crash before the request": nth(number, "request", error=CrashError, persistent=True),
        "crash after the request": nth(number, "response", error=CrashError, persistent=True),
        "403": nth(number, "request", error=denied),
        "503 for ever": nth(number, "request", persistent=True),
        "responses lost for ever": nth(number, "response", persistent=True),
        "403 for ever": nth(number, "request", error=denied, persistent=True),
        "409 for ever": Fault(conditional, "request", error=refusal, persistent=True),
    }
    return faults[way]


def shorten_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between attempts to milliseconds."""
    policy = partial(RetryPolicy, first_delay_seconds=0.002, delay_seconds_max=0.01)
    monkeypatch.setattr(retrying, "RetryPolicy", policy)
    monkeypatch.setattr(conditional_put, "_PAUSES", RetryPolicy(0.001, 5.0))
