"""Every way in which a cloud refuses, as the error of ours that says what to do; and that none tells a secret."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import logging
import pickle
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import botocore.exceptions
import obstore.exceptions
import pytest
import torch

import dcp_remote
from dcp_remote.errors import (
    BucketNotFoundError,
    ConditionFailedError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.cloud.endpoint import S3Options, resolve_s3
from dcp_remote.storage.cloud.errors import classify_error, get_safe_cause, translate
from dcp_remote.storage.cloud.store import CLOUDS, CloudStore, open_cloud_store
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.servers import S3Server
from tests.support.clouds import CREDENTIALS, VERBS, always, error_body, open_s3fs
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "a-session-token+of/many=characters"
OPTIONS = {**CREDENTIALS, "aws_secret_access_key": SECRET, "aws_session_token": TOKEN}


# Expected class for each class of the two modules. A class added by a new release fails the test until it is counted.
OBSTORE = {
    StorageError: "BaseError JoinError NotSupportedError",
    TransientStorageError: "GenericError",
    ObjectNotFoundError: "NotFoundError",
    ConditionFailedError: "AlreadyExistsError NotModifiedError PreconditionError",
    PermissionDeniedError: "PermissionDeniedError UnauthenticatedError",
    InvalidArgumentError: "InvalidPathError UnknownConfigurationKeyError",
}
BOTOCORE = {
    StorageError: """
        ImminentRemovalWarning MissingServiceIdError SSLError UndefinedModelAttributeError
        UnsupportedTLSVersionWarning
    """,
    TransientStorageError: """
        CapacityNotAvailableError ChecksumError ConnectTimeoutError ConnectionClosedError ConnectionError
        EndpointConnectionError FlexibleChecksumError HTTPClientError IncompleteReadError MetadataRetrievalError
        ProxyConnectionError ReadTimeoutError ResponseStreamingError
    """,
    PermissionDeniedError: """
        ClientError CredentialRetrievalError EventStreamError LoginAuthorizationCodeError LoginError
        LoginInsufficientPermissions LoginRefreshRequired LoginTokenLoadError NoAuthTokenError
        NoCredentialsError PartialCredentialsError RefreshWithMFAUnsupportedError SSOError SSOTokenLoadError
        TokenRetrievalError UnauthorizedSSOTokenError UnknownCredentialError
    """,
}

# Numbers of classes in both modules. All that are not listed have the class of their base, InvalidArgumentError.
COUNTS = {obstore.exceptions: 12, botocore.exceptions: 101}


@pytest.mark.parametrize(
    ("module", "table"), [(obstore.exceptions, OBSTORE), (botocore.exceptions, BOTOCORE)], ids=["obstore", "botocore"]
)
def test_every_class_is_mapped(module: ModuleType, table: dict[type[DcpRemoteError], str]) -> None:
    """Walk the module; make one of each class without its constructor; compare with the table above."""
    listed = {name: kind for kind, names in table.items() for name in names.split()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # obstore's NotFoundError
        found = {
            name: classify_error(value.__new__(value))
            for name, value in inspect.getmembers(module, inspect.isclass)
            if issubclass(value, Exception) and value.__module__ == module.__name__
        }
    assert found == {name: listed.get(name, InvalidArgumentError) for name in found}
    assert listed.keys() <= found.keys()
    assert len(found) == COUNTS[module]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(), ObjectNotFoundError),
        (PermissionError(), PermissionDeniedError),
        (ConnectionResetError(), TransientStorageError),
        (TimeoutError(), TransientStorageError),
        (OSError(errno.EHOSTUNREACH, "no route"), TransientStorageError),
        (OSError(errno.EMFILE, "too many files"), TransientStorageError),
        (OSError(errno.ENOSPC, "full"), StorageError),
        (OSError("without a number"), StorageError),
        (ValueError(), InvalidArgumentError),
        (BufferError(), InvalidArgumentError),
        (RuntimeError(), StorageError),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_builtin_errors(error: Exception, kind: type[DcpRemoteError]) -> None:
    """Classify Python's own errors: by class, and by errno."""
    assert classify_error(error) is kind


