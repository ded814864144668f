"""Checks of an S3 bucket from outside its objects: configuration, network, credentials, clock, and rules of the bucket.

Requests are those of botocore, whose answers show status, headers and error code; each has a time limit of seconds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from botocore.credentials import RefreshableCredentials
from botocore.exceptions import ClientError

from dcp_remote.common.text import format_count, human_seconds, join_some
from dcp_remote.errors import BucketNotFoundError, DcpRemoteError, PermissionDeniedError, StorageError
from dcp_remote.storage.checks import Check, Finding, State
from dcp_remote.storage.cloud.credentials import find_credentials
from dcp_remote.storage.cloud.diagnosis import (
    CONNECT_SECONDS,
    PROBE_KEY,
    READ_SECONDS,
    diagnose_answer,
    send_by_botocore,
)
from dcp_remote.storage.cloud.endpoint import create_client
from dcp_remote.storage.cloud.errors import FAILURES, CloudError, translate
from dcp_remote.storage.cloud.s3 import S3
from dcp_remote.storage.url import ParsedUrl

# Differences of clocks: above which there is a warning, and from which on S3 refuses requests.
_SKEW_SECONDS_MAX = 60.0
_REFUSED_SKEW_SECONDS = 15 * 60.0

# Sources of credentials by botocore's names, where these are not plain.
_SOURCES = {"explicit": "the options", "env": "the environment"}

_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


class S3Checks:
    """Checks of a bucket and prefix. Nothing is written."""

    def __init__(self, parsed: ParsedUrl, options: Mapping[str, object]) -> None:
        """Check the options; nothing is sent."""
        self._provider = S3.parse(parsed.bucket, options)
        self._bucket = parsed.bucket
        self._prefix = parsed.prefix
        self._ahead_seconds: float | None = None  # of this machine's clock to the server's; None if that is unknown

    def checks(self) -> Sequence[Check]:
        """Return the checks, in their order. The first raises `InvalidArgumentError` for a wrong configuration."""
        listed = (
            Check("proxy", self._check_proxy),
            Check("endpoint", self._check_endpoint, is_needed=True),
            Check("clock", self._check_clock),
            Check("credentials", self._check_credentials, is_needed=True),
            Check("bucket", self._check_bucket, is_needed=True),
            Check("lifecycle", self._check_lifecycle, failure="warn"),
            Check("versions", self._check_versions, failure="warn"),
            Check("object lock", self._check_object_lock, failure="warn"),
        )
        return [check._replace(examine=partial(self._translate, check.examine)) for check in listed]

    def _translate(self, examine: Callable[[], Finding]) -> Finding:
        try:
            return examine()
        except DcpRemoteError:  # before the others: some are OSErrors and ValueErrors as well
            raise
        except FAILURES as error:
            raise translate(error, verb="open", url=self._bucket, secrets=self._provider.secrets()) from None

    # ---- the way to the bucket

    def _check_proxy(self) -> Finding:
        endpoint = self._provider.endpoint()
        if not endpoint.has_proxy:
            return Finding("ok", "none for this endpoint")
        proxies = getproxies()
        url = proxies.get(urlsplit(endpoint.endpoint_url).scheme) or proxies.get("all") or ""
        host = url.rpartition("@")[2]  # without user and password
        cure = "If the endpoint can be reached without a proxy, add its host to NO_PROXY: reads then take less CPU."
        return Finding("warn", f"requests go through the proxy {host}, from the environment", cure)

    def _check_endpoint(self) -> Finding:
        """Connect to the endpoint, then send it a HEAD without credentials, and note the time in the answer."""
        endpoint = self._provider.endpoint()
        parsed = urlsplit(endpoint.endpoint_url)
        if not endpoint.has_proxy:
            host, port = parsed.hostname or "", parsed.port or (443 if parsed.scheme == "https" else 80)
            try:
                socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            except OSError as error:  # of the name, or of the last address
                cure = "Correct the endpoint; check that its server runs, and that no firewall is in between."
                return Finding("fail", f"no connection to {host}, port {port} ({error.strerror or error})", cure)
        began_seconds = time.time()
        answer = send_by_botocore("HEAD", f"{endpoint.endpoint_url}/", endpoint)
        with suppress(ValueError):  # the server sends no time
            server_seconds = parsedate_to_datetime(answer.headers.get("Date") or "").timestamp()
            self._ahead_seconds = (began_seconds + time.time()) / 2 - server_seconds
        return Finding("ok", f"{endpoint.endpoint_url} answers")

    def _check_clock(self) -> Finding:
        if self._ahead_seconds is None:
            return Finding("skip", "the server sends no time")
        skew_seconds = abs(self._ahead_seconds)
        if skew_seconds <= _SKEW_SECONDS_MAX:
            return Finding("ok", "this machine and the server agree on the time")
        side = "ahead of" if self._ahead_seconds > 0 else "behind"
        fact = f"this machine is {human_seconds(skew_seconds)} {side} the server"
        # An unsigned request has no time.
        is_refused = skew_seconds >= _REFUSED_SKEW_SECONDS and not self._provider.options.anon
        state: State = "fail" if is_refused else "warn"
        return Finding(state, fact, "Set the clock of this machine (NTP): from 15 min on, S3 refuses all requests.")

    def _check_credentials(self) -> Finding:
        """Find credentials, and let the server judge them by a GET of an absent object."""
        if self._provider.options.anon:
            return Finding("ok", "none, by the option anon")
        credentials = find_credentials(self._provider.endpoint(), self._bucket)
        if isinstance(self._diagnosis, PermissionDeniedError):
            raise self._diagnosis
        source = f"from {_SOURCES.get(credentials.method, credentials.method)}"
        if credentials.get_frozen_credentials().token and not isinstance(credentials, RefreshableCredentials):
            cure = "Use a role or a profile that renews them, if the training runs for longer than they are valid."
            return Finding("warn", f"{source}; temporary, with an expiry that is not known", cure)
        return Finding("ok", source)

    @cached_property
    def _diagnosis(self) -> CloudError | None:
        """What the answer to a signed URL shows, or to signed headers: some servers judge only these. Two GETs."""
        if found := self._provider.diagnose(self._prefix):
            return found
        try:
            self._create_client().get_object(Bucket=self._bucket, Key=f"{self._prefix}/{PROBE_KEY}".lstrip("/"))
        except ClientError as error:
            return self._explain(error)
        return None

    def _explain(self, error: ClientError) -> CloudError | None:
        status, code = error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"].get("Code", "")
        return diagnose_answer(status, code, None, endpoint=self._provider.endpoint(), bucket=self._bucket)

    def _create_client(self) -> Any:
        return create_client(
            self._provider.endpoint().session,
            self._provider.options,
            retries={"total_max_attempts": 1},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            response_checksum_validation="when_required",  # as objects are read
        )

    def _check_bucket(self) -> Finding:
        if self._diagnosis is not None:
            raise self._diagnosis
        return Finding("ok", f"{self._bucket} answers in {self._provider.endpoint().region_name}")

    # ---- rules of the bucket

    def _read(self, operation: str, action: str, absent: str = "") -> Mapping[str, Any]:
        """Read a part of the bucket's configuration; empty if the answer has the error code `absent`."""
        try:
            answer: Mapping[str, Any] = getattr(self._create_client(), operation)(Bucket=self._bucket)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code") or "no error code"
            if code == absent:
                return {}
            found = self._explain(error)
            if isinstance(found, PermissionDeniedError | BucketNotFoundError):  # which no grant cures
                raise found from None
            is_absent = code in ("NotImplemented", "MethodNotAllowed")
            cure = "This server has no such setting" if is_absent else f"Grant {action} to see it"
            raise StorageError(f"could not be read. {cure}; a training does not need it.", code=code) from None
        return answer

    def _read_rules(self) -> Sequence[Mapping[str, Any]]:
        answer = self._read(
            "get_bucket_lifecycle_configuration", "s3:GetLifecycleConfiguration", "NoSuchLifecycleConfiguration"
        )
        rules = answer.get("Rules", ())
        return [rule for rule in rules if rule.get("Status") == "Enabled" and _covers(rule, self._prefix)]

    def _check_lifecycle(self) -> Finding:
        harmful = [rule for rule in self._read_rules() if _takes_objects(rule)]
        if not harmful:
            return Finding("ok", "no lifecycle rule deletes or archives objects below this URL")
        names = join_some([repr(rule.get("ID", "")) for rule in harmful])
        cure = "Exclude this prefix from the rule: new checkpoints use old shards. Delete by `retention` instead."
        return Finding("fail", f"objects below this URL are deleted or archived by the lifecycle rule {names}", cure)

    def _check_versions(self) -> Finding:
        if not self._read("get_bucket_versioning", "s3:GetBucketVersioning").get("Status"):
            return Finding("ok", "the bucket keeps no old versions")
        if any("NoncurrentVersionExpiration" in rule for rule in self._read_rules()):
            return Finding("ok", "the bucket keeps old versions, and a rule lets them expire")
        fact = "the bucket keeps old versions, and no rule lets them expire: deleted shards go on costing"
        return Finding("warn", fact, "Add a lifecycle rule with NoncurrentVersionExpiration for this prefix.")

    def _check_object_lock(self) -> Finding:
        action, absent = "s3:GetBucketObjectLockConfiguration", "ObjectLockConfigurationNotFoundError"
        answer = self._read("get_object_lock_configuration", action, absent)
        retention = answer.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
        if not retention:
            return Finding("ok", "no object is locked by default")
        days, years = retention.get("Days"), retention.get("Years")
        duration = format_count(days, "day") if days else format_count(years or 0, "year")
        cure = "Save to a bucket without default retention: what `retention` and gc delete is kept, and costs."
        return Finding("warn", f"each new object is locked for {duration} ({retention.get('Mode')})", cure)


def _takes_objects(rule: Mapping[str, Any]) -> bool:
    """Return whether a lifecycle rule deletes objects, or moves them to where they cannot be read."""
    is_expiring = "Days" in rule.get("Expiration", ()) or "Date" in rule.get("Expiration", ())
    return is_expiring or any(move.get("StorageClass") in _ARCHIVES for move in rule.get("Transitions", ()))


def _covers(rule: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a lifecycle rule can apply to an object below a prefix, whose objects have no tags."""
    chosen = rule.get("Filter", {})
    chosen = {**chosen, **chosen.get("And", {})}
    if "Tag" in chosen or chosen.get("Tags"):
        return False
    root, covered = f"{prefix}/" if prefix else "", rule.get("Prefix", chosen.get("Prefix", ""))
    return root.startswith(covered) or covered.startswith(root)
