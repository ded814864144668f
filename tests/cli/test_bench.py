"""Tests of `dcp-remote bench` through its command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_remote.cli import main
from dcp_remote.cli.bench import parse_bytes
from dcp_remote.common.units import MiB
from dcp_remote.storage import Buffer, LocalStore, Version, open_store
from dcp_remote.storage.base import Condition
from dcp_remote.testing.servers import HttpAnswer, HttpRequest, S3Server, scripted_server
from tests.benchmark.server.server import BenchServer, bench_server
from tests.benchmark.server.shape import Shape

BYTES = ["--bytes", "4MiB"]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def arguments(server: S3Server) -> list[str]:
    named = {name: str(value) for name, value in server.storage_options.items()}
    endpoint_url = named.pop("endpoint_url")
    options = [argument for name, value in named.items() for argument in ("--option", f"{name}={value}")]
    return ["--endpoint-url", endpoint_url, *options, *BYTES]


def test_measures_reports_and_cleans_up(s3_server: S3Server, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measure a moto bucket: the report holds neither bucket, endpoint nor credentials, and no object is left."""
    bucket = "a-bucket-to-measure"
    s3_server.create_bucket(bucket)
    url = f"s3://{bucket}/some/run"
    assert main(["bench", url, *arguments(s3_server), "--output", str(report)]) == 0
    said = capsys.readouterr().out
    assert "create-if-absent     works" in said
    assert "compare-and-swap     works" in said
    assert list(open_store(f"s3://{bucket}", s3_server.storage_options).list()) == []
    text = report.read_text()
    told = json.loads(text)
    assert told["limit"] in said
    assert told["name"] is None
    assert len(told["measured"]["up"]) == 5
    # Small reads, with eight before them to open connections; one to warm up; and two objects for each connection.
    assert told["ranges_read"] == {"direct": 135, "refused": 0, "broken": 0, "after_breaks": 0, "skipped": 0}
    assert "ranges read directly 135 of 135\n" in said
    for secret in (bucket, "some/run", *map(str, s3_server.storage_options.values())):
        assert secret not in text or secret == "us-east-1"


