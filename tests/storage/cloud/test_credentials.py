"""Credentials that others have replaced: a long job goes on with what is good now, and fails at once without."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from json import dumps
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from botocore.session import Session
from botocore.utils import ContainerMetadataFetcher

from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.errors import PermissionDeniedError, TransientStorageError
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.cloud.credentials import S3Credentials
from dcp_remote.storage.cloud.s3 import S3
from dcp_remote.storage.cloud.store import CloudStore, open_cloud_store
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.url import parse_url
from tests.support.clouds import OBJECT_HEADERS, VERBS, answer_range, error_body, listing
from tests.support.scripted_server import HttpAnswer, HttpRequest, ScriptedServer, scripted_server

DATA = bytes(range(256))


class TokenService:
    """Fake STS, which gives KEY1 for five minutes, or refuses with a status and code."""

    def __init__(self, status: int = 200, code: str = "") -> None:
        self.status, self.code = status, code

    def __call__(self, _request: HttpRequest) -> HttpAnswer:
        if self.status != 200:
            return HttpAnswer(self.status, f"<ErrorResponse>{error_body(self.code).decode()}</ErrorResponse>".encode())
        expires = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = "<AccessKeyId>KEY1</AccessKeyId><SecretAccessKey>SECRET</SecretAccessKey>"
        result = (
            f"<Credentials>{keys}<SessionToken>TOKEN1</SessionToken><Expiration>{expires}</Expiration></Credentials>"
        )
        name = "AssumeRoleWithWebIdentity"
        return HttpAnswer(200, f"<{name}Response><{name}Result>{result}</{name}Result></{name}Response>".encode())


class Bucket:
    """Fake bucket that accepts requests signed with the currently valid access key and token."""

    def __init__(self, *, status: int = 403, code: str = "ExpiredToken") -> None:
        self.good = 1
        self.is_busy = False
        self._refusal = HttpAnswer(status, error_body(code))

    def __call__(self, request: HttpRequest) -> HttpAnswer:
        if self.is_busy:
            return HttpAnswer(503, error_body("ServiceUnavailable"))
        if get_keys(request) != (f"KEY{self.good}", f"TOKEN{self.good}"):
            return self._refusal
        if request.method == "PUT":
            return HttpAnswer(200, headers=OBJECT_HEADERS)
        if request.method == "DELETE":
            return HttpAnswer(204)
        if request.method == "POST":
            return HttpAnswer(200, b"<DeleteResult/>")
        return HttpAnswer(200, listing()) if "list-type" in request.path else answer_range(request, DATA)


def get_keys(request: HttpRequest) -> tuple[str, str]:
    """Return access key and token of a request, from its URL or its headers."""
    query = parse_qs(urlsplit(request.path).query)
    if "X-Amz-Credential" in query:
        return query["X-Amz-Credential"][0].split("/")[0], query["X-Amz-Security-Token"][0]
    match = re.search(r"Credential=(\w+)/", request.headers["authorization"])
    assert match is not None
    return match[1], unquote(request.headers["x-amz-security-token"])


class Role:
    """Fake service that issues numbered credentials to containers."""

    def __init__(self, *, minutes: float = 60) -> None:
        self.number = 1
        self.fails = False
        self.is_new_each_time = False
        self.minutes = minutes

    def __call__(self, _request: HttpRequest) -> HttpAnswer:
        if self.fails:
            return HttpAnswer(500)
        expires = datetime.now(UTC) + timedelta(minutes=self.minutes)
        keys = {"AccessKeyId": f"KEY{self.number}", "SecretAccessKey": "SECRET", "Token": f"TOKEN{self.number}"}
        self.number += self.is_new_each_time
        return HttpAnswer(200, dumps({**keys, "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ")}).encode())


@pytest.fixture(autouse=True)
def credentials_file(empty_environment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remove all configuration of AWS except one file of this test; return its path."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return empty_environment.parent / "credentials"


def write(path: Path, number: int) -> None:
    path.write_text(
        f"[default]\naws_access_key_id = KEY{number}\naws_secret_access_key = SECRET\n"
        f"aws_session_token = TOKEN{number}\n"
    )


def open_at(server: ScriptedServer) -> CloudStore:
    return open_cloud_store(parse_url("s3://bucket/run"), {"endpoint_url": server.endpoint_url})


def read(store: ObjectStore) -> bytes:
    buffer = bytearray(100)
    store.get_into("key", 0, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("status", "code"), [(403, "ExpiredToken"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId")]
)
def test_a_credentials_file_that_was_rewritten(status: int, code: str, verb: str, credentials_file: Path) -> None:
    """Rewrite the file and refuse the old key: the error is transient, and each verb passes at its second attempt."""
    write(credentials_file, 1)
    bucket = Bucket(status=status, code=code)
    with scripted_server(bucket) as server:
        store = open_at(server)
        for other in VERBS.values():  # all clients get their credentials
            other(store)
        bucket.good = 2
        write(credentials_file, 2)
        with pytest.raises(TransientStorageError, match="newer ones were found"):
            VERBS[verb](store)
        for other in VERBS.values():
            other(store)


def test_a_role_that_was_given_new_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace credentials early, while sixteen threads read: the role is asked once more, and every read passes."""
    role, bucket = Role(), Bucket()
    with scripted_server(role) as container, scripted_server(bucket) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{container.endpoint_url}/keys")
        store = open_at(server)
        read(store)
        assert len(container.requests) == 1
        role.number = bucket.good = 2
        policy = RetryPolicy(first_delay_seconds=0.01)
        retries: Counter[int] = Counter()

        def read_with_retries(number: int) -> bytes:
            return read(RetryingStore(store, Deadline(60), policy, on_retry=lambda *_: retries.update([number])))

        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(read_with_retries, range(100)))
        assert results == [DATA[:100]] * 100
        assert set(retries.values()) <= {1}
        assert len(container.requests) == 2
        # A late read may have been repeated by obstore; the next read is direct.
        read(store)
        assert "X-Amz-Signature" in server.requests[-1].path