def open_at(endpoint_url: str, **options: object) -> CloudStore:
    given = {**OPTIONS, "endpoint_url": endpoint_url, **options}
    return open_cloud_store(parse_url("s3://bucket/run"), given)


# TLS alert of a server that has no version in common with the client.
TLS_1_1 = b"\x15\x03\x01\x00\x02\x02\x46"


def catch_error(store: ObjectStore, verb: str) -> DcpRemoteError:
    """Return the error of one verb after a round through pickle; check that it shows no secret."""
    with pytest.raises(DcpRemoteError) as info:
        VERBS[verb](store)
    assert_no_secret(info.value)
    copy = pickle.loads(pickle.dumps(info.value))
    assert (type(copy), str(copy)) == (type(info.value), str(info.value))
    return info.value


def assert_no_secret(error: BaseException) -> None:
    """Check an error, its chain and its repr."""
    shown = "".join(traceback.format_exception(error)) + repr(error)
    assert SECRET not in shown
    assert TOKEN not in shown


# Status and code of an answer, verbs that get it, and what is raised: the class, and words of the advice.
REFUSALS: list[tuple[int, str, str, type[DcpRemoteError], str]] = [
    (403, "AccessDenied", "head get get_into put list delete", PermissionDeniedError, ""),
    (403, "RequestTimeTooSkewed", "put get", PermissionDeniedError, "clock of this machine is wrong"),
    # One GET finds the code of a HEAD, whose answer has no body.
    (403, "InvalidAccessKeyId", "put get head", PermissionDeniedError, "does not know this access key"),
    (403, "SignatureDoesNotMatch", "put get", PermissionDeniedError, "not that of the access key"),
    (400, "ExpiredToken", "put get", PermissionDeniedError, "have expired"),
    (403, "QuotaExceeded", "put get get_into", StorageError, "is full"),  # Ceph, VersityGW
    (507, "XMinioStorageFull", "put get get_into", StorageError, "is full"),
    (400, "XMinioAdminBucketQuotaExceeded", "put get get_into", StorageError, "is full"),
    (413, "EntityTooLarge", "put get get_into", StorageError, "no object of this size"),
    (403, "InvalidObjectState", "put get get_into", StorageError, "an archive"),
    (400, "KMS.DisabledException", "put get get_into create", StorageError, "KMS key"),
    (400, "KMS.KMSInvalidStateException", "put get get_into", StorageError, "KMS key"),
    (400, "KMS.NotFoundException", "put get get_into", StorageError, "KMS key"),
    (400, "InvalidRequest", "put get get_into", StorageError, "'checksum_algorithm'"),
    # The put was not carried out, so that it is final also under a condition.
    (501, "NotImplemented", "put get get_into create", StorageError, "'checksum_algorithm'"),
    (301, "", "put", StorageError, "endpoint_url"),
    (429, "SlowDown", "head get get_into put list delete", TransientStorageError, ""),
    (500, "InternalError", "head get get_into put list delete", TransientStorageError, ""),
    (503, "SlowDown", "head get get_into put list delete", TransientStorageError, ""),
    (400, "RequestTimeout", "create", TransientStorageError, ""),
    (400, "BadDigest", "create", TransientStorageError, ""),
    (409, "OperationAborted", "put", TransientStorageError, ""),  # another request is under way
    (409, "PreconditionFailed", "create swap", ConditionFailedError, ""),
    (412, "PreconditionFailed", "create swap", ConditionFailedError, ""),
    (404, "NoSuchKey", "swap", ConditionFailedError, ""),  # as S3 answers for an absent object
]


class Refusal(NamedTuple):
    """A refused verb, and its error."""

    status: int
    code: str
    verb: str
    kind: type[DcpRemoteError]
    advice: str

    def check(self, store: ObjectStore) -> None:
        error = catch_error(store, self.verb)
        assert type(error) is self.kind
        assert self.advice in str(error)
        assert str(error.details["url"]).startswith("s3://bucket/run")
        assert error.details["verb"] == ("put" if self.verb in ("create", "swap") else self.verb)
        if self.advice and self.code:
            assert error.details["code"] == self.code

    def body(self) -> bytes:
        return error_body(self.code, f"<CanonicalRequest>{TOKEN} {SECRET}</CanonicalRequest>")


