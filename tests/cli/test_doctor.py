"""Tests of `dcp-remote doctor` through its command line: each cause is named, nothing is left, no secret is shown."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from dcp_remote.cli import main
from dcp_remote.cli.doctor import merge_reports
from dcp_remote.errors import BucketNotFoundError, PermissionDeniedError
from dcp_remote.storage import Buffer, Content, MemoryStore, ObjectStore, Version, open_store
from dcp_remote.storage.base import Condition
from dcp_remote.storage.checks import Check, Finding, StoreChecks, check_machine, run_checks
from dcp_remote.storage.cloud.checks import S3Checks
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.servers import S3Server
from dcp_remote.testing.wrappers import Fault, FaultyStore, RecordingStore
from tests.support.command_line import CommandLine
from tests.support.ports import reserved_port
from tests.support.schemas import require_schema
from tests.support.scripted_server import Handler, HttpAnswer, HttpRequest, scripted_server

SECRETS = ("AKIARECOGNIZABLE", "secret/of+the=tests", "token/of+the=tests", "user-of-proxy", "password-of-proxy")
RULES = ["lifecycle", "versions", "object lock"]
STORE = ["put", "get", "list", "conditional writes", "speed", "delete"]
MACHINE = ["open files", "temporary folder", "shared memory"]


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Take the user's configuration of AWS away, the request for credentials of an instance, and this machine."""
    machine = [Check(name, lambda: Finding("ok", "enough")) for name in MACHINE]
    monkeypatch.setattr("dcp_remote.cli.doctor.check_machine", lambda: machine)
    nowhere = tmp_path_factory.mktemp("configuration")
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(nowhere / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nowhere / "credentials"))


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(f"doctor-{os.urandom(4).hex()}")


class Report:
    """Document of a report, by the names of its checks."""

    def __init__(self, text: str) -> None:
        document = json.loads(text)
        require_schema("doctor", document)
        assert all(bool(check["cure"]) == (check["state"] in ("warn", "fail")) for check in document["checks"])
        self.checks: dict[str, dict[str, str]] = {check["name"]: check for check in document["checks"]}

    def named(self, state: str) -> list[str]:
        return [name for name, check in self.checks.items() if check["state"] == state]

    def shown(self, name: str) -> str:
        """Return state, fact and cure of a check."""
        check = self.checks[name]
        return f"{check['state']} {check['fact']}. {check['cure']}"


Examine = Callable[..., Report]


@pytest.fixture
def examine(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Return a function that examines a URL, or a store at its place."""

    def run(url: object, *options: str, code: int = 0, store: ObjectStore | None = None) -> Report:
        if store is not None:
            monkeypatch.setattr("dcp_remote.cli.doctor.open_store", lambda url, options: store)
        return Report(cli.run("doctor", url, *options, "--json", code=code).out)

    return run


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a bucket on the server, which the environment names."""
    name = f"doctor-{os.urandom(4).hex()}"
    s3_server.create_bucket(name)
    for variable, value in (("ENDPOINT_URL", s3_server.endpoint_url), ("ACCESS_KEY_ID", SECRETS[0])):
        monkeypatch.setenv(f"AWS_{variable}", value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
    return name


def examine_server(examine: Examine, answer: Callable[[HttpRequest], HttpAnswer]) -> Report:
    with scripted_server(answer) as server:
        return examine("s3://bucket/run", "--endpoint-url", server.endpoint_url, code=1)


def refusal(code: str, echo: str = "") -> HttpAnswer:
    text = f"<Error><Code>{code}</Code><Message>Refused: {echo}</Message></Error>"
    return HttpAnswer(status=403, body=text.encode(), headers={"Content-Type": "application/xml"})


def client_of(server: S3Server) -> Any:
    return boto3.client("s3", **server.storage_options)  # type: ignore[call-overload]  # by boto3's own names


def put_rule(server: S3Server, bucket: str, rule: dict[str, Any]) -> None:
    client_of(server).put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})


