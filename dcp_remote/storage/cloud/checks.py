"""Checks of an S3 bucket from outside its objects: configuration, network, credentials, clock, and rules of the bucket.

Requests are those of botocore, whose answers show status, headers and error code; each has a time limit of seconds.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from botocore.awsrequest import AWSRequest
from botocore.exceptions import ClientError, SSLError
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.findings import Check, Finding, SkippedError
from dcp_remote.common.helper_thread import HelperThread
from dcp_remote.common.text import format_count, human_seconds, join_some
from dcp_remote.errors import DcpRemoteError, PermissionDeniedError, TransientStorageError
from dcp_remote.storage.cloud.credentials import find_credentials
from dcp_remote.storage.cloud.diagnosis import explain_tls_failure
from dcp_remote.storage.cloud.endpoint import S3Endpoint, create_signing_client
from dcp_remote.storage.cloud.errors import CloudError, translate
from dcp_remote.storage.cloud.provider import FAILURES
from dcp_remote.storage.cloud.redaction import redact
from dcp_remote.storage.cloud.s3 import S3
from dcp_remote.storage.url import ParsedUrl

# Time limits of one name, of one address, and of one request (to connect, to read).
_NAME_SECONDS = 5.0
_ADDRESS_SECONDS = 2.0
_REQUEST_SECONDS = (3.0, 5.0)

# A server has many addresses; if these do not answer, the network is at fault.
_ADDRESSES_MAX = 3

# S3 refuses requests that are signed at a time 15 minutes from its own.
_SKEW_SECONDS_MAX = 900.0
_SKEW_SECONDS_WARN = 60.0

# Sources of credentials by botocore's names, where these are not plain.
_SOURCES = {"explicit": "the options", "env": "the environment (AWS_ACCESS_KEY_ID)"}

_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


class S3Checks:
    """Checks of a bucket and prefix, which share what they have found. Nothing is written."""

    def __init__(self, parsed: ParsedUrl, options: Mapping[str, object]) -> None:
        """Check the options; nothing is sent."""
        self._provider = S3.parse(parsed.bucket, options)
        self._options = self._provider.options
        self._bucket = parsed.bucket
        self._prefix = parsed.prefix
        self._addresses: list[Any] = []
        self._date = ""  # of an answer of the server; empty if it sent none
        self._asked_seconds = (0.0, 0.0)  # when the request for it was sent and answered, by this machine's clock
        self._diagnosis: CloudError | None = None
        self._client: Any = None  # of botocore, once it is used
        self._rules: Sequence[Mapping[str, Any]] | None = None  # of lifecycle, for this prefix; None if unread

    def checks(self) -> Sequence[Check]:
        """Return the checks, in their order."""
        network = "Check the endpoint, the network and the proxy."
        listed = (
            Check("endpoint", self._check_endpoint, "Correct the configuration.", is_needed=True),
            Check("proxy", self._check_proxy),
            Check("name", self._check_name, network, is_needed=True),
            Check("connection", self._check_connection, network, is_needed=True),
            Check("answer", self._check_answer, network, is_needed=True),
            Check("clock", self._check_clock),
            Check("credentials", self._check_credentials, "Give keys or a profile of this store.", is_needed=True),
            Check("bucket", self._check_bucket, "Correct the URL, the endpoint or the region.", is_needed=True),
            Check("lifecycle", self._check_lifecycle),
            Check("versions", self._check_versions),
            Check("object lock", self._check_object_lock),
            Check("unfinished uploads", self._check_uploads),
        )
        return tuple(replace(check, examine=self._translating(check.examine)) for check in listed)

    def _translating(self, examine: Callable[[], Finding]) -> Callable[[], Finding]:
        def examine_and_translate() -> Finding:
            try:
                return examine()
            except (DcpRemoteError, SkippedError):  # before the others: some are OSErrors and ValueErrors as well
                raise
            except FAILURES as error:
                secrets = self._provider.secrets()
                raise translate(error, verb="open", url=self._bucket, secrets=secrets) from None

        return examine_and_translate

    @property
    def _endpoint(self) -> S3Endpoint:
        return self._provider.endpoint()

    @property
    def _profile(self) -> str:
        return f"the profile {self._endpoint.session.profile or 'default'}"

    # ---- configuration

    def _check_endpoint(self) -> Finding:
        url, region_name = self._endpoint.endpoint_url, self._endpoint.region_name
        is_profiles = ".amazonaws." not in (urlsplit(url).hostname or "")
        source = self._find_source(
            self._options.endpoint_url, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", is_profiles=is_profiles
        )
        is_profiles = "region" in self._endpoint.session.get_scoped_config()
        region_source = self._find_source(self._options.region_name, "AWS_DEFAULT_REGION", is_profiles=is_profiles)
        return Finding("ok", f"{url}, from {source}; region {region_name}, from {region_source}")

    def _find_source(self, given: str | None, *variables: str, is_profiles: bool) -> str:
        if given is not None:
            return "the options"
        default = self._profile if is_profiles else "the default"
        return next((f"the environment ({name})" for name in variables if os.environ.get(name)), default)

    def _check_proxy(self) -> Finding:
        if not self._endpoint.has_proxy:
            return Finding("ok", "none for this endpoint")
        return Finding(
            "warn",
            f"requests go through {redact(self._proxy_url(), ())}, from the environment",
            "If the endpoint can be reached without a proxy, add its host to NO_PROXY: reads then take less CPU.",
        )

    def _proxy_url(self) -> str:
        proxies = getproxies()
        return proxies.get(urlsplit(self._endpoint.endpoint_url).scheme) or proxies.get("all", "")

    # ---- network

    def _check_name(self) -> Finding:
        target = urlsplit(self._proxy_url() if self._endpoint.has_proxy else self._endpoint.endpoint_url)
        host = target.hostname or ""
        port = target.port or (443 if target.scheme == "https" else 80)
        deadline = Deadline(_NAME_SECONDS)

        def look() -> None:
            if deadline.expired():
                raise TransientStorageError("The name was not resolved in time.", cause=host)

        helper = HelperThread("dcp_remote-name")  # the resolver has no time limit of its own
        try:
            found = helper.run(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), look)
        except socket.gaierror as error:
            return Finding(
                "fail", f"{host} is unknown ({error.strerror})", "Correct the host of the endpoint, or the DNS."
            )
        finally:
            helper.close()
        self._addresses = [address for *_, address in found][:_ADDRESSES_MAX]
        return Finding("ok", f"{host} is {join_some([address[0] for address in self._addresses])}")

    def _check_connection(self) -> Finding:
        reasons = []
        for host, port, *_ in self._addresses:
            try:
                with socket.create_connection((host, port), timeout=_ADDRESS_SECONDS):
                    return Finding("ok", f"{host} accepts connections on port {port}")
            except OSError as error:
                reasons.append(f"{host} on port {port}: {error.strerror or error}")
        cure = "Check the port of the endpoint, that its server runs, and that no firewall is in between."
        return Finding("fail", f"no connection to {join_some(reasons)}", cure)

    def _check_answer(self) -> Finding:
        """Send a HEAD without credentials to the endpoint, and keep the time in its answer."""
        url = self._endpoint.endpoint_url
        # `Any`: as in `diagnose_s3`.
        verify: Any = True if self._endpoint.verify is None else self._endpoint.verify
        timeout: Any = _REQUEST_SECONDS
        session = URLLib3Session(verify=verify, proxies=get_environ_proxies(url), timeout=timeout)
        began_seconds = time.time()
        try:
            answer = session.send(AWSRequest("HEAD", f"{url}/").prepare())
        except SSLError as error:
            raise explain_tls_failure(error, self._endpoint) from None
        finally:
            session.close()
        self._date, self._asked_seconds = answer.headers.get("Date") or "", (began_seconds, time.time())
        trust = "the certificate is not verified" if verify is False else "the certificate is trusted"
        return Finding("ok", f"the server answers; {trust if url.startswith('https:') else 'plain http, without TLS'}")

    def _check_clock(self) -> Finding:
        try:
            server_seconds = parsedate_to_datetime(self._date).timestamp()
        except ValueError:
            raise SkippedError("the server sends no time") from None
        began, ended = self._asked_seconds
        # The header has whole seconds, and was written between the request and its answer.
        ahead, behind = began - server_seconds - 1, server_seconds - ended
        seconds = max(ahead, behind, 0.0)
        if seconds <= _SKEW_SECONDS_WARN:
            return Finding("ok", "this machine and the server agree on the time")
        fact = f"this machine is {human_seconds(seconds)} {'ahead of' if ahead > behind else 'behind'} the server"
        if seconds > _SKEW_SECONDS_MAX:
            return Finding("fail", f"{fact}, which then refuses all requests", "Set the clock of this machine (NTP).")
        return Finding("warn", fact, "Set the clock of this machine (NTP): above 15 min, S3 refuses all requests.")

    # ---- credentials and bucket

    def _check_credentials(self) -> Finding:
        """Find credentials, and let the server judge them, and the bucket, by a GET of an absent object."""
        credentials = None if self._options.anon else find_credentials(self._endpoint, self._bucket)
        is_temporary = credentials is not None and credentials.get_frozen_credentials().token is not None
        self._diagnosis = self._provider.diagnose(self._prefix)
        if isinstance(self._diagnosis, PermissionDeniedError):
            raise self._diagnosis
        if isinstance(self._diagnosis, TransientStorageError):
            raise SkippedError("found, and not judged: the server did not answer")
        if credentials is None:
            return Finding("ok", "none, by the option anon")
        source = _SOURCES.get(credentials.method) or f"{credentials.method}, {self._profile}"
        fact = f"from {source}; the server accepts them"
        expiry = getattr(credentials, "_expiry_time", None)  # private; of those that botocore renews
        if isinstance(expiry, datetime):
            left_seconds = max(0.0, (expiry - datetime.now(UTC)).total_seconds())
            return Finding("ok", f"{fact}; renewed, and valid for {human_seconds(left_seconds)} now")
        if is_temporary:
            cure = "Use a role or a profile that renews them, if the training runs for longer than they are valid."
            return Finding("warn", f"{fact}; temporary, with an expiry that is not known", cure)
        return Finding("ok", fact)

    def _check_bucket(self) -> Finding:
        if self._diagnosis is not None:
            raise self._diagnosis
        return Finding("ok", f"{self._bucket} answers in {self._endpoint.region_name}")

    # ---- rules of the bucket

    def _read(self, operation: str, action: str, absent: str | None = None, **parameters: object) -> Mapping[str, Any]:
        """Read a part of the bucket's configuration; empty if the answer has the error code `absent`."""
        if self._client is None:
            connect_seconds, read_seconds = _REQUEST_SECONDS
            limits = {"connect_timeout": connect_seconds, "read_timeout": read_seconds}
            self._client = create_signing_client(
                self._endpoint, self._options, retries={"total_max_attempts": 1}, **limits
            )
        try:
            answer: Mapping[str, Any] = getattr(self._client, operation)(Bucket=self._bucket, **parameters)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code") or "without an error code"
            if code != absent:
                raise SkippedError(f"could not be read ({code}); {action} permits it") from None
            return {}
        except FAILURES as error:
            raise SkippedError(f"could not be read ({type(error).__name__})") from None
        return answer

    def _read_rules(self) -> Sequence[Mapping[str, Any]]:
        if self._rules is None:
            answer = self._read(
                "get_bucket_lifecycle_configuration", "s3:GetLifecycleConfiguration", "NoSuchLifecycleConfiguration"
            )
            rules = answer.get("Rules", ())
            self._rules = [rule for rule in rules if rule.get("Status") == "Enabled" and _covers(rule, self._prefix)]
        return self._rules

    def _check_lifecycle(self) -> Finding:
        rules = self._read_rules()
        expiring = [rule for rule in rules if {"Days", "Date"} & set(rule.get("Expiration", ()))]
        if expiring:
            cure = "Exclude this prefix from the rule: new checkpoints use old shards. Delete by `retention` instead."
            return Finding("fail", f"objects below this URL expire by {_name_rules(expiring)}", cure)
        moves = [(rule, move) for rule in rules for move in rule.get("Transitions", ())]
        if archiving := [rule for rule, move in moves if move.get("StorageClass") in _ARCHIVES]:
            cure = "Exclude this prefix from the rule: an archived shard cannot be read."
            return Finding("fail", f"objects below this URL are archived by {_name_rules(archiving)}", cure)
        return Finding("ok", "no rule lets objects below this URL expire")

    def _check_versions(self) -> Finding:
        status = self._read("get_bucket_versioning", "s3:GetBucketVersioning").get("Status")
        if status is None:
            return Finding("ok", "the bucket keeps no old versions")
        if any("NoncurrentVersionExpiration" in rule for rule in self._read_rules()):
            return Finding("ok", "the bucket keeps old versions, and a rule lets them expire")
        return Finding(
            "warn",
            "the bucket keeps old versions, and no rule lets them expire: deleted shards go on costing",
            "Add a lifecycle rule with NoncurrentVersionExpiration for this prefix.",
        )

    def _check_object_lock(self) -> Finding:
        answer = self._read(
            "get_object_lock_configuration",
            "s3:GetBucketObjectLockConfiguration",
            "ObjectLockConfigurationNotFoundError",
        )
        retention = answer.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
        if not retention:
            return Finding("ok", "no object is locked by default")
        days, years = retention.get("Days"), retention.get("Years")
        duration = format_count(days, "day") if days else format_count(years or 0, "year")
        cure = "Save to a bucket without default retention: what `retention` and gc delete is kept, and costs."
        return Finding("warn", f"each new object is locked for {duration} ({retention.get('Mode')})", cure)

    def _check_uploads(self) -> Finding:
        prefix = f"{self._prefix}/" if self._prefix else ""
        answer = self._read("list_multipart_uploads", "s3:ListBucketMultipartUploads", Prefix=prefix, MaxUploads=1000)
        count = len(answer.get("Uploads", ()))
        if not count:
            return Finding("ok", "none below this URL; dcp_remote begins none")
        if any("AbortIncompleteMultipartUpload" in rule for rule in self._read_rules()):
            return Finding("ok", f"{count} below this URL, which a rule will abort")
        cure = "Add a lifecycle rule with AbortIncompleteMultipartUpload: their parts cost, and no listing shows them."
        return Finding("warn", f"{count} of other tools below this URL, and no rule aborts them", cure)


def _covers(rule: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a lifecycle rule can apply to an object below a prefix, whose objects have no tags."""
    chosen = rule.get("Filter", {})
    chosen = {**chosen, **chosen.get("And", {})}
    if "Tag" in chosen or chosen.get("Tags"):
        return False
    root, covered = f"{prefix}/" if prefix else "", rule.get("Prefix", chosen.get("Prefix", ""))
    return root.startswith(covered) or covered.startswith(root)


def _name_rules(rules: Sequence[Mapping[str, Any]]) -> str:
    return f"the lifecycle rule {join_some([repr(rule.get('ID', '')) for rule in rules])}"
