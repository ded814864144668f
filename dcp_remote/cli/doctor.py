"""`dcp-remote doctor`: checks before a training writes to a store, each by itself and each with its cure."""

from __future__ import annotations

from dcp_remote.cli.arguments import StorageOptions, Url, name_options
from dcp_remote.cli.output import Output
from dcp_remote.common.provenance import software_versions
from dcp_remote.storage import open_store
from dcp_remote.storage.checks import Check, StoreChecks, run_checks
from dcp_remote.storage.cloud.redaction import redact
from dcp_remote.storage.limits import take_limits
from dcp_remote.storage.url import parse_url

_NAME_CHARACTERS = 18


def doctor(out: Output, url: Url, *, storage_options: StorageOptions = None) -> bool:
    """Check what a training needs before it writes here.

    Prints a line for each check of network, credentials, permissions, behaviour and rules of the bucket, and a cure for
    each that fails. Sends about 25 requests, and 8 MiB in each direction. Objects are deleted at the end, also after
    Ctrl-C. Shows no secret. The exit code is 1 if a check has failed; a server that does not answer is reported within
    half a minute.
    """
    parsed = parse_url(url)
    probes = StoreChecks(open_store(url, storage_options), parsed)
    checks: list[Check] = []
    if parsed.scheme == "s3":
        # Imported here, so that a local folder needs no cloud client.
        from dcp_remote.storage.cloud.checks import S3Checks

        checks += S3Checks(parsed, take_limits(storage_options or {})[1]).checks()
    checks += probes.checks()

    out.say(f"{probes.url}: objects below this URL are written, read and deleted")
    found: list[dict[str, object]] = []
    failed = 0
    try:
        for name, finding in run_checks(checks):
            # Errors name Python's arguments, and quote what a user or a server wrote.
            fact, cure = (redact(name_options(text, doctor), ()) for text in (finding.fact, finding.cure))
            found.append({"name": name, "state": finding.state, "fact": fact, "cure": cure})
            failed += finding.state == "fail"
            out.say(f"{finding.state:<4}  {name:<{_NAME_CHARACTERS}}  {fact}{f'. {cure}' if cure else ''}")
    finally:
        probes.clean()
    out.say(f"{failed} of {len(found)} checks failed" if failed else "no check failed: a training can write here")
    out.give({"dcp_remote": software_versions()["dcp_remote"], "checks": found})
    return failed > 0