def keys_of(bucket: str) -> list[str]:
    return [info.key for info in open_store(f"s3://{bucket}").list()]


# ---- healthy stores


def test_a_healthy_folder(cli: CommandLine, examine: Examine, tmp_path: Path) -> None:
    """Examine a folder that does not exist: a line for each check; no folder is left."""
    report = examine(tmp_path / "new" / "run")
    assert report.named("ok") == list(report.checks) == [*MACHINE, *STORE]
    assert list(tmp_path.iterdir()) == []
    lines = cli.run("doctor", tmp_path / "new" / "run").lines
    assert lines[0].startswith(f"file://{tmp_path}/new/run/dcp-remote-probes/doctor-")
    assert lines[4] == "ok    put                 an object was written"
    kind = "this folder of this machine (with several hosts: only if it is a shared file system)"
    assert lines[-1] == f"no check failed: a training can write to {kind}"


def test_a_healthy_bucket(cli: CommandLine, examine: Examine, bucket: str, s3_server: S3Server) -> None:
    """Examine a bucket of moto: all is well, and no object is left."""
    report = examine(f"s3://{bucket}/run", "--region", "us-east-1")
    assert report.named("ok") == list(report.checks)
    assert report.shown("endpoint") == f"ok {s3_server.endpoint_url} answers. "
    assert report.shown("credentials") == "ok from the environment. "
    assert report.shown("bucket") == f"ok {bucket} answers in us-east-1. "
    assert cli.run("doctor", f"s3://{bucket}/run").lines[-1] == "no check failed: a training can write to this bucket"
    assert keys_of(bucket) == []


def test_cost(examine: Examine, memory: MemoryStore) -> None:
    """Count requests and bytes: as the documentation says."""
    recording = RecordingStore(memory)
    examine("memory://doctor", store=recording)
    assert recording.count() <= 20
    assert 2 * 8 * 2**20 <= recording.size_bytes() < 2 * 8 * 2**20 + 20_000
    assert list(memory.list()) == []


# ---- permissions, and what a store does wrong


def denying(store: ObjectStore, denied: str, code: str = "AccessDenied") -> ObjectStore:
    def deny() -> PermissionDeniedError:
        return PermissionDeniedError("The store refused the request.", code=code)

    return FaultyStore(store, [Fault(lambda verb, *_: verb == denied, "request", persistent=True, error=deny)])


