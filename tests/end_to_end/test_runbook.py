"""docs/runbook.md: each thing is broken once; what the page quotes is what is said, and its cure cures."""

from __future__ import annotations

import http.client
import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from dcp_remote import CheckpointManager, Retention
from dcp_remote.cli import main
from dcp_remote.errors import DcpRemoteError
from dcp_remote.testing.servers import S3Server
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

PAGE = Path(__file__).parent.parent.parent / "docs" / "runbook.md"
URL = "s3://my-bucket/run"

Answer = Callable[[HttpRequest], HttpAnswer | None]


class Night:
    """A run with checkpoints of steps 5 and 10, and all that a user was told since."""

    def __init__(self, url: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self._options, self._capsys = url, options, capsys
        self._said: list[str] = []
        self.model = torch.nn.Linear(512, 512)
        self.job(5, 10)
        self._said.clear()

    def manager(self, **settings: Any) -> CheckpointManager:
        """Return a manager of the run."""
        return CheckpointManager(self.url, storage_options=self._options, progress=False, **settings)

    def save(self, checkpoints: CheckpointManager, step: int) -> None:
        """Change the model, and save it."""
        with torch.no_grad():
            self.model.weight.add_(1)
        checkpoints.save(step, {"model": self.model}, wait=True)

    def job(self, *steps: int, restored: int | None = None, **settings: Any) -> int | None:
        """Run a job: it restores, and saves these steps."""
        with self.manager(**settings) as checkpoints:
            found = checkpoints.restore({"model": self.model}, restored)
            for step in steps:
                self.save(checkpoints, step)
        return found

    def fail(self, call: Callable[[], object]) -> None:
        """Call what raises, and note the error as a log shows it."""
        with pytest.raises(DcpRemoteError) as caught:
            call()
        self.note(f"{type(caught.value).__name__}: {caught.value}")

    def note(self, text: str) -> None:
        """Add to what was said."""
        self._said.append(text)

    def run(self, command: str, *arguments: object, code: int = 0) -> str:
        """Run a command, and return what it printed."""
        options = {"endpoint_url": "--endpoint-url", "region_name": "--region"}
        given = [
            text
            for name, value in self._options.items()
            for text in ([options[name], value] if name in options else ["--option", f"{name}={value}"])
        ]
        self._capsys.readouterr()
        assert main([command, self.url, *map(str, arguments), *given]) == code
        printed = "".join(self._capsys.readouterr())
        self.note(printed)
        return printed

    def compare(self, section: str, logged: str) -> None:
        """Find each fragment of the section's quotations in what was said."""
        said = _plain("\n".join([*self._said, logged]).replace(self.url, URL))
        for quoted in _quotations(section):
            for fragment in re.split(r"…|\n", quoted):
                assert _plain(fragment) in said, f"{fragment}\n---\n{said}"


def _plain(text: str) -> str:
    """Replace what differs each time, and all white space by one space."""
    text = text.replace(f"'{socket.gethostname()}, pid", "'gpu-07, pid")
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00", "TIME", text)
    text = re.sub(r"pid \d+, user \w+", "pid 4711, user ada", text)
    text = re.sub(r"(dcp_remote|torch) [\w.+]+", r"\1 1.0", text)
    return " ".join(text.split())


def _quotations(section: str) -> list[str]:
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert quoted, section
    return quoted


@pytest.fixture
def night(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Night:
    caplog.set_level(logging.INFO, logger="dcp_remote")
    return Night((tmp_path / "run").as_uri(), {}, capsys)


@contextmanager
def gate(server: S3Server, rules: list[Answer]) -> Iterator[dict[str, Any]]:
    """Stand between clients and a server: the first rule that answers does so in its place."""

    def answer(request: HttpRequest) -> HttpAnswer:
        for rule in rules:
            if (answered := rule(request)) is not None:
                return answered
        own = ("content-length", "connection", "transfer-encoding", "date", "server")
        connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc, timeout=30)
        try:
            headers = {name: value for name, value in request.headers.items() if name not in own}
            connection.request(request.method, request.path, body=request.body, headers=headers)
            response = connection.getresponse()
            kept = {name: value for name, value in response.getheaders() if name.lower() not in own}
            if request.method == "HEAD":
                kept["Content-Length"] = response.getheader("Content-Length", "0")
            return HttpAnswer(response.status, response.read(), kept)
        finally:
            connection.close()

    with scripted_server(answer) as between:
        yield {**server.storage_options, "endpoint_url": between.endpoint_url}


@pytest.fixture
def rules() -> list[Answer]:
    return []


@pytest.fixture
def bucket_night(
    s3_server: S3Server,
    rules: list[Answer],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> Iterator[Night]:
    caplog.set_level(logging.INFO, logger="dcp_remote")
    name = re.sub(r"\W|_", "-", request.node.name)[:60].strip("-")
    s3_server.create_bucket(name)
    with gate(s3_server, rules) as options:
        yield Night(f"s3://{name}/run", options, capsys)


def refuse(status: int, code: str, *methods: str) -> Answer:
    """Return the rule that answers requests of these methods (none: of all) by an error."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>x</Message></Error>".encode()

    def answer(request: HttpRequest) -> HttpAnswer | None:
        method = "DELETE" if request.method == "POST" else request.method  # S3 deletes many by a POST
        return HttpAnswer(status, body) if method in methods or not methods else None

    return answer


def folder_of(night: Night) -> Path:
    return Path(night.url.removeprefix("file://"))


def test_lost_catalog(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    (folder_of(night) / "catalog.json").unlink()
    night.fail(night.job)
    night.run("ls", code=1)
    night.run("recover")
    night.run("recover", "--yes")
    assert night.job(15) == 10
    night.compare("The catalog is lost or damaged", caplog.text)


def test_damaged_shard(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    shard = next(folder_of(night).glob("shards/*/*step-000000000010*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    night.fail(night.job)
    night.run("rm", "--step", 10, code=2)
    night.run("rm", "--step", 10, "--force", "--yes")
    assert night.job(10) == 5
    assert night.job(15) == 10
    night.run("verify", "--deep")
    night.compare("A shard is damaged or missing", caplog.text)


def test_every_checkpoint_is_damaged(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    """Lose the shard of weights that never change: what is left of the newest checkpoint is restored, and saved."""
    base = torch.nn.Linear(512, 512)
    state = {"model": night.model, "base": base}

    def job(*steps: int, exclude: str | tuple[str, ...] = (), **settings: Any) -> int | None:
        with night.manager(**settings) as checkpoints:
            found = checkpoints.restore(state, exclude=exclude)
            for step in steps:
                with torch.no_grad():
                    night.model.weight.add_(1)
                checkpoints.save(step, state, wait=True)
        return found

    job(15, 20, exclude="base.*")
    night.run("rm", "--step", "5-10", "--yes")
    saved = night.model.weight.clone()
    for shard in folder_of(night).glob("shards/*/*step-000000000015*"):
        shard.unlink()
    night.fail(job)
    night.run("verify", code=1)
    assert job(25, exclude="base.*", dedup=False) == 20
    assert torch.equal(night.model.weight, saved + 1)
    assert "no damage was found in step 25" in night.run("verify", code=1)
    night.run("rm", "--step", "15-20", "--yes")
    assert job(30) == 25
    night.run("verify", "--deep")
    night.compare("Every checkpoint is damaged", caplog.text)


def test_damaged_manifest(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    manifest = next(folder_of(night).glob("manifests/step-000000000010-*"))
    manifest.write_bytes(manifest.read_bytes()[:200])
    night.fail(night.job)
    night.run("rm", "--step", 10, "--force", "--yes")
    assert night.job(15) == 5
    night.run("gc", "--yes", "--grace-hours", 0)
    night.run("verify", "--deep")
    night.compare("A manifest is damaged", caplog.text)


def test_missing_shard(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    next(folder_of(night).glob("shards/*/*step-000000000010*")).unlink()
    night.fail(night.job)
    assert night.job(10, restored=5, dedup=False) == 5
    assert night.job(15) == 10


def test_fenced_job(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    with night.manager() as older, night.manager() as newer:
        older.restore({"model": night.model})
        night.save(older, 11)
        newer.restore({"model": night.model})
        night.save(newer, 12)
        night.fail(lambda: night.save(older, 13))
        night.save(newer, 13)
    night.compare("A second job writes", caplog.text)


def test_state_that_does_not_fit(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    night.model = torch.nn.Linear(512, 1024)
    night.fail(night.job)
    night.run("show", "--key", "model.*")
    night.compare("A job cannot restore", caplog.text)


def test_older_step(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    night.job(15)
    night.job(7, restored=5)
    night.run("ls")
    night.run("gc")
    assert night.job() == 7
    night.run("pin", 15)
    assert night.job(16, restored=15) == 15
    assert night.job() == 16
    night.run("rm", "--step", 7, "--step", 10, "--yes")
    night.compare("Training went back to an older step", caplog.text)


def test_full_store(bucket_night: Night, rules: list[Answer], caplog: pytest.LogCaptureFixture) -> None:
    rules.append(refuse(403, "QuotaExceeded", "PUT"))
    bucket_night.fail(lambda: bucket_night.job(15, timeout_seconds=20))
    bucket_night.run("rm", "--step", 5, "--yes", code=3)
    rules.clear()
    bucket_night.run("rm", "--step", 5, "--yes")
    assert bucket_night.job(15) == 10
    bucket_night.compare("The bucket is full, or its quota is used up", caplog.text)


@pytest.mark.parametrize("code", ["RequestTimeTooSkewed", "ExpiredToken", "InvalidAccessKeyId", "AccessDenied"])
def test_credentials_and_clock(
    bucket_night: Night, rules: list[Answer], caplog: pytest.LogCaptureFixture, code: str
) -> None:
    rules.append(refuse(403, code))
    bucket_night.fail(bucket_night.job)
    bucket_night.run("ls", code=3)
    rules.clear()
    assert bucket_night.job(15) == 10
    if code == "ExpiredToken":
        bucket_night.compare("Credentials are wrong or have expired", caplog.text)
    if code == "RequestTimeTooSkewed":
        bucket_night.compare("The clock of a machine is wrong", caplog.text)


def test_no_permission_to_delete(bucket_night: Night, rules: list[Answer], caplog: pytest.LogCaptureFixture) -> None:
    """Retention leaves objects to gc, which deletes them with permission."""
    rules.append(refuse(403, "AccessDenied", "DELETE"))
    bucket_night.job(15, 20, retention=Retention(keep_last=1))
    bucket_night.run("gc")
    rules.clear()
    bucket_night.run("gc", "--yes", "--grace-hours", 0)
    assert "\n0 objects, 0 B: younger" in bucket_night.run("gc")
    bucket_night.compare("The job may not delete", caplog.text)


def test_orphans_grow(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    """Three attempts were killed before their commit: their shards are there, and no manifest."""
    before = (folder_of(night) / "catalog.json").read_bytes()
    night.job(11, 12, 13)
    for manifest in folder_of(night).glob("manifests/*-00000000001[123]-*"):
        manifest.unlink()
    (folder_of(night) / "catalog.json").write_bytes(before)
    night.run("gc")
    night.run("gc", "--yes", "--grace-hours", 0)
    assert night.job(15) == 10
    night.compare("Space grows that no checkpoint explains", caplog.text)