CASES = [
    Refusal(status, code, verb, kind, advice)
    for status, code, verbs, kind, advice in REFUSALS
    for verb in verbs.split()
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.status}-{case.code}-{case.verb}")
def test_refusals(case: Refusal) -> None:
    """Refuse a verb with each status and code, and echo secrets: the error explains the code, and is of one class."""
    with scripted_server(lambda _: HttpAnswer(case.status, case.body())) as server:
        case.check(open_at(server.endpoint_url))


def test_refusals_of_s3fs() -> None:
    """Refuse a put through s3fs in each of these ways: one request, and the same error."""
    answers: list[HttpAnswer] = []
    with scripted_server(lambda _: answers[-1]) as server:
        store = open_s3fs(server.endpoint_url, secret=SECRET, token=TOKEN)
        for case in CASES:
            if case.verb in ("put", "create", "swap") and case.status != 301:  # of redirects in `test_redirects.py`
                server.requests.clear()
                answers.append(HttpAnswer(case.status, case.body()))
                case.check(store)
                assert len(server.requests) == 1


def test_bucket_missing_on_moto(s3_server: S3Server) -> None:
    """Read, list and save into a missing bucket: one message, with name, server, region, and how to create it."""
    store = open_cloud_store(parse_url("s3://no-such-bucket/run"), s3_server.storage_options)
    state = {"w": torch.zeros(2)}
    run = dcp_remote.CheckpointManager(store)
    calls: list[Callable[[], object]] = [
        *(functools.partial(VERBS[verb], store) for verb in ("put", "create", "list")),
        run.run.latest,
        lambda: run.restore(state),
        lambda: run.restore(state, "latest", must_exist=True),
        lambda: run.save(1, state, wait=True),
        lambda: dcp_remote.load(store),
        lambda: dcp_remote.open_run(store).wait_for_newer(None, timeout_seconds=5),
    ]
    errors: list[BucketNotFoundError] = []
    for call in calls:
        with pytest.raises(BucketNotFoundError) as caught:
            call()
        errors.append(caught.value)
    run.close()
    assert len({str(error) for error in errors}) == 1
    url = s3_server.endpoint_url
    assert f"`aws s3 mb s3://no-such-bucket --region us-east-1 --endpoint-url {url}`" in str(errors[0])
    assert errors[0].details == {"bucket": "no-such-bucket", "endpoint": url, "region": "us-east-1"}


@pytest.mark.parametrize(
    ("scheme", "options", "command"),
    [
        ("s3", {"region_name": "eu-west-1"}, "`aws s3 mb s3://data --region eu-west-1`"),
        ("gs", {}, "`gcloud storage buckets create gs://data`"),
        ("az", {}, "The container does not exist, and is never created implicitly. Create it (`az storage container"),
    ],
)
@pytest.mark.usefixtures("empty_environment")
def test_how_to_create_a_bucket(scheme: str, options: dict[str, object], command: str) -> None:
    """Name the command of each cloud's own tool; Amazon's needs no endpoint for Amazon's own server."""
    assert command in str(CLOUDS[scheme].parse("data", options).make_bucket_error())


def test_an_endpoint_that_ends_with_the_bucket(s3_server: S3Server) -> None:
    """A listing finds an object missing: no outage, and final."""
    s3_server.create_bucket("in-endpoint")
    options = {**s3_server.storage_options, "endpoint_url": f"{s3_server.endpoint_url}/in-endpoint"}
    store = open_cloud_store(parse_url("s3://in-endpoint/run"), options)
    with pytest.raises(StorageError, match="must not end with the bucket's name") as caught:
        list(store.list("manifests/"))
    assert not isinstance(caught.value, TransientStorageError)


