"""`dcp-remote doctor`: checks before a training writes to a store, each by itself and each with its cure."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dcp_remote.cli.arguments import StorageOptions, Url, name_options
from dcp_remote.cli.output import Output, complain
from dcp_remote.common.provenance import software_versions
from dcp_remote.common.text import join_some
from dcp_remote.storage import open_store
from dcp_remote.storage.checks import MEASURED, Check, Finding, StoreChecks, check_machine, run_checks
from dcp_remote.storage.cloud.redaction import redact
from dcp_remote.storage.url import Scheme, parse_url

_NAME_CHARACTERS = 18

# What a training can write to, by scheme: a path whose `s3://` was forgotten is seen as a folder.
_KINDS = {
    "s3": "this bucket",
    "gs": "this bucket",
    "az": "this container",
    "file": "this folder of this machine (with several hosts: only if it is a shared file system)",
    "memory": "the memory of this process",
}

# Checks whose facts must be those of all ranks, and the cure of ranks that differ.
_ALIKE = {
    "software": "Install the same versions on all hosts of the job.",
    "endpoint": "Set one endpoint on all hosts: other ranks do not see what is written to another store.",
}


def doctor(out: Output, url: Url, *, storage_options: StorageOptions = None) -> bool:
    """Check what a training needs before it writes here.

    Prints a line for each check of machine, network, credentials, permissions, behaviour and rules of the bucket, and a
    cure for each that fails. Sends about 25 requests, and 8 MiB in each direction. Objects are deleted at the end, also
    after Ctrl-C. Shows no secret. The exit code is 1 if a check has failed; a server that does not answer is reported
    within half a minute. Under torchrun (--no-python dcp-remote doctor URL) each rank makes all checks, and connects to
    other ranks; rank 0 prints one report.
    """
    parsed = parse_url(url)
    probes = StoreChecks(open_store(url, storage_options), parsed)
    checks = [*check_machine()]
    if parsed.scheme == "s3":
        # Imported here, so that a local folder needs no cloud client.
        from dcp_remote.storage.cloud.checks import S3Checks

        checks += S3Checks(parsed, storage_options or {}).checks()
    checks += probes.checks()
    # Not by RANK and WORLD_SIZE alone: in a pod of Kubeflow's they are set, and the store is that of a training.
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _check_ranks(out, probes, checks, parsed.scheme)

    out.say(f"{probes.url}: objects below this URL are written, read and deleted")
    try:
        found = _say_rows(out, _make_rows(checks))
    finally:
        probes.clean()
    return _end(out, found, parsed.scheme)


def _check_ranks(out: Output, probes: StoreChecks, checks: Sequence[Check], scheme: Scheme) -> bool:
    """Make the checks on this rank, and on rank 0 print those of all; return whether the exit code tells a failure."""
    signal.signal(signal.SIGTERM, _end_by_torchrun)
    # Imported here, since it imports torch.
    from dcp_remote.manager.rank_checks import exchange_reports

    versions = ", ".join(f"{name} {number}" for name, number in software_versions().items())
    # First, since a check that blocks those behind it says nothing of the software.
    own = [Check("software", lambda: Finding("ok", versions)), *checks]
    rank, host, reports = int(os.environ["RANK"]), socket.gethostname(), list[dict[str, Any]]()

    def exchange() -> Finding:
        reports[:] = exchange_reports(reports[0])
        return Finding("ok", f"all {len(reports)} ranks have come")

    try:
        reports.append({"host": host, "checks": [*_make_rows(own)]})
        found = [*_make_rows([Check("ranks", exchange)])]
    finally:
        probes.clean()  # not before: it removes new folders, in which other ranks may still write
    if rank == 0:  # torchrun ends it once another rank of its host has failed
        return _end(out, _say_rows(out, [*found, *merge_reports(reports, int(os.environ["WORLD_SIZE"]))]), scheme)
    shown = [{**row, "ranks": [rank], "hosts": [host]} for row in found if row["state"] != "ok"]
    return bool(_say_rows(out, shown)) and os.environ.get("GROUP_RANK", "0") != "0"


def _end_by_torchrun(number: int, _: object) -> None:
    complain(f"dcp-remote: rank {os.environ['RANK']} was ended by SIGTERM, as torchrun does once another rank failed")
    raise SystemExit(128 + number)


def merge_reports(reports: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return the rows of all ranks' reports, equal ones as one; `ranks` and `hosts` tell whose, if not those of all.

    Measured values of a check that went well differ everywhere: those of the first rank stand for all. Ranks of
    different software or with different endpoints get a warning.
    """
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank, report in enumerate(reports):
        for row in report["checks"]:
            is_measured = row["state"] == "ok" and row["name"] in MEASURED
            key = (row["name"], row["state"], "" if is_measured else row["fact"], row["cure"])
            one = merged.setdefault(key, {**row, "ranks": [], "hosts": []})
            one["ranks"].append(rank)
            one["hosts"] = list(dict.fromkeys([*one["hosts"], report["host"]]))
    for name, cure in _ALIKE.items():
        rows = [row for row in merged.values() if (row["name"], row["state"]) == (name, "ok")]
        if len(rows) > 1:
            for row in rows:
                row |= {"state": "warn", "cure": cure}
    for row in merged.values():
        if len(row["ranks"]) == world_size:
            del row["ranks"], row["hosts"]
    names = list(dict.fromkeys(name for name, *_ in merged))
    return sorted(merged.values(), key=lambda row: names.index(row["name"]))


def _make_rows(checks: Sequence[Check]) -> Iterator[dict[str, Any]]:
    """Make one check after another, and yield its row of the report."""
    for name, finding in run_checks(checks):
        # Errors name Python's arguments, and quote what a user or a server wrote.
        fact, cure = (redact(name_options(text, doctor), ()) for text in (finding.fact, finding.cure))
        yield {"name": name, "state": finding.state, "fact": fact, "cure": cure}


def _say_rows(out: Output, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print a line for each row as it comes, then one for all checks skipped for one reason; return the rows."""
    found, skipped = list[dict[str, Any]](), dict[object, list[dict[str, Any]]]()
    for row in rows:
        found.append(row)
        if row["state"] == "skip":
            skipped.setdefault((row["fact"], str(row.get("ranks"))), []).append(row)
        else:
            out.say(_format_row(row))
    for same in skipped.values():
        names = f"{same[0]['fact']}: {', '.join(row['name'] for row in same)}"
        out.say(_format_row(same[0] | ({"name": f"{len(same)} checks", "fact": names} if len(same) > 1 else {})))
    return found


def _format_row(row: Mapping[str, Any]) -> str:
    ranks = f"rank {join_some(row['ranks'])} ({join_some(row['hosts'])}): " if "ranks" in row else ""
    cure = f". {row['cure']}" if row["cure"] else ""
    return f"{row['state']:<4}  {row['name']:<{_NAME_CHARACTERS}}  {ranks}{row['fact']}{cure}"


def _end(out: Output, found: Sequence[Mapping[str, Any]], scheme: Scheme) -> bool:
    """Print the end of the report, and return whether a check has failed."""
    failed = [row for row in found if row["state"] == "fail"]
    verdict = f"no check failed: a training can write to {_KINDS[scheme]}"
    out.say(f"{len(failed)} of {len(found)} checks failed" if failed else verdict)
    out.give({"dcp_remote": software_versions()["dcp_remote"], "checks": found})
    return bool(failed)
