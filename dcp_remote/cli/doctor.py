"""`dcp-remote doctor`: checks before a training writes to a store, each by itself and each with its cure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from importlib.metadata import version

from dcp_remote.cli.arguments import StorageOptions, Url, name_options
from dcp_remote.cli.output import Output
from dcp_remote.common.findings import Check, Finding, explain_error, run_checks
from dcp_remote.common.machine import machine_checks
from dcp_remote.common.text import format_count
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.checks import FolderChecks, StoreChecks
from dcp_remote.storage.cloud.redaction import redact
from dcp_remote.storage.limits import take_limits
from dcp_remote.storage.url import parse_url

_LABELS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}
_NAME_CHARACTERS = 18


def doctor(out: Output, url: Url, *, storage_options: StorageOptions = None) -> bool:
    """Check what a training needs before it writes here.

    Prints a line for each check of configuration, network, credentials, permissions, rules of the bucket and this
    machine, and a cure for each that fails. Sends about 30 requests, and 8 MiB in each direction, below a fresh prefix,
    whose objects are deleted at the end, also after Ctrl-C. Reports no secret. The exit code is 1 if a check has
    failed; a server that does not answer is reported within seconds.
    """
    findings: list[Finding] = []
    with closing(_examine(url, storage_options or {})) as examined:  # so that its objects are deleted in any case
        for finding in examined:
            # Errors name Python's arguments, and quote what a user or a server wrote.
            fact, cure = (redact(name_options(text, doctor), ()) for text in (finding.fact, finding.cure))
            findings.append(replace(finding, fact=fact, cure=cure))
            if finding.state != "skip":
                label = f"{_LABELS[finding.state]:<4}  {finding.name:<{_NAME_CHARACTERS}}"
                out.say(f"{label}  {fact}. {cure}" if cure else f"{label}  {fact}")
    skipped = [finding for finding in findings if finding.state == "skip"]
    for fact in dict.fromkeys(finding.fact for finding in skipped):
        out.say(f"skip  {', '.join(finding.name for finding in skipped if finding.fact == fact)}: {fact}")
    counts = Counter(finding.state for finding in findings)
    failed, warned = counts["fail"], counts["warn"]
    out.say("", f"{failed} failed, {format_count(warned, 'warning')}, {counts['ok']} ok, {counts['skip']} not checked")
    out.give(
        {
            "dcp_remote": version("dcp-remote"),
            "failed": failed,
            "warnings": warned,
            "checks": [asdict(finding) for finding in findings],
        }
    )
    return failed > 0


def _examine(url: str, options: Mapping[str, object]) -> Generator[Finding, None, None]:
    try:
        store = open_store(url, options)
    except InvalidArgumentError as error:
        yield replace(explain_error(error, "Correct the call."), name="url")
        yield Finding("skip", "not checked, since url failed", name="store")
    else:
        yield Finding("ok", store.url, name="url")
        yield from _examine_store(store, url, options)
    yield from run_checks(machine_checks())


def _examine_store(store: ObjectStore, url: str, options: Mapping[str, object]) -> Generator[Finding, None, None]:
    parsed = parse_url(url)
    probes = StoreChecks(store, parsed.scheme)
    checks: list[Check] = []
    with ExitStack() as cleaning:
        if parsed.scheme == "s3":
            # Imported here, so that a local folder needs no cloud client.
            from dcp_remote.storage.cloud.checks import S3Checks

            checks += S3Checks(parsed, take_limits(options)[1]).checks()
        elif parsed.scheme == "file":
            folder = FolderChecks(parsed.path)
            cleaning.callback(folder.clean)
            checks += folder.checks()
        cleaning.callback(probes.clean)
        yield from run_checks([*checks, *probes.checks()])