def test_missing_manifest_is_explained_on_moto(s3_server: S3Server) -> None:
    """Get from an empty and from a missing bucket: the errors are equal, and explain_missing tells the cases apart."""
    s3_server.create_bucket("explained")
    for bucket, explained in (("explained", False), ("not-explained", True)):
        store = open_cloud_store(parse_url(f"s3://{bucket}/run"), s3_server.storage_options)
        with pytest.raises(ObjectNotFoundError):
            store.get("manifest.json", limit_bytes=10)
        reason = store.explain_missing()
        assert (reason is not None) == explained
        assert reason is None or type(reason) is BucketNotFoundError


def test_a_missing_object_costs_one_request() -> None:
    """Answer 404 to a get and a head: no further request is sent."""
    with scripted_server(always(404, "NoSuchKey")) as server:
        store = open_at(server.endpoint_url)
        assert type(catch_error(store, "get")) is ObjectNotFoundError
        assert type(catch_error(store, "head")) is ObjectNotFoundError
        assert [request.method for request in server.requests] == ["GET", "HEAD"]
        assert store.explain_missing() is None
        assert len(server.requests) == 3


@pytest.mark.parametrize("verb", ["put", "get", "get_into"])
def test_a_final_code_needs_no_diagnosis(verb: str) -> None:
    """Answer with a final code: no further request is sent, and only the first of a direct read and obstore's."""
    with scripted_server(always(507, "XMinioStorageFull")) as server:
        catch_error(open_at(server.endpoint_url), verb)
        assert not any("diagnosis" in request.path for request in server.requests)


@pytest.mark.parametrize(("code", "diagnoses"), [("SlowDown", 0), ("ServiceUnavailable", 1)])
def test_a_storm_is_not_doubled(code: str, diagnoses: int) -> None:
    """Fail a hundred requests of each kind with 503: they cost one diagnosis, and none where the store says why."""
    with scripted_server(always(503, code)) as server:
        store = open_at(server.endpoint_url)
        for _ in range(100):
            for verb in ("put", "get", "get_into"):
                with pytest.raises(TransientStorageError):
                    VERBS[verb](store.child("c"))
        assert len(server.requests) == 300 + diagnoses


@pytest.mark.parametrize("verb", ["get", "put", "list"])
def test_a_region_in_the_body_of_an_error(verb: str) -> None:
    """Report another region: the error names both and the option. Redirects are in `test_redirects.py`."""
    with scripted_server(always(400, "AuthorizationHeaderMalformed", more="<Region>eu-central-1</Region>")) as server:
        error = catch_error(open_at(server.endpoint_url), verb)
    assert type(error) is StorageError
    assert "storage_options['region_name']" in str(error)
    assert (error.details["bucket_region"], error.details["used_region"]) == ("eu-central-1", "us-east-1")


