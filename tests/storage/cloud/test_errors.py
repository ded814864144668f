"""Every way in which a cloud refuses, as the error of ours that says what to do; and that none tells a secret."""

from __future__ import annotations

import errno
import inspect
import json
import logging
import pickle
import socket
import ssl
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

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
from dcp_remote.storage.base import Version
from dcp_remote.storage.cloud.errors import classify_error, get_safe_cause, translate
from dcp_remote.storage.cloud.store import CLOUDS, CloudStore, open_cloud_store
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.servers import HttpAnswer, HttpRequest, S3Server, scripted_server
from tests.benchmark.server.certificates import make_certificates

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "a-session-token+of/many=characters"
OPTIONS = {
    "aws_access_key_id": "AKIAIOSFODNN7EXAMPLE",
    "aws_secret_access_key": SECRET,
    "aws_session_token": TOKEN,
    "region_name": "us-east-1",
}

# Expected class for each class of the two modules. A class added by a new release fails the test until it is listed.
OBSTORE = {
    StorageError: ["BaseError", "JoinError", "NotSupportedError"],
    TransientStorageError: ["GenericError"],
    ObjectNotFoundError: ["NotFoundError"],
    ConditionFailedError: ["AlreadyExistsError", "NotModifiedError", "PreconditionError"],
    PermissionDeniedError: ["PermissionDeniedError", "UnauthenticatedError"],
    InvalidArgumentError: ["InvalidPathError", "UnknownConfigurationKeyError"],
}
BOTOCORE = {
    StorageError: [
        "ImminentRemovalWarning",
        "MissingServiceIdError",
        "SSLError",
        "UndefinedModelAttributeError",
        "UnsupportedTLSVersionWarning",
    ],
    TransientStorageError: [
        "CapacityNotAvailableError",
        "ChecksumError",
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "ConnectionError",
        "EndpointConnectionError",
        "FlexibleChecksumError",
        "HTTPClientError",
        "IncompleteReadError",
        "MetadataRetrievalError",
        "ProxyConnectionError",
        "ReadTimeoutError",
        "ResponseStreamingError",
    ],
    PermissionDeniedError: [
        "ClientError",
        "CredentialRetrievalError",
        "EventStreamError",
        "LoginAuthorizationCodeError",
        "LoginError",
        "LoginInsufficientPermissions",
        "LoginRefreshRequired",
        "LoginTokenLoadError",
        "NoAuthTokenError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "RefreshWithMFAUnsupportedError",
        "SSOError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "UnknownCredentialError",
    ],
    InvalidArgumentError: [
        "AliasConflictParameterError",
        "ApiVersionNotFoundError",
        "AwsChunkedWrapperError",
        "BaseEndpointResolverError",
        "BotoCoreError",
        "ConfigNotFound",
        "ConfigParseError",
        "DataNotFoundError",
        "EndpointProviderError",
        "EndpointResolutionError",
        "EndpointVariantError",
        "InfiniteLoopConfigError",
        "InvalidChecksumConfigError",
        "InvalidConfigError",
        "InvalidDNSNameError",
        "InvalidDefaultsMode",
        "InvalidEndpointConfigurationError",
        "InvalidEndpointDiscoveryConfigurationError",
        "InvalidExpressionError",
        "InvalidHostLabelError",
        "InvalidIMDSEndpointError",
        "InvalidIMDSEndpointModeError",
        "InvalidMaxRetryAttemptsError",
        "InvalidProxiesConfigError",
        "InvalidRegionError",
        "InvalidRetryConfigurationError",
        "InvalidRetryModeError",
        "InvalidS3AddressingStyleError",
        "InvalidS3UsEast1RegionalEndpointConfigError",
        "InvalidSTSRegionalEndpointsConfigError",
        "MD5UnavailableError",
        "MissingDependencyException",
        "MissingParametersError",
        "NoRegionError",
        "OperationNotPageableError",
        "PaginationError",
        "ParamValidationError",
        "ProfileNotFound",
        "RangeError",
        "ServiceNotInRegionError",
        "StubAssertionError",
        "StubResponseError",
        "UnStubbedResponseError",
        "UnknownClientMethodError",
        "UnknownEndpointError",
        "UnknownEndpointResolutionBuiltInName",
        "UnknownFIPSEndpointError",
        "UnknownKeyError",
        "UnknownParameterError",
        "UnknownRegionError",
        "UnknownServiceError",
        "UnknownServiceStyle",
        "UnknownSignatureVersionError",
        "UnknownTokenProviderError",
        "UnseekableStreamError",
        "UnsupportedOutpostResourceError",
        "UnsupportedS3AccesspointConfigurationError",
        "UnsupportedS3ArnError",
        "UnsupportedS3ConfigurationError",
        "UnsupportedS3ControlArnError",
        "UnsupportedS3ControlConfigurationError",
        "UnsupportedServiceProtocolsError",
        "UnsupportedSignatureVersionError",
        "ValidationError",
        "WaiterConfigError",
        "WaiterError",
    ],
}