@pytest.mark.parametrize("verb", ["put", "get", "list", "delete"])
def test_each_permission_is_examined_by_itself(
    examine: Examine, memory: MemoryStore, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Deny one verb: its check alone names its permission; DELETE is a warning, and says what stays."""
    report = examine("memory://doctor", store=denying(memory, verb), code=int(verb != "delete"))
    assert [*report.named("fail"), *report.named("warn")] == [verb]
    assert "(AccessDenied). Grant it: " in report.shown(verb)
    assert report.named("skip") == {"put": ["conditional writes", "speed"], "get": ["speed"]}.get(verb, [])
    assert ("none could be written" in report.shown("delete")) == (verb == "put")
    left = {"object", "swapped", "large"} if verb == "delete" else set()
    assert {info.key.rpartition("/")[2] for info in memory.list()} == left
    assert ("Delete everything below this URL" in caplog.text) == (verb == "delete")


def test_a_refused_write_leaves_nothing(
    examine: Examine, memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Deny to write and to delete: there is no warning of objects that may be left."""
    report = examine("memory://doctor", store=denying(denying(memory, "put"), "delete"), code=1)
    assert (report.named("fail"), report.named("warn")) == (["put"], ["delete"])
    assert "may be left" not in caplog.text


@pytest.mark.parametrize(
    ("url", "verb", "cure"),
    [
        ("s3://x", "put", "Grant s3:PutObject: saves need it."),
        ("gs://x", "list", "Grant storage.objects.list: gc and recover need it"),
        ("az://x", "get", "Grant the role Storage Blob Data Contributor: "),
    ],
)
def test_permissions_are_named_as_the_cloud_does(memory: MemoryStore, url: str, verb: str, cure: str) -> None:
    found = dict(run_checks(StoreChecks(denying(memory, verb), parse_url(url)).checks()))
    assert found[verb].cure.startswith(cure)


OTHER = Version(etag='"other"')


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda condition: "any", "ignores the condition of a write (If-None-Match)"),
        (lambda condition: "absent" if condition == "absent" else "any", "ignores the condition of a write (If-Match)"),
        # As Ceph 16 does for ETags in quotes.
        (lambda condition: OTHER if isinstance(condition, Version) else condition, "--option etag_quotes=false"),
    ],
)
def test_wrong_conditional_writes(
    examine: Examine, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Condition], says: str
) -> None:
    """Examine servers that ignore a condition, or refuse each comparison of versions."""
    real_put = MemoryStore.put

    def put(store: MemoryStore, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        return real_put(store, key, buffers, condition=change(condition))

    monkeypatch.setattr(MemoryStore, "put", put)
    report = examine("memory://doctor", store=memory, code=1)
    assert report.named("fail") == ["conditional writes"]
    assert says in report.shown("conditional writes")
    assert list(memory.list()) == []


def test_a_read_of_something_else(examine: Examine, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "get", lambda store, key, limit_bytes: Content(b"<html>", OTHER))
    report = examine("memory://doctor", store=memory, code=1)
    assert "the answer is not what was written. Check that the endpoint" in report.shown("get")


def test_a_store_that_falls_silent_ends_the_requests(
    examine: Examine, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose the answer of each GET: it is reported once; what was put before is deleted."""
    monkeypatch.setattr("dcp_remote.storage.checks._REQUEST_SECONDS", 0.05)
    lost = Fault(lambda verb, key, number: verb == "get", "response", persistent=True)
    report = examine("memory://doctor", store=FaultyStore(memory, [lost]), code=1)
    assert report.named("fail") == ["get"]
    assert report.named("skip") == STORE[2:]
    assert list(memory.list()) == []


@pytest.mark.parametrize("key", ["object", "swapped", "large"])
def test_after_an_interruption_nothing_is_left(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Press Ctrl-C when an object has been written and its answer has not come."""
    is_hit = Fault(
        lambda verb, asked, number: verb == "put" and asked.endswith(key), "response", error=KeyboardInterrupt
    )
    monkeypatch.setattr("dcp_remote.cli.doctor.open_store", lambda url, options: FaultyStore(memory, [is_hit]))
    assert main(["doctor", "memory://doctor"]) == 130
    assert list(memory.list()) == []


# ---- the way to a bucket


def test_where_the_way_ends(examine: Examine, bucket: str, s3_server: S3Server) -> None:
    """Give a name that nothing has, a closed port, TLS with a server of plain http, and buckets that are missing."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and not listening
        url, missing = f"s3://{bucket}/run", f"s3://{bucket}-x"
        cases = [
            (url, "http://no-such-host.invalid", "no connection to no-such-host.invalid, port 80 ("),
            (url, f"http://127.0.0.1:{unused.getsockname()[1]}", "Connection refused"),
            (url, s3_server.endpoint_url.replace("http", "https"), "it speaks plain http"),
            (missing, s3_server.endpoint_url, f"Create it (`aws s3 mb {missing} "),
            ("s3://Bad_Bucket", s3_server.endpoint_url, "Create it (`aws s3 mb s3://Bad_Bucket "),
        ]
        for asked, endpoint_url, says in cases:
            report = examine(asked, "--endpoint-url", endpoint_url, code=1)
            name = "endpoint" if asked == url else "bucket"
            assert report.named("fail") == [name]
            assert says in report.shown(name)
            assert report.named("skip")[-9:] == [*RULES, *STORE]
            assert report.shown("put") == f"skip not checked, since {name} failed. "


def test_rules_of_a_bucket_that_is_missing(bucket: str) -> None:
    for check in S3Checks(parse_url(f"s3://{bucket}-x"), {}).checks():
        if check.name in RULES:
            with pytest.raises(BucketNotFoundError, match="Create it"):
                check.examine()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["s3:/bucket/run"], "The URL is misspelled"),
        (["s3://bucket/run", "--profile", "absent"], "--profile is not a profile of the AWS configuration"),
        (["s3://bucket/run", "--region", "no region"], "Provided region_name 'no region'"),
        (["s3://bucket/run", "--option", "unknown=1"], "Unknown name in --option"),
    ],
)
def test_a_wrong_call(cli: CommandLine, arguments: list[str], says: str) -> None:
    cli.fail("doctor", *arguments, "--json", code=2, says=says)


def test_a_silent_server(examine: Examine, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("checks", "diagnosis"):
        monkeypatch.setattr(f"dcp_remote.storage.cloud.{module}.READ_SECONDS", 0.2)
    assert examine_server(examine, lambda request: HttpAnswer(silent=True)).named("fail") == ["endpoint"]
    report = examine_server(examine, lambda request: HttpAnswer(silent=request.method != "HEAD"))
    assert report.named("fail") == ["bucket"]


@pytest.mark.parametrize(
    ("offset_seconds", "says"),
    [
        (3600, r"fail .* 60 min behind the server"),
        (-905, r"fail .* 15 min ahead"),
        (-300, r"warn .* 5 min ahead of the server"),
        (30, r"ok .* agree"),
    ],
)
def test_the_clock(
    examine: Examine, bucket: str, monkeypatch: pytest.MonkeyPatch, offset_seconds: int, says: str
) -> None:
    """Examine servers whose time is another."""
    monkeypatch.setattr(Handler, "date_time_string", lambda self: formatdate(time.time() + offset_seconds, usegmt=True))
    report = examine_server(examine, lambda request: refusal("AccessDenied"))
    assert re.match(says, report.shown("clock"))


@pytest.mark.parametrize("code", ["AccessDenied", ""])
def test_a_server_that_permits_nothing(examine: Examine, bucket: str, code: str) -> None:
    """Name each grant that lacks; rules that may not be read are warnings, since a training does not need them."""
    report = examine_server(examine, lambda request: refusal(code))
    assert report.named("fail") == ["put", "get", "list"]
    assert report.named("warn") == [*RULES, "delete"]
    assert report.named("skip") == ["conditional writes", "speed"]
    for name in [*report.named("fail"), *report.named("warn")]:
        assert "Grant s3:" in report.shown(name)


def test_wrong_credentials(examine: Examine, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused ones, none at all, and temporary ones whose expiry nobody knows."""
    report = examine_server(examine, lambda request: refusal("InvalidAccessKeyId"))
    assert report.named("fail") == ["credentials"]
    assert "The store does not know this access key (InvalidAccessKeyId). Correct" in report.shown("credentials")
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRETS[2])
    assert "warn from the environment" in examine(f"s3://{bucket}/run").shown("credentials")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "No credentials were found" in examine(f"s3://{bucket}/run", code=1).shown("credentials")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("InvalidAccessKeyId", "The store does not know this access key (InvalidAccessKeyId). Correct"),
        ("SignatureDoesNotMatch", "The secret key is not that of the access key (SignatureDoesNotMatch). Correct"),
        ("RequestTimeTooSkewed", "The clock of this machine is wrong (RequestTimeTooSkewed). Set it (NTP)."),
    ],
)
def test_credentials_that_only_signed_headers_show_as_wrong(
    examine: Examine, bucket: str, memory: MemoryStore, code: str, says: str
) -> None:
    """Refuse requests whose headers are signed, and no signed URL; then a write alone: no grant is advised."""

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(status=404) if "X-Amz-Signature" in request.path else refusal(code)

    report = examine_server(examine, answer)
    assert report.named("fail") == ["credentials"]
    assert says in report.shown("credentials")
    found = dict(run_checks(StoreChecks(denying(memory, "put", code), parse_url("s3://x")).checks()))
    assert says in f"{found['put'].fact}. {found['put'].cure}"