def test_a_clock_that_is_slow() -> None:
    """Fail listings and reads at a server whose clock is 14 minutes ahead: no signed URL has expired by that clock."""
    expired: list[str] = []

    def answer(request: HttpRequest) -> HttpAnswer:
        query = parse_qs(urlsplit(request.path).query)
        if "X-Amz-Expires" in query:
            signed = datetime.strptime(query["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            expires = signed + timedelta(seconds=int(query["X-Amz-Expires"][0]))
            if expires < datetime.now(UTC) + timedelta(minutes=14):
                expired.append(request.path)
                return HttpAnswer(403, error_body("AccessDenied"))
        return HttpAnswer(500)

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        for verb in ("list", "get_into"):
            assert type(catch_error(store, verb)) is TransientStorageError
        assert sum("X-Amz-Expires" in request.path for request in server.requests) >= 2
    assert expired == []


def test_a_diagnosis_does_not_settle_a_conditional_put() -> None:
    """Fail a conditional put and the diagnosis: the put may have been carried out, so its error stays transient."""

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(500) if request.method == "PUT" else HttpAnswer(400, error_body("ExpiredToken"))

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        for condition in ("absent", Version('"x"')):
            with pytest.raises(TransientStorageError, match="have expired"):
                store.put("key", [b"x"], condition=condition)


@pytest.mark.parametrize("verb", VERBS)
def test_unreachable_endpoint(verb: str) -> None:
    """Connect to a port that was just closed: the error is transient and names the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint_url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    error = catch_error(open_at(endpoint_url), verb)
    assert type(error) is TransientStorageError
    assert error.details["endpoint"] == endpoint_url
    assert "cannot be reached" in str(error)


@contextmanager
def answer_handshakes(answer: bytes) -> Iterator[str]:
    """Run a server that sends `answer` to a handshake and disconnects; yield its URL."""

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                if not connection.recv(65536):
                    return
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            socket.create_connection(listener.getsockname()).close()
            thread.join()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("answer", [b"", b"\x15\x03\x03\x00\x02\x02\x50"], ids=["nothing", "internal error"])
def test_a_handshake_that_is_broken_off(answer: bytes, verb: str) -> None:
    """Break off the handshake, as a restarting load balancer does: the error is transient."""
    with answer_handshakes(answer) as endpoint_url:
        error = catch_error(open_at(endpoint_url), verb)
    assert type(error) is TransientStorageError
    assert "cannot be reached" in str(error)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28", TLS_1_1],
    ids=["http", "no common cipher", "an old version"],
)
def test_a_handshake_that_fails_for_good(answer: bytes) -> None:
    """Answer with something other than a handshake: the error is final and has OpenSSL's name of the cause."""
    with answer_handshakes(answer) as endpoint_url:
        error = catch_error(open_at(endpoint_url), "put")
    assert type(error) is StorageError
    assert "TLS with the endpoint fails" in str(error)
    assert error.details["cause"]


def test_delete_reports_each_key() -> None:
    """Refuse one key of a batch (200 with an error inside, as S3 does): that key is reported, a missing one not."""
    alone = {"/bucket/run/locked": (403, error_body("AccessDenied")), "/bucket/run/z": (404, b"")}

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.method == "POST":
            refused = error_body("AccessDenied", "<Key>run/locked</Key>")
            return HttpAnswer(200, b"<DeleteResult>" + refused + b"</DeleteResult>")
        return HttpAnswer(*alone.get(request.path, (204, b"")))

    with scripted_server(answer) as server:
        failed = open_at(server.endpoint_url).delete(["a", "locked", "z"])
    assert {key: type(error) for key, error in failed.items()} == {"locked": PermissionDeniedError}
    assert [request.method for request in server.requests] == ["POST", "DELETE", "DELETE", "DELETE"]


def test_a_delete_that_fails_transiently() -> None:
    """Overload the store: one key is deleted alone, and all others are reported with its error."""
    with scripted_server(always(503, "SlowDown")) as server:
        failed = open_at(server.endpoint_url).delete([f"key-{number}" for number in range(100)])
    assert len(failed) == 100
    assert {type(error) for error in failed.values()} == {TransientStorageError}
    assert len(server.requests) == 2


def test_a_delete_without_a_grant_ends_soon() -> None:
    """Deny every key: after the batch and four single keys, the other 705 are reported as denied."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.method == "POST":
            failed = "".join(f"<Error><Key>run/{key}</Key><Code>AccessDenied</Code></Error>" for key in keys)
            return HttpAnswer(200, f"<DeleteResult>{failed}</DeleteResult>".encode())
        return HttpAnswer(403, error_body("AccessDenied"))

    keys = [f"key-{number}" for number in range(709)]
    with scripted_server(answer) as server:
        failed = open_at(server.endpoint_url).delete(keys)
    assert set(failed) == set(keys)
    assert {type(error) for error in failed.values()} == {PermissionDeniedError}
    assert [request.method for request in server.requests] == ["POST"] + ["DELETE"] * 4


@pytest.mark.parametrize("denied", [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}, set(range(9))])
def test_a_delete_with_a_grant_for_some_keys(denied: set[int]) -> None:
    """Deny the first half of the keys, the second half, or all but the last: the others are deleted."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.method == "POST" or int(request.path[-1]) in denied:
            return HttpAnswer(403, error_body("AccessDenied"))
        return HttpAnswer(204)

    with scripted_server(answer) as server:
        failed = open_at(server.endpoint_url).delete([f"key-{number}" for number in range(10)])
    assert set(failed) == {f"key-{number}" for number in denied}


def test_a_delete_ends_at_the_deadline() -> None:
    """Let the deadline pass after three single keys: the other 97 are reported."""
    left = [3]

    def answer(request: HttpRequest) -> HttpAnswer:
        left[0] -= request.method == "DELETE"
        return HttpAnswer(403, error_body("AccessDenied")) if request.method == "POST" else HttpAnswer(204)

    with scripted_server(answer) as server, limit_requests(lambda: float(left[0])):
        failed = open_at(server.endpoint_url).delete([f"key-{number}" for number in range(100)])
    assert len(failed) == 97
    assert {type(error) for error in failed.values()} == {TransientStorageError}
    assert [request.method for request in server.requests] == ["POST", "DELETE", "DELETE", "DELETE"]


@pytest.mark.usefixtures("empty_environment")
def test_no_credentials() -> None:
    """Give no credentials anywhere: the first request, and not the opening, says how to give them."""
    store = open_cloud_store(parse_url("s3://bucket"), {})
    with pytest.raises(PermissionDeniedError, match="AWS_ACCESS_KEY_ID"):
        store.put("key", [b"x"])


@pytest.mark.usefixtures("empty_environment")
def test_the_instance_is_not_asked_with_credentials_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a fake instance metadata service: it is asked only if there are no other credentials."""
    with scripted_server(always(404)) as metadata, scripted_server(always(404)) as store_server:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.endpoint_url)
        endpoint = {"endpoint_url": store_server.endpoint_url}
        stores = [
            open_cloud_store(parse_url("s3://bucket"), {**endpoint, **OPTIONS}),
            open_cloud_store(parse_url("s3://bucket"), {**endpoint, "anon": True}),
        ]
        for store in stores:
            catch_error(store, "get")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        catch_error(open_cloud_store(parse_url("s3://bucket"), endpoint), "get")
        assert metadata.requests == []
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        assert type(catch_error(open_cloud_store(parse_url("s3://bucket"), endpoint), "get")) is PermissionDeniedError
        assert metadata.requests != []


def test_precedence(empty_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give endpoint, region and key by options, environment and profile; take one away at a time; read the request."""
    with (
        scripted_server(always(404)) as first,
        scripted_server(always(404)) as second,
        scripted_server(always(404)) as third,
    ):
        empty_environment.write_text(
            f"[profile p]\nendpoint_url = {third.endpoint_url}\nregion = eu-west-3\n"
            f"aws_access_key_id = PROFILEKEY\naws_secret_access_key = {SECRET}\n"
        )
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", second.endpoint_url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENTKEY")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        options = {"endpoint_url": first.endpoint_url, "region": "eu-west-1", "key": "OPTIONKEY", "secret": SECRET}
        for given in ({"client_kwargs": {"endpoint_url": first.endpoint_url}, **options}, {}):
            catch_error(open_cloud_store(parse_url("s3://bucket"), given), "get")
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        catch_error(open_cloud_store(parse_url("s3://bucket"), {"profile": "p"}), "get")
    for server, region, key in (
        (first, "eu-west-1", "OPTIONKEY"),
        (second, "eu-west-2", "ENVIRONMENTKEY"),
        (third, "eu-west-3", "PROFILEKEY"),
    ):
        (request,) = server.requests
        assert f"Credential={key}/" in request.headers["authorization"]
        assert f"/{region}/s3/" in request.headers["authorization"]


def test_credentials_that_cannot_be_renewed(empty_environment: Path, tmp_path: Path) -> None:
    """Let a `credential_process` give keys for a minute and then fail: the error says so."""
    expires = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    keys = {"Version": 1, "AccessKeyId": "AKIAIOSFODNN7EXAMPLE", "SecretAccessKey": SECRET, "SessionToken": TOKEN}
    (tmp_path / "keys").write_text(json.dumps({**keys, "Expiration": expires}))
    script = tmp_path / "give"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/keys && rm {tmp_path}/keys\n")
    script.chmod(0o700)
    empty_environment.write_text(f"[default]\ncredential_process = {script}\n")
    with scripted_server(always(404)) as server:
        store = open_cloud_store(parse_url("s3://bucket"), {"endpoint_url": server.endpoint_url})
        error = catch_error(store, "get")
        assert type(error) is PermissionDeniedError
        assert "The credentials cannot be renewed." in str(error)
        assert server.requests == []


@pytest.mark.parametrize("verb", ["get", "put", "delete"])
@pytest.mark.parametrize(
    ("variable", "named"),
    [(None, r"storage_options\['profile_name'\]"), ("AWS_PROFILE", "AWS_PROFILE"), ("AWS_DEFAULT_PROFILE",) * 2],
)
def test_unknown_profile(
    verb: str, variable: str | None, named: str, empty_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile that does not exist, by option and by variable: the message names these, and the profiles there are."""
    empty_environment.write_text("[default]\n[profile prod]\n")
    if variable is not None:
        monkeypatch.setenv(variable, "nobody")
    options = {"profile_name": "nobody"} if variable is None else {}
    with pytest.raises(InvalidArgumentError, match=f"^{named} is not a profile .*'nobody' known='default, prod'"):
        VERBS[verb](open_cloud_store(parse_url("s3://bucket"), options))


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.usefixtures("empty_environment")
def test_an_endpoint_in_the_environment_without_scheme(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that the option gets; and the variable counts for nothing where botocore does not read it."""
    monkeypatch.setenv(variable, "localhost:9000")
    with pytest.raises(InvalidArgumentError, match=rf"^{variable} must begin with http://.* endpoint='localhost:9000'"):
        open_cloud_store(parse_url("s3://bucket"), {}).head("key")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    for endpoint_url in (None, "http://127.0.0.1:1"):
        assert resolve_s3("bucket", S3Options(endpoint_url=endpoint_url)).endpoint_url.startswith("http")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint_ur": "x"}, "Unknown name.*endpoint_url.*region_name.*unknown='endpoint_ur'"),
        ({"client_kwargs": {"regio_name": "x"}}, "Unknown name.*region_name.*unknown='regio_name'"),
        ({"anon": "yes"}, r"\['anon'\] must be True or False"),
        ({"connect_timeout_seconds": -1}, "must be a positive number"),
        ({"addressing_style": "round"}, "must be one of path, virtual, auto"),
        ({"endpoint_url": ""}, "a string that is not empty"),
        ({"verify": 3}, "the path of a file of certificates"),
        ({"key": SECRET}, "aws_access_key_id and aws_secret_access_key together"),
        ({"token": SECRET}, "no aws_session_token without them"),
        ({"secret": [SECRET]}, "must be a string"),
        ({SECRET[:3]: SECRET}, "Unknown name"),
    ],
)
def test_invalid_options(options: dict[str, object], message: str) -> None:
    """Give each kind of invalid option: opening the store fails, and the error shows no value."""
    with pytest.raises(InvalidArgumentError, match=message) as info:
        open_cloud_store(parse_url("s3://bucket"), options)
    assert SECRET not in repr(info.value) + str(info.value)