@pytest.mark.parametrize(
    ("module", "table"), [(obstore.exceptions, OBSTORE), (botocore.exceptions, BOTOCORE)], ids=["obstore", "botocore"]
)
def test_every_class_is_mapped(module: object, table: dict[type[DcpRemoteError], list[str]]) -> None:
    """Walk the module; make one of each class without its constructor; compare with the table above."""
    expected = {name: kind for kind, names in table.items() for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # obstore's NotFoundError
        found = {
            name: classify_error(value.__new__(value))
            for name, value in inspect.getmembers(module, inspect.isclass)
            if issubclass(value, Exception) and value.__module__ == module.__name__  # type: ignore[attr-defined]  # a module
        }
    assert found == expected


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


def body(code: str, more: str = "") -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>because</Message>{more}</Error>".encode()


def always(
    status: int, code: str = "", headers: dict[str, str] | None = None, more: str = ""
) -> Callable[[HttpRequest], HttpAnswer]:
    return lambda _: HttpAnswer(status, body(code, more), headers or {})


def open_at(endpoint_url: str, **options: object) -> CloudStore:
    return open_cloud_store(parse_url("s3://bucket/run"), {**OPTIONS, "endpoint_url": endpoint_url, **options})


# TLS alert of a server that has no version in common with the client.
TLS_1_1 = b"\x15\x03\x01\x00\x02\x02\x46"

VERBS: dict[str, Callable[[CloudStore], object]] = {
    "head": lambda store: store.head("key"),
    "get": lambda store: store.get("key", limit_bytes=10),
    "get_into": lambda store: store.get_into("key", 0, memoryview(bytearray(4))),
    "put": lambda store: store.put("key", [b"x"]),
    "list": lambda store: list(store.list()),
    "delete": lambda store: _raise_first(store.delete(["key"])),
}


def _raise_first(failed: Mapping[str, StorageError]) -> None:
    raise next(iter(failed.values()))


def catch_error(store: CloudStore, verb: str) -> DcpRemoteError:
    """Return the error of one verb after a round through pickle; check that it shows no secret."""
    with pytest.raises(DcpRemoteError) as info:
        VERBS[verb](store)
    shown = "".join(traceback.format_exception(info.value)) + repr(info.value)
    for secret in (SECRET, TOKEN):
        assert secret not in shown
    copy = pickle.loads(pickle.dumps(info.value))
    assert (type(copy), str(copy)) == (type(info.value), str(info.value))
    return info.value


def test_bucket_missing_on_moto(s3_server: S3Server) -> None:
    """Read, list and save into a missing bucket: one message, with name, server, region, and how to create it."""
    store = open_cloud_store(parse_url("s3://no-such-bucket/run"), s3_server.storage_options)
    state = {"w": torch.zeros(2)}
    run = dcp_remote.CheckpointManager(store)
    calls: list[Callable[[], object]] = [
        lambda: VERBS["put"](store),
        lambda: store.put("key", [b"x"], condition="absent"),
        lambda: VERBS["list"](store),
        run.run.latest,
        lambda: run.restore(state),
        lambda: run.restore(state, "latest", must_exist=True),
        lambda: run.save(1, state, wait=True),
        lambda: dcp_remote.load(store),
        lambda: dcp_remote.open_run(store).wait_for_newer(None, timeout_seconds=5),
    ]
    messages = set()
    for call in calls:
        with pytest.raises(BucketNotFoundError) as caught:
            call()
        messages.add(str(caught.value))
    run.close()
    url = s3_server.endpoint_url
    expected = (
        "The bucket does not exist, and is never created implicitly. Create it (`aws s3 mb s3://no-such-bucket --region"
        f" us-east-1 --endpoint-url {url}`), or correct the URL, the region_name or the endpoint_url. "
        f"bucket='no-such-bucket' endpoint='{url}' region='us-east-1'"
    )
    assert messages == {expected}


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


@pytest.mark.parametrize("verb", VERBS)
def test_access_denied(verb: str) -> None:
    """Answer 403 and echo the token, as some stores do: the error names verb and URL, and not the token."""
    with scripted_server(always(403, "AccessDenied", more=f"<CanonicalRequest>{TOKEN}</CanonicalRequest>")) as server:
        error = catch_error(open_at(server.endpoint_url), verb)
        assert type(error) is PermissionDeniedError
        assert error.details["verb"] == verb
        assert str(error.details["url"]).startswith("s3://bucket/run")


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "RequestTimeTooSkewed", "clock of this machine is wrong"),
        (403, "InvalidAccessKeyId", "does not know this access key"),
        (403, "SignatureDoesNotMatch", "not that of the access key"),
        (400, "ExpiredToken", "have expired"),
    ],
)
@pytest.mark.parametrize("verb", ["put", "get"])
def test_invalid_credentials(status: int, code: str, advice: str, verb: str) -> None:
    """Refuse credentials with each code, whatever the status: the error explains the code."""
    with scripted_server(always(status, code)) as server:
        error = catch_error(open_at(server.endpoint_url), verb)
        assert type(error) is PermissionDeniedError
        assert advice in str(error)
        assert error.details["code"] == code