# ---- rules of the bucket


EXPIRY = {"ID": "old", "Status": "Enabled", "Expiration": {"Days": 30}, "Filter": {"Prefix": "run/"}}
ARCHIVE = {"ID": "old", "Status": "Enabled", "Transitions": [{"Days": 1, "StorageClass": "DEEP_ARCHIVE"}]}


@pytest.mark.parametrize(
    ("code", "cure"), [("NotImplemented", "no such setting"), ("AccessDenied", "Grant s3:GetBucketVersioning")]
)
def test_settings_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, code: str, cure: str) -> None:
    """Grant what is denied; nothing can be granted where a server lacks the setting."""

    class Client:
        def get_bucket_versioning(self, **_: str) -> None:
            answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 403}}
            raise ClientError(answer, "GetBucketVersioning")

    monkeypatch.setattr(S3Checks, "_create_client", lambda _: Client())
    checks = [check for check in S3Checks(parse_url("s3://bucket/run"), {}).checks() if check.name == "versions"]
    ((_, finding),) = run_checks(checks)
    assert (finding.state, cure in f"{finding.fact} {finding.cure}") == ("warn", True)


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (EXPIRY, "fail"),
        ({**EXPIRY, "Filter": {"Prefix": "run/shards/"}}, "fail"),
        ({**ARCHIVE, "Filter": {"Prefix": ""}}, "fail"),
        ({**EXPIRY, "Filter": {"Prefix": "running/"}}, "ok"),
        ({**EXPIRY, "Filter": {"Tag": {"Key": "a", "Value": "b"}}}, "ok"),
        ({**EXPIRY, "Status": "Disabled"}, "ok"),
    ],
)
def test_lifecycle_rules(bucket: str, s3_server: S3Server, rule: dict[str, Any], state: str) -> None:
    """Rules over the run, below it, over all, beside it, for tagged objects, and disabled."""
    put_rule(s3_server, bucket, rule)
    found = dict(run_checks(S3Checks(parse_url(f"s3://{bucket}/run"), {}).checks()))["lifecycle"]
    assert found.state == state
    assert ("by the lifecycle rule 'old'" in found.fact) == (state == "fail")