def test_ranges_that_are_not_read_directly(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refuse signed URLs: the output counts the ranges that obstore had to read."""
    objects: dict[str, bytes] = {}

    def answer(request: HttpRequest) -> HttpAnswer:
        path, _, query = request.path.partition("?")
        headers = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        if request.method == "PUT":
            if path in objects and {"if-match", "if-none-match"} & set(request.headers):
                return HttpAnswer(412)
            objects[path] = request.body
            return HttpAnswer(200, b"", headers)
        if "X-Amz-Signature" in query:
            return HttpAnswer(403)
        if request.method == "POST":
            return HttpAnswer(200, b"<DeleteResult></DeleteResult>")
        if "range" not in request.headers:
            return HttpAnswer(404)
        first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        body = objects[path]
        headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        return HttpAnswer(206, body[first : last + 1], headers)

    with scripted_server(answer) as server:
        options = ["--endpoint-url", server.endpoint_url, "--option", "key=k1", "--option", "secret=s1"]
        main(["bench", "s3://bucket/run", *options, "--option", "region=us-east-1", *BYTES, "--output", str(report)])
    said = capsys.readouterr().out
    assert "ranges read directly 0 of 135; the others were read by obstore, which needs more CPU (" in said


def test_local_folder_with_a_name(tmp_path: Path, report: Path) -> None:
    """Measure a local folder: the report has the name that the user gave."""
    assert main(["bench", str(tmp_path / "run"), *BYTES, "--name", "laptop", "--output", str(report)]) == 0
    assert json.loads(report.read_text())["name"] == "laptop"
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1048576", MiB), ("8MiB", 8 * MiB), ("64KB", 64_000), ("2KiB", 2048), ("5GB", 5 * 10**9), ("1GiB", 1024 * MiB)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "8M", "8mib", "1.5GiB", "-1", "MiB", "8 MiB", "8iB", "8B"])
def test_wrong_sizes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "s3://bucket/run", f"--bytes={text}"])
    assert "error: argument --bytes: not a size like 8MiB, 64KB or 268435456" in capsys.readouterr().err


def test_too_few_bytes(tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option and the least size; nothing is written."""
    assert main(["bench", str(tmp_path), "--bytes", "1048576", "--output", str(report)]) == 2
    assert "--bytes must be at least 4128768 (such as 4MiB). bytes=1048576" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_absent_bucket(s3_server: S3Server, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name a bucket that does not exist: one line of error, and no report."""
    assert main(["bench", "s3://no-such-bucket-here/run", *arguments(s3_server), "--output", str(report)]) == 1
    assert "bucket does not exist" in capsys.readouterr().err
    assert not report.exists()


def test_read_only_bucket(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Deny the first put: the error says so, and nothing is deleted."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.method == "HEAD":
            return HttpAnswer(404)
        return HttpAnswer(403, b"<Error><Code>AccessDenied</Code></Error>")

    with scripted_server(answer) as server:
        options = ["--endpoint-url", server.endpoint_url, "--option", "key=k1", "--option", "secret=s1"]
        assert main(["bench", "s3://bucket/run", *options, *BYTES, "--output", str(report)]) == 1
        assert {request.method for request in server.requests} <= {"HEAD", "PUT", "GET"}
    assert "AccessDenied" in capsys.readouterr().err
    assert not report.exists()


@contextmanager
def running_bench(server: BenchServer, report: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command in its own process, for tests of signals and pipes."""
    options = ["--endpoint-url", server.endpoint_url, "--option", "key=k1", "--option", "secret=s1", *BYTES]
    # Signals are reset, because a shell that runs the tests in the background or under nohup ignores them.
    code = (
        "import signal, sys; from dcp_remote.cli import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "bench", "s3://bench/run", *options, "--output", str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.torture
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark's server needs Linux")
@pytest.mark.parametrize(
    ("number", "at"),
    [
        (signal.SIGINT, ("4 connections",)),
        (signal.SIGINT, ("4 connections", "deleting the objects")),
        (signal.SIGINT, ("deleting the objects",)),
        (signal.SIGTERM, ("4 connections",)),
        (signal.SIGHUP, ("4 connections",)),
    ],
    ids=str,
)
def test_signals_leave_no_objects(report: Path, number: int, at: Sequence[str]) -> None:
    """Send SIGINT once or repeatedly, also during the deletion, SIGTERM, SIGHUP: no object is left."""
    with bench_server(size_bytes=64 * MiB, shape=Shape(latency_ms=10)) as server:
        with running_bench(server, report) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            place = process.stdout.readline().partition(": ")[0]
            for line in process.stdout:
                told = line.removeprefix("… ").strip()
                if told in at or told.startswith("16 connections: up"):
                    server.shape(Shape(latency_ms=500))  # the signal must arrive before the measurement ends
                if told in at:
                    process.send_signal(number)
            assert process.wait(60) == 128 + number
            assert place.startswith("s3://bench/run/bench-")
            said = process.stderr.read().splitlines()
            assert len(said) == len(at)
            assert all(line.endswith(f"the objects below {place}") for line in said)
        assert server.counts().operations["PutObject"] > 6
        assert list(open_store("s3://bench", server.storage_options).list()) == []
    assert not report.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark's server needs Linux")
def test_closed_pipe_leaves_no_objects(report: Path) -> None:
    """Close standard output during the measurement, as `| head` does: no object is left."""
    with bench_server(size_bytes=64 * MiB) as server:
        with running_bench(server, report) as process:
            assert process.stdout is not None
            assert any(line == "… small reads\n" for line in process.stdout)
            process.stdout.close()
            assert process.wait(60) == 1
        assert server.counts().operations["PutObject"] >= 1
        assert list(open_store("s3://bench", server.storage_options).list()) == []
    assert not report.exists()


def test_existing_report_is_not_replaced(tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Start with an existing report: refused before anything is put."""
    report.write_text("dear")
    assert main(["bench", str(tmp_path / "run"), *BYTES, "--output", str(report)]) == 1
    said = capsys.readouterr()
    assert "exists already" in said.err
    assert said.out == ""
    assert report.read_text() == "dear"
    assert list(tmp_path.iterdir()) == [report]


def test_store_without_conditional_writes_is_a_failure(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignore conditions in a local store: exit code 1, and the report is written all the same."""

    def put(self: LocalStore, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        return kept(self, key, buffers)

    kept = LocalStore.put
    monkeypatch.setattr(LocalStore, "put", put)
    assert main(["bench", str(tmp_path / "run"), *BYTES, "--output", str(report)]) == 1
    said = capsys.readouterr()
    assert "does NOT work" in said.out
    assert "connection" not in said.out
    assert "ignores the conditions" in said.err
    assert json.loads(report.read_text())["measured"]["creates_if_absent"] is False


def test_wrong_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pass wrong values: refused before anything is sent."""
    with pytest.raises(SystemExit) as refused:
        main(["bench", str(tmp_path), "--bytes", "much"])
    assert refused.value.code == 2
    assert main(["bench", str(tmp_path), "--bytes", "10"]) == 2
    assert main(["bench", str(tmp_path), "--seconds", "0"]) == 2
    assert main(["bench", str(tmp_path), "--output", str(tmp_path / "no" / "folder.json")]) == 2
    assert "cannot be written there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