@pytest.mark.parametrize("verb", ["put", "get", "get_into"])
@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "QuotaExceeded", "is full"),  # Ceph, VersityGW
        (507, "XMinioStorageFull", "is full"),
        (400, "XMinioAdminBucketQuotaExceeded", "is full"),
        (413, "EntityTooLarge", "no object of this size"),
        (403, "InvalidObjectState", "an archive"),
        (400, "InvalidRequest", "'checksum_algorithm'"),
        (501, "NotImplemented", "'checksum_algorithm'"),
    ],
)
def test_final_errors(status: int, code: str, advice: str, verb: str) -> None:
    """Answer one request with a final code: the error explains it, and no diagnosis is sent."""

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(404, body("NoSuchKey")) if "diagnosis" in request.path else HttpAnswer(status, body(code))

    with scripted_server(answer) as server:
        error = catch_error(open_at(server.endpoint_url), verb)
        assert not any("diagnosis" in request.path for request in server.requests)
    assert type(error) is StorageError
    assert advice in str(error)
    assert error.details["code"] == code


def test_an_unsupported_condition_is_final() -> None:
    """Answer 501 to a conditional put: the put was not carried out, and the error is not transient."""
    with scripted_server(always(501, "NotImplemented")) as server:
        with pytest.raises(StorageError) as info:
            open_at(server.endpoint_url).put("key", [b"x"], condition="absent")
        assert type(info.value) is StorageError
        assert len(server.requests) == 1


def test_a_conflict_without_a_condition_is_transient() -> None:
    """Answer 409 to a plain put, since another request is under way: the error is transient."""
    with scripted_server(always(409, "OperationAborted")) as server:
        error = catch_error(open_at(server.endpoint_url), "put")
    assert type(error) is TransientStorageError
    assert error.details["code"] == "OperationAborted"


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown")])
def test_the_code_of_a_busy_store_is_shown(status: int, code: str) -> None:
    """Answer a direct read with 500 or 503: the error has the code."""
    with scripted_server(always(status, code)) as server:
        assert catch_error(open_at(server.endpoint_url), "get_into").details["code"] == code


def test_a_refused_head_is_diagnosed() -> None:
    """Refuse a HEAD, whose answer has no body: one GET finds the code."""
    with scripted_server(always(403, "InvalidAccessKeyId")) as server:
        error = catch_error(open_at(server.endpoint_url), "head")
    assert type(error) is PermissionDeniedError
    assert "does not know this access key" in str(error)


@pytest.mark.parametrize("status", [409, 412])
def test_conditions(status: int) -> None:
    """Give both answers to a lost race."""
    with scripted_server(always(status, "PreconditionFailed")) as server:
        store = open_at(server.endpoint_url)
        with pytest.raises(ConditionFailedError):
            store.put("key", [b"x"], condition="absent")
        with pytest.raises(ConditionFailedError):
            store.put("key", [b"x"], condition=Version(etag='"abc"'))
        assert len(server.requests) == 2