def test_old_versions(examine: Examine, bucket: str, s3_server: S3Server) -> None:
    """Warn of a bucket that keeps old versions, until a rule lets them expire."""
    client_of(s3_server).put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    assert examine(f"s3://{bucket}/run").named("warn") == ["versions"]
    rule = {"Status": "Enabled", "Filter": {"Prefix": ""}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    put_rule(s3_server, bucket, rule)
    assert examine(f"s3://{bucket}/run").named("warn") == []
    assert keys_of(bucket) == []


def test_an_object_lock(bucket: str, s3_server: S3Server) -> None:
    """Warn of a bucket whose new objects are locked; moto refuses to put one without a header that S3 does not need."""
    client, locked = client_of(s3_server), f"{bucket}-locked"
    client.create_bucket(Bucket=locked, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 7}}
    configuration = {"ObjectLockEnabled": "Enabled", "Rule": rule}
    client.put_object_lock_configuration(Bucket=locked, ObjectLockConfiguration=configuration)
    found = dict(run_checks(S3Checks(parse_url(f"s3://{locked}/run"), {}).checks()))
    assert found["object lock"][:2] == ("warn", "each new object is locked for 7 days (GOVERNANCE)")


# ---- the machine, and all ranks of a job


def test_limits_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files and space away: each warning has its cure."""
    free = shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr("dcp_remote.storage.checks._SHARED_MEMORY", Path("/"))
    found = dict(run_checks(check_machine()))
    assert {finding.state for finding in found.values()} == {"warn"}
    assert found["open files"].fact == "a process may open 256 files"
    assert "ulimit -n" in found["open files"].cure
    assert found["temporary folder"].fact.startswith("1.0 MiB free in ")
    assert "TMPDIR" in found["temporary folder"].cure
    assert "--shm-size" in found["shared memory"].cure
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr("dcp_remote.storage.checks._SHARED_MEMORY", Path("/nowhere"))
    found = dict(run_checks(check_machine()))
    assert (found["open files"].state, found["shared memory"].state) == ("ok", "skip")


def test_ranks_that_differ_are_named() -> None:
    """Merge reports of four ranks, one of which has a wrong clock: measured values are no difference."""

    def report(rank: int) -> dict[str, Any]:
        clock = ("warn", "behind", "Set it.") if rank == 2 else ("ok", "agree", "")
        rows = (("clock", *clock), ("speed", "ok", f"{rank} ms", ""), ("put", "ok", "written", ""))
        return {
            "host": f"host-{rank // 2}",
            "checks": [dict(zip(("name", "state", "fact", "cure"), row, strict=True)) for row in rows],
        }

    merged = merge_reports([report(rank) for rank in range(4)], 4)
    assert [(row["name"], row["state"], row.get("ranks"), row.get("hosts")) for row in merged] == [
        ("clock", "ok", [0, 1, 3], ["host-0", "host-1"]),
        ("clock", "warn", [2], ["host-1"]),
        ("speed", "ok", None, None),
        ("put", "ok", None, None),
    ]


@pytest.mark.parametrize(("name", "cure"), [("software", "same versions"), ("endpoint", "one endpoint")])
def test_ranks_that_must_be_alike(name: str, cure: str) -> None:
    """Merge what went well on three ranks, one of which differs, and on one that failed: only a difference warns."""

    def report(fact: str, state: str = "ok") -> dict[str, Any]:
        return {"host": "host", "checks": [{"name": name, "state": state, "fact": fact, "cure": ""}]}

    merged = merge_reports([report("a"), report("b"), report("a")], 3)
    assert [(row["state"], row["ranks"]) for row in merged] == [("warn", [0, 2]), ("warn", [1])]
    assert all(cure in row["cure"] for row in merged)
    merged = merge_reports([report("a"), report("c", "fail"), report("a")], 3)
    assert [row["state"] for row in merged] == ["ok", "fail"]


def examine_by_two_ranks(url: object) -> Report:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    program = [sys.executable, "-c", "import sys; from dcp_remote.cli import main; sys.exit(main(sys.argv[1:]))"]
    command = [*torchrun, *program, "doctor", str(url), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=200)
    return Report(done.stdout)


def test_under_torchrun(tmp_path: Path) -> None:
    """Examine a folder by two ranks: one report, with the checks of each and those of all; no folder is left."""
    report = examine_by_two_ranks(tmp_path / "run")
    assert list(report.checks) == ["ranks", "software", *MACHINE, *STORE, "rank sockets"]
    assert report.shown("ranks") == "ok all 2 ranks have come. "
    assert report.shown("rank sockets") == "ok connected to 1 other rank. "
    assert not any("ranks" in check for check in report.checks.values())
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_under_torchrun(bucket: str) -> None:
    """Examine a bucket by two ranks: versions of the software and of the bucket are two checks; nothing is left."""
    report = examine_by_two_ranks(f"s3://{bucket}/run")
    assert [*RULES, *STORE, "rank sockets"] == list(report.checks)[-10:]
    assert report.shown("software").startswith("ok dcp_remote ")
    assert report.shown("versions") == "ok the bucket keeps no old versions. "
    assert not any("ranks" in check for check in report.checks.values())
    assert keys_of(bucket) == []


def test_a_rank_that_torchrun_ends(tmp_path: Path) -> None:
    """Send SIGTERM to a rank that waits for another one, as torchrun does: it says so, and no folder is left."""
    ranks = {"TORCHELASTIC_RUN_ID": "x", "RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **{name: str(value) for name, value in ranks.items()}}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    program = "import sys; from dcp_remote.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "doctor", str(tmp_path / "run")]
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        environment["MASTER_PORT"] = str(port)
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as rank:
            try:
                while rank.poll() is None:
                    with suppress(ConnectionRefusedError):  # until its checks are made, and it waits for rank 1
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                    time.sleep(0.05)
                rank.terminate()
                _, said = rank.communicate(timeout=100)
            finally:
                rank.kill()
    assert rank.returncode == 128 + signal.SIGTERM
    assert "dcp-remote: rank 0 was ended by SIGTERM, as torchrun does once another rank failed" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("node", "code"), [("0", 0), ("1", 1)])
def test_a_rank_that_does_not_meet_the_others(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, code: int
) -> None:
    """Find no store of torchrun: the exit code says so, except beside rank 0, whose report torchrun would end."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**ranks, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    (line,) = cli.run("doctor", tmp_path, code=code).lines
    name = f"rank 3 ({socket.gethostname()})"
    assert line.startswith(f"fail  ranks               {name}: the key-value store of the job, 127.0.0.1 port 1, does")