@pytest.mark.usefixtures("empty_environment")
@pytest.mark.parametrize(
    "options",
    [{"endpoint_url": "no-url"}, {"region_name": "no region"}, {"verify": "/no/such/file", "anon": True}],
)
def test_settings_that_botocore_refuses(options: dict[str, object]) -> None:
    """Give settings that botocore refuses: the first request raises InvalidArgumentError."""
    with pytest.raises(InvalidArgumentError):
        open_cloud_store(parse_url("s3://bucket"), {**OPTIONS, **options}).get("key", limit_bytes=1)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket", OPTIONS),
        ("gs://bucket", {"bearer_token": SECRET}),
        ("gs://bucket", {"service_account_key": SECRET}),
        ("az://bucket", {"account_name": "a", "account_key": SECRET}),
        ("az://bucket", {"account_name": "a", "sas_token": SECRET}),
        ("az://bucket", {"connection_string": f"AccountName=a;AccountKey={SECRET}"}),
    ],
)
def test_secrets_stay_secret(url: str, options: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    """Fail a request at log level DEBUG: no repr, error or log line shows a secret."""
    with caplog.at_level(logging.DEBUG), scripted_server(always(403, more=f"<Echo>{SECRET}</Echo>")) as server:
        store = open_cloud_store(parse_url(url), {**options, "endpoint_url": server.endpoint_url})
        with pytest.raises(DcpRemoteError) as info:
            store.put("key", [b"x"])
    assert_no_secret(info.value)
    parsed = CLOUDS[parse_url(url).scheme].parse("bucket", options).options
    shown = f"{store!r} {store} {vars(store)!r} {pickle.loads(pickle.dumps(store))!r} {parsed!r}"
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("dcp_remote")]
    assert SECRET not in shown + "".join(ours)
    assert store.url == url


