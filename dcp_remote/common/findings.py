"""Findings of checks: what is well, what is not, and its cure. `dcp-remote doctor` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dcp_remote.errors import BucketNotFoundError, DcpRemoteError, PermissionDeniedError, TransientStorageError

# "skip": not checked, for the reason that the fact gives.
State: TypeAlias = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        state: State of what was checked.
        fact: Sentence on what was found, without secrets.
        cure: Sentence on what to do; empty unless the state is "warn" or "fail".
        name: Name of the check, which `run_checks` sets.
    """

    state: State
    fact: str
    cure: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Check that makes one finding.

    Attributes:
        name: Name in the report.
        examine: Function that makes the finding, or raises.
        cure: Cure of an error that names none.
        grant: Cure of a denied request; empty where that is not for want of a permission.
        is_needed: True if later checks make no sense once this check has failed.
    """

    name: str
    examine: Callable[[], Finding]
    cure: str = ""
    grant: str = ""
    is_needed: bool = False


class SkippedError(Exception):
    """A check could not be made; the text is the reason."""


def run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    """Make one check after another, and yield the finding of each.

    A check that fails does not end the others, unless it is needed, or the store does not answer: these are skipped.
    """
    blocked_by = ""
    for check in checks:
        if blocked_by:
            yield Finding("skip", f"not checked, since {blocked_by} failed", name=check.name)
            continue
        is_blocking = check.is_needed
        try:
            finding = check.examine()
        except SkippedError as reason:
            finding = Finding("skip", str(reason))
        except (DcpRemoteError, OSError) as error:
            finding = explain_error(error, check.cure, check.grant)
            is_blocking |= isinstance(error, TransientStorageError | BucketNotFoundError)
        yield replace(finding, name=check.name)
        if finding.state == "fail" and is_blocking:
            blocked_by = check.name


def explain_error(
    error: DcpRemoteError | OSError, cure: str = "", grant: str = "", *, state: State = "fail"
) -> Finding:
    """Return the finding for an error, whose message says what happened and most often what to do (see `Check`)."""
    if not isinstance(error, DcpRemoteError):
        return Finding(state, str(error), cure)
    what, _, advice = error.what.rstrip(".").partition(". ")
    if not advice and not isinstance(error, TransientStorageError):
        what, _, advice = what.partition(": ")
    if grant and isinstance(error, PermissionDeniedError):
        advice = grant
    reason = error.details.get("code") or error.details.get("cause")
    advice = advice or cure or "Try again later, or ask those who run the store"
    return Finding(state, f"{what} ({reason})" if reason else what, f"{advice[:1].upper()}{advice[1:].rstrip('.')}.")