# ---- the report


def test_checks_that_one_failure_skips_are_one_line(cli: CommandLine, bucket: str) -> None:
    """Ask a server that is not there: checks behind it are counted and named, each with its row in the document."""
    arguments = ["doctor", "s3://bucket/run", "--endpoint-url", "http://127.0.0.1:1"]
    lines = cli.run(*arguments, code=1).lines
    names = ["clock", "credentials", "bucket", *RULES, *STORE]
    said = f"skip  12 checks           not checked, since endpoint failed: {', '.join(names)}"
    assert [line for line in lines if line.startswith("skip")] == [said]
    assert lines[-1] == "1 of 17 checks failed"
    assert Report(cli.run(*arguments, "--json", code=1).out).named("skip") == names


def test_the_page_shows_this_report(cli: CommandLine, bucket: str, s3_server: S3Server) -> None:
    """Make the bucket of the page: each line of its report begins as it does there."""
    put_rule(s3_server, bucket, {**EXPIRY, "ID": "old-runs"})
    client_of(s3_server).put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0].replace("my-bucket", bucket).splitlines()
    lines = cli.run("doctor", f"s3://{bucket}/run", code=1).lines
    assert [line[:40] for line in lines[6:15]] == [line[:40] for line in shown[6:15]]
    assert [line[:24] for line in lines[1:]] == [line[:24] for line in shown[1:]]