ENDPOINTS = [
    f"http://alice:{SECRET}@127.0.0.1:9",
    f"http://{SECRET}@127.0.0.1:9/path",
    f"http://127.0.0.1:9/?X-Amz-Signature={SECRET}",
    f"http://127.0.0.1:9/#{SECRET}",
    f"alice:{SECRET}@127.0.0.1",
]


@pytest.mark.parametrize("endpoint_url", ENDPOINTS)
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_no_secret_in_an_endpoint(scheme: str, endpoint_url: str) -> None:
    """Give user info, a query or a fragment: opening the store fails, and the error does not show them."""
    with pytest.raises(InvalidArgumentError, match=r"endpoint_url.*credentials under their own names") as info:
        open_cloud_store(parse_url(f"{scheme}://bucket"), {"anon": True, "endpoint_url": endpoint_url})
    assert_no_secret(info.value)


@pytest.mark.parametrize("endpoint_url", ["localhost:9000", "127.0.0.1", "htp://localhost:9000"])
def test_an_endpoint_without_its_scheme(endpoint_url: str) -> None:
    """Give an endpoint without http:// or https://: opening the store fails and says what is missing."""
    with pytest.raises(InvalidArgumentError, match=r"url'\] must begin with http:// or https://\. endpoint="):
        open_cloud_store(parse_url("s3://bucket"), {"anon": True, "endpoint_url": endpoint_url})