def test_a_swap_of_an_absent_object() -> None:
    """Answer 404 to If-Match, as S3 does for an absent object: the condition failed."""
    with scripted_server(always(404, "NoSuchKey")) as server, pytest.raises(ConditionFailedError):
        open_at(server.endpoint_url).put("key", [b"x"], condition=Version(etag='"abc"'))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_errors(status: int, verb: str) -> None:
    """Answer every verb with overload and internal errors."""
    with scripted_server(always(status, "SlowDown")) as server:
        assert type(catch_error(open_at(server.endpoint_url), verb)) is TransientStorageError


def test_a_storm_is_not_doubled() -> None:
    """Fail a hundred requests of each kind with 503: they cost one diagnosis."""
    with scripted_server(always(503, "SlowDown")) as server:
        store = open_at(server.endpoint_url)
        for _ in range(100):
            for verb in ("put", "get", "get_into"):
                with pytest.raises(TransientStorageError):
                    VERBS[verb](store.child("c"))
        assert len(server.requests) == 301


@pytest.mark.parametrize(
    ("status", "headers", "more"),
    [
        (301, {"x-amz-bucket-region": "eu-central-1"}, ""),
        (307, {"x-amz-bucket-region": "eu-central-1", "Location": "http://127.0.0.1:9/elsewhere"}, ""),
        (400, {}, "<Region>eu-central-1</Region>"),
    ],
)
@pytest.mark.parametrize("verb", ["get", "put", "list"])
def test_wrong_region(status: int, headers: dict[str, str], more: str, verb: str) -> None:
    """Report another region in each of three ways: the error names both and the option; no redirect is followed."""
    with scripted_server(always(status, "PermanentRedirect", headers, more)) as server:
        error = catch_error(open_at(server.endpoint_url), verb)
    assert type(error) is StorageError
    assert "storage_options['region_name']" in str(error)
    assert (error.details["bucket_region"], error.details["used_region"]) == ("eu-central-1", "us-east-1")


def test_a_diagnosis_does_not_settle_a_conditional_put() -> None:
    """Fail a conditional put and the diagnosis: the put may have been carried out, so its error stays transient."""

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(500) if request.method == "PUT" else HttpAnswer(400, body("ExpiredToken"))

    with scripted_server(answer) as server:
        store = open_at(server.endpoint_url)
        for condition in ("absent", Version('"x"')):
            with pytest.raises(TransientStorageError, match="have expired"):
                store.put("key", [b"x"], condition=condition)