@pytest.mark.parametrize("source", ["options", "environment"])
def test_no_secret_is_shown(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Put secrets everywhere, and let the server echo what it got, in its answers to what is signed or not."""
    key, secret, token, user, password = SECRETS
    names = {"aws_access_key_id": key, "aws_secret_access_key": secret, "aws_session_token": token}
    options: list[str] = []
    for name, value in names.items():
        monkeypatch.delenv(name.upper(), raising=False)
        if source == "environment":
            monkeypatch.setenv(name.upper(), value)
        else:
            options += ["--option", f"{name}={value}"]

    shown = []
    for code in ("InvalidAccessKeyId", "AccessDenied", ""):

        def echo(request: HttpRequest, code: str = code) -> HttpAnswer:
            return refusal(code, f"{SECRETS[:3]} {request.path} {request.headers}")

        with scripted_server(echo) as server:
            # A short URL, since a long cause is cut before what the server echoes.
            arguments = ["doctor", "s3://b", "--endpoint-url", server.endpoint_url, *options]
            shown += [cli.run(*arguments, *more, code=1) for more in ([], ["--json"])]
    monkeypatch.setenv("HTTP_PROXY", f"http://{user}:{password}@127.0.0.1:9")
    arguments = ["doctor", "s3://b", "--endpoint-url", "http://storage.invalid", *options]
    shown += [cli.run(*arguments, *more, code=1) for more in ([], ["--json"])]
    assert "requests go through the proxy 127.0.0.1:9" in shown[-2].out
    text = "".join(one.out + one.err for one in shown)
    assert [secret for secret in (*SECRETS, "X-Amz-") if secret in text] == []