def test_no_secret_in_an_endpoint_that_is_found(empty_environment: Path) -> None:
    """Give such an endpoint by a profile, and in Azure's connection string: the first request fails, unsent."""
    empty_environment.write_text(f"[default]\nendpoint_url = {ENDPOINTS[0]}\n")
    text = f"AccountName=account;AccountKey=a2V5;BlobEndpoint={ENDPOINTS[0]}"
    for url, options, named in (
        ("s3://bucket", OPTIONS, "of the profile"),
        ("az://container", {"connection_string": text}, "connection string"),
    ):
        with pytest.raises(InvalidArgumentError, match=named) as info:
            open_cloud_store(parse_url(url), options).head("key")
        assert_no_secret(info.value)


@pytest.mark.parametrize(
    "text",
    [
        f"Failed to parse: http://alice:{SECRET}@127.0.0.1:9",
        f"Failed to parse: alice:{SECRET}@127.0.0.1:9",
        f"GET https://host/key?sv=1&sig={SECRET}&se=2",
        f"GET https://host/key?X-Amz-Expires=1&X-Amz-Security-Token={SECRET}&X-Amz-Signature={SECRET}",
    ],
)
def test_errors_that_quote_secrets_are_not_chained(text: str) -> None:
    """Quote the URL of a proxy or a signed URL in a chained error: it is not shown, even if no secret is known."""
    outer = ValueError("no word of it")
    outer.__context__ = OSError(text)
    assert get_safe_cause(outer, []) is None
    assert get_safe_cause(ValueError("a@b is harmless"), []) is not None
    failure = translate(OSError(text), verb="get", url="s3://bucket", secrets=[])
    assert SECRET not in str(failure)
    assert "…" in str(failure)