def test_a_redirect_without_a_region() -> None:
    """Answer 301 without a region: the error names endpoint_url."""
    with scripted_server(always(301)) as server:
        error = catch_error(open_at(server.endpoint_url), "put")
    assert type(error) is StorageError
    assert "endpoint_url" in str(error)


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_a_certificate_of_another_host(tmp_path: Path) -> None:
    """Connect to an address that the certificate does not name: the error names the host."""
    authority, chain = make_certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain)

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with suppress(OSError):
                    context.wrap_socket(connection, server_side=True).close()

    with socket.create_server(("127.0.0.2", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        error = catch_error(open_at(f"https://127.0.0.2:{listener.getsockname()[1]}", verify=str(authority)), "put")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert type(error) is StorageError
    assert "not trusted" in str(error)
    assert "'127.0.0.2'" in str(error.details["cause"])


def test_delete_reports_each_key() -> None:
    """Refuse one key of a batch (200 with an error inside, as S3 does): that key is reported, a missing one not."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.method == "POST":
            return HttpAnswer(
                200, b"<DeleteResult>" + body("AccessDenied", "<Key>run/locked</Key>")[21:] + b"</DeleteResult>"
            )
        return HttpAnswer(
            *{"/bucket/run/locked": (403, body("AccessDenied")), "/bucket/run/z": (404, b"")}.get(
                request.path, (204, b"")
            )
        )

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
    assert len(server.requests) == 3


def test_a_delete_without_a_grant_ends_soon() -> None:
    """Deny every key: after the batch and four single keys, the other 705 are reported as denied."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.method == "POST":
            failed = "".join(f"<Error><Key>run/{key}</Key><Code>AccessDenied</Code></Error>" for key in keys)
            return HttpAnswer(200, f"<DeleteResult>{failed}</DeleteResult>".encode())
        return HttpAnswer(403, body("AccessDenied"))

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
            return HttpAnswer(403, body("AccessDenied"))
        return HttpAnswer(204)

    with scripted_server(answer) as server:
        failed = open_at(server.endpoint_url).delete([f"key-{number}" for number in range(10)])
    assert set(failed) == {f"key-{number}" for number in denied}


def test_a_delete_ends_at_the_deadline() -> None:
    """Let the deadline pass after three single keys: the other 97 are reported."""
    left = [3]

    def answer(request: HttpRequest) -> HttpAnswer:
        left[0] -= request.method == "DELETE"
        return HttpAnswer(403, body("AccessDenied")) if request.method == "POST" else HttpAnswer(204)

    with scripted_server(answer) as server, limit_requests(lambda: float(left[0])):
        failed = open_at(server.endpoint_url).delete([f"key-{number}" for number in range(100)])
    assert len(failed) == 97
    assert {type(error) for error in failed.values()} == {TransientStorageError}
    assert [request.method for request in server.requests] == ["POST", "DELETE", "DELETE", "DELETE"]


@pytest.fixture
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Remove all configuration of AWS; return the path where `config` would be."""
    for name in (
        "AWS_PROFILE",
        "AWS_DEFAULT_PROFILE",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "config"


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


@pytest.mark.usefixtures("empty_environment")
@pytest.mark.parametrize("verb", VERBS)
def test_unknown_profile(verb: str) -> None:
    """Name a profile that does not exist."""
    with pytest.raises(InvalidArgumentError, match="nobody"):
        VERBS[verb](open_cloud_store(parse_url("s3://bucket"), {"profile_name": "nobody"}))


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
        shown = (
            repr(store)
            + str(store)
            + repr(vars(store))
            + repr(CLOUDS[parse_url(url).scheme].parse("bucket", options).options)
        )
        shown += repr(pickle.loads(pickle.dumps(store))) + "".join(traceback.format_exception(info.value))
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
@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket", "az://bucket"])
def test_no_secret_in_an_endpoint(url: str, endpoint_url: str) -> None:
    """Give user info, a query or a fragment: opening the store fails, and the error does not show them."""
    with pytest.raises(InvalidArgumentError, match=r"endpoint_url.*credentials under their own names") as info:
        open_cloud_store(parse_url(url), {"anon": True, "endpoint_url": endpoint_url})
    assert SECRET not in "".join(traceback.format_exception(info.value))


@pytest.mark.parametrize("endpoint_url", ["localhost:9000", "127.0.0.1", "htp://localhost:9000"])
def test_an_endpoint_without_its_scheme(endpoint_url: str) -> None:
    """Give an endpoint without http:// or https://: opening the store fails and says what is missing."""
    with pytest.raises(InvalidArgumentError, match=r"url'\] must begin with http:// or https://\. endpoint="):
        open_cloud_store(parse_url("s3://bucket"), {"anon": True, "endpoint_url": endpoint_url})


@pytest.mark.parametrize("endpoint_url", ENDPOINTS)
@pytest.mark.parametrize("source", ["environment", "profile"])
@pytest.mark.parametrize("verb", VERBS)
def test_no_secret_in_an_endpoint_that_botocore_finds(
    verb: str, source: str, endpoint_url: str, empty_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give such an endpoint by environment or profile: the first request fails before it is sent."""
    if source == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint_url)
    else:
        empty_environment.write_text(f"[default]\nendpoint_url = {endpoint_url}\n")
    with pytest.raises(InvalidArgumentError) as info:
        VERBS[verb](open_cloud_store(parse_url("s3://bucket"), {**OPTIONS}))
    assert SECRET not in "".join(traceback.format_exception(info.value))


@pytest.mark.parametrize("endpoint_url", ENDPOINTS)
def test_no_secret_in_a_connection_string(endpoint_url: str) -> None:
    """Give such an endpoint in Azure's connection string, where the portal puts a signature for some services."""
    text = f"AccountName=account;AccountKey=a2V5;BlobEndpoint={endpoint_url}"
    with pytest.raises(InvalidArgumentError, match="connection string") as info:
        open_cloud_store(parse_url("az://container"), {"connection_string": text}).head("key")
    assert SECRET not in "".join(traceback.format_exception(info.value))


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