def test_a_role_whose_credentials_are_all_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue new credentials at every call and refuse them all: the role is asked only once more, with one retry."""
    role, bucket = Role(), Bucket(code="AccessDenied")
    role.number, role.is_new_each_time = 5, True
    with scripted_server(role) as container, scripted_server(bucket) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{container.endpoint_url}/keys")
        store = open_at(server)
        policy = RetryPolicy(first_delay_seconds=0.01)
        for _ in range(5):
            with pytest.raises(PermissionDeniedError, match="s3:PutObject"):
                RetryingStore(store, Deadline(60), policy).put("key", [b"x"])
        assert len(container.requests) == 2
        assert len(server.requests) == 6


def test_an_unchanged_file_fails_at_once(credentials_file: Path) -> None:
    """Refuse the key of an unchanged file: one request, one error; after the file is rewritten, the next put passes."""
    write(credentials_file, 2)
    bucket = Bucket()
    with scripted_server(bucket) as server:
        store = open_at(server)
        for number in range(1, 4):
            with pytest.raises(PermissionDeniedError, match="have expired"):
                store.put("key", [b"x"])
            assert len(server.requests) == number
        write(credentials_file, 1)
        provider = store._provider
        assert isinstance(provider, S3)
        provider._renew_again_at = 0.0
        with pytest.raises(TransientStorageError):
            store.put("key", [b"x"])
        store.put("key", [b"x"])


def test_a_diagnosis_with_replaced_credentials_is_not_reused(credentials_file: Path) -> None:
    """Find newer credentials while a diagnosis with the old ones is under way: the next diagnosis is made anew."""
    write(credentials_file, 1)
    asked, go_on = threading.Event(), threading.Event()
    bucket = Bucket()

    def answer(request: HttpRequest) -> HttpAnswer:
        if "dcp-remote-diagnosis" in request.path and not asked.is_set():
            asked.set()
            assert go_on.wait(30)
        return bucket(request)

    with scripted_server(answer) as server, ThreadPoolExecutor(2) as pool:
        store = open_at(server)
        read(store)
        provider, bucket.good = store._provider, 2
        old = provider.credentials.last_given
        early = pool.submit(provider.diagnose, "run", reuse=True)
        assert asked.wait(30)
        write(credentials_file, 2)
        renewal = pool.submit(provider.renew_credentials, old)
        while provider.credentials.last_given is old:
            time.sleep(0.01)
        go_on.set()
        diagnosis = early.result()
        assert type(diagnosis) is PermissionDeniedError
        assert renewal.result()
        assert provider.diagnose("run", reuse=True) is None


def test_no_other_credentials_are_found(credentials_file: Path) -> None:
    """Delete the file and refuse its key: the error says both."""
    write(credentials_file, 1)
    bucket = Bucket()
    with scripted_server(bucket) as server:
        store = open_at(server)
        read(store)
        bucket.good = 2
        credentials_file.unlink()
        with pytest.raises(
            PermissionDeniedError, match=r"have expired.*No other credentials were found.*No credentials"
        ) as info:
            read(store)
        assert info.value.details["code"] == "ExpiredToken"


def test_two_clients_of_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one client renew its credentials: the other client of the store uses the new ones as well."""
    role, bucket = Role(minutes=5), Bucket()  # near expiry, so botocore asks the service at every call
    with scripted_server(role) as container, scripted_server(bucket) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{container.endpoint_url}/keys")
        store = open_at(server)
        store.get("key", limit_bytes=1000)
        role.number = bucket.good = 2
        store.put("key", [b"x"])  # puts have a client of their own
        store.get("key", limit_bytes=1000)
        assert [get_keys(request)[0] for request in server.requests] == ["KEY1", "KEY2", "KEY2"]


def test_a_credentials_service_that_fails_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail an early renewal: the last credentials are returned again, with an expiry that makes obstore ask soon."""
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    role = Role(minutes=5)
    with scripted_server(role) as container:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{container.endpoint_url}/keys")
        found = Session().get_credentials()
        assert found is not None
        credentials = S3Credentials(found)
        assert credentials()["access_key_id"] == "KEY1"
        role.fails = True
        again = credentials()
        assert again["access_key_id"] == "KEY1"
        assert again["expires_at"] is not None
        assert again["expires_at"] - datetime.now(UTC) < timedelta(minutes=6)
        role.fails, role.number, role.minutes = False, 2, -5
        assert credentials()["access_key_id"] == "KEY1"  # what the service gives has expired
        role.minutes = 5
        assert credentials()["access_key_id"] == "KEY2"
        assert credentials.secrets == ("KEY1", "SECRET", "TOKEN1", "KEY2", "SECRET", "TOKEN2")


def use_web_identity(monkeypatch: pytest.MonkeyPatch, folder: Path, server: ScriptedServer) -> Path:
    """Configure a role for a token in a file, whose STS is the server; return the file."""
    token = folder / "token"
    token.write_text("token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.endpoint_url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return token


@pytest.mark.parametrize("failure", ["agent", "refusal", "token"])
@pytest.mark.parametrize("verb", ["put", "swap", "list"])
def test_a_failed_renewal_is_no_cause(verb: str, failure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Answer 503 while credentials cannot be renewed: a later attempt may pass, until the last ones are refused."""
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    role, service, bucket = Role(minutes=5), TokenService(), Bucket()
    with scripted_server(role) as container, scripted_server(service) as sts, scripted_server(bucket) as server:
        if failure == "agent":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{container.endpoint_url}/keys")
        else:
            token = use_web_identity(monkeypatch, tmp_path, sts)
        store = open_at(server)
        VERBS[verb](store)
        if failure == "agent":
            role.fails = True
        elif failure == "refusal":
            service.status, service.code = 403, "AccessDenied"
        else:
            token.unlink()
        bucket.is_busy = True
        with pytest.raises(TransientStorageError):
            VERBS[verb](store)
        bucket.is_busy, bucket.good = False, 2
        with pytest.raises(PermissionDeniedError, match=r"have expired.*No other credentials were found"):
            VERBS[verb](store)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "Throttling", TransientStorageError),
        (400, "IDPCommunicationError", TransientStorageError),
        (503, "ServiceUnavailable", TransientStorageError),
        (429, "", TransientStorageError),
        (403, "AccessDenied", PermissionDeniedError),
    ],
)
def test_a_busy_token_service(
    status: int, code: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Let STS put off the first request, or refuse it: only a refusal is final. The next attempt passes."""
    service = TokenService(status, code)
    with scripted_server(service) as sts, scripted_server(Bucket()) as server:
        use_web_identity(monkeypatch, tmp_path, sts)
        store = open_at(server)
        with pytest.raises(kind, match="cannot be renewed") as info:
            store.put("key", [b"x"])
        assert type(info.value) is kind
        assert server.requests == []
        service.status = 200
        store.put("key", [b"x"])


@pytest.mark.parametrize(("given", "attempts"), [("1", 3), ("5", 5)])
def test_an_instance_that_answers_late(given: str, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail all but the last attempt to ask the instance: its credentials are found. A user may give more."""
    failures = attempts - 1

    def answer(request: HttpRequest) -> HttpAnswer:
        nonlocal failures
        if request.method == "PUT":
            return HttpAnswer(200, b"token")
        if failures:
            failures -= 1
            return HttpAnswer(500)
        if request.path.endswith("/security-credentials/"):
            return HttpAnswer(200, b"role")
        keys = {"Code": "Success", "AccessKeyId": "KEY1", "SecretAccessKey": "SECRET", "Token": "TOKEN1"}
        return HttpAnswer(200, dumps({**keys, "Expiration": "2100-01-01T00:00:00Z"}).encode())

    with scripted_server(answer) as instance, scripted_server(Bucket()) as server:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", instance.endpoint_url)
        monkeypatch.setenv("AWS_METADATA_SERVICE_NUM_ATTEMPTS", given)
        open_at(server).put("key", [b"x"])
        assert len(instance.requests) == 1 + attempts + 1
