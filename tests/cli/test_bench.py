"""Tests of `dcp-remote bench` through its command line: true, bounded in bytes, and without objects left."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_remote.cli import main
from dcp_remote.cli.arguments import parse_bytes
from dcp_remote.common.units import MiB
from dcp_remote.errors import PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage import MemoryStore, ObjectStore, open_store
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.wrapper import Verb
from dcp_remote.testing.servers import S3Server
from dcp_remote.testing.wrappers import Fault, FaultyStore
from tests.benchmark.server.server import BenchServer, bench_server
from tests.benchmark.server.shape import Shape
from tests.support.command_line import CommandLine, KeepingStore
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

BYTES = ["--bytes", "4MiB"]
PARALLEL = [1, 2, 4, 8, 16]


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(f"bench-{os.urandom(4).hex()}")


def bench(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Measure a store, through the command line."""
    monkeypatch.setattr("dcp_remote.cli.bench.open_store", lambda url, options: store)
    return main(["bench", "memory://bench", *BYTES, *options])


def arguments(server: S3Server) -> list[str]:
    named = {name: str(value) for name, value in server.storage_options.items()}
    endpoint_url = named.pop("endpoint_url")
    options = [argument for name, value in named.items() for argument in ("--option", f"{name}={value}")]
    return ["--endpoint-url", endpoint_url, *options, *BYTES]


def test_prints_measurements_and_cleans_up(cli: CommandLine, s3_server: S3Server) -> None:
    """As text, a line for each measurement; as JSON, what can be published. No object is left."""
    bucket = "a-bucket-to-measure"
    s3_server.create_bucket(bucket)
    lines = cli.run("bench", f"s3://{bucket}/some/run", *arguments(s3_server)).lines
    assert lines[0].startswith(f"s3://{bucket}/some/run/bench-")
    assert lines[1].startswith("latency ")
    assert [int(line.split()[0]) for line in lines[3:8]] == PARALLEL
    assert lines[8].startswith("requests sent again 0 of ")
    shown = cli.run("bench", f"s3://{bucket}/some/run", *arguments(s3_server), "--json")
    measured = shown.document["measured"]
    assert [rate["parallel"] for rate in measured["up"]] == PARALLEL
    assert shown.document["scheme"] == "s3"
    secrets = {bucket, "some/run", *map(str, s3_server.storage_options.values())} - {"us-east-1"}
    assert [secret for secret in secrets if secret in shown.out] == []
    assert list(open_store(f"s3://{bucket}", s3_server.storage_options).list()) == []
    missing = cli.run("bench", "s3://no-such-bucket-here/run", *arguments(s3_server), code=1)
    assert "bucket does not exist" in missing.err


def test_measures_within_its_bytes(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Count the requests by a store outside: no more bytes than allowed in either direction, and none uncounted."""
    counting = CountingStore(memory)
    assert bench(counting, monkeypatch, "--json") == 0
    assert 3.9 * MiB < counting.counts.put_bytes <= 4 * MiB
    assert counting.counts.got_bytes == counting.counts.put_bytes
    assert json.loads(capsys.readouterr().out)["measured"]["requests"] == counting.counts.requests
    assert list(memory.list()) == []


def test_sizes() -> None:
    """Read sizes in powers of 1000 and 1024; refuse other units and spaces."""
    sizes = {"1048576": MiB, "8MiB": 8 * MiB, "64KB": 64_000, "2KiB": 2048, "5GB": 5 * 10**9, "1GiB": 1024 * MiB}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "8M", "8mib", "1.5GiB", "-1", "MiB", "8 MiB", "8iB", "8B"):
        with pytest.raises(ArgumentTypeError):
            parse_bytes(text)


@pytest.mark.parametrize("options", [["--bytes", "1048576"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_wrong_calls(cli: CommandLine, options: list[str], tmp_path: Path) -> None:
    """Pass wrong values: refused before anything is written."""
    cli.fail("bench", tmp_path, *options, code=2, says=f"{options[0]} must be ")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_begun_after_its_time(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(memory, monkeypatch, "--seconds", "1e-9") == 0
    assert "time ran out before all measurements" in capsys.readouterr().out
    assert list(memory.list()) == []


def test_read_only_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    """Deny all puts: the error says so."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.method == "HEAD":
            return HttpAnswer(404)
        return HttpAnswer(403, b"<Error><Code>AccessDenied</Code></Error>")

    with scripted_server(answer) as server:
        options = ["--endpoint-url", server.endpoint_url, "--option", "key=k1", "--option", "secret=s1"]
        assert main(["bench", "s3://bucket/run", *options, *BYTES]) == 3
    assert "AccessDenied" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("after", [0, 1, 3, 9])
@pytest.mark.parametrize(
    ("error", "code"), [(PermissionDeniedError("No."), 3), (StorageError("Broken."), 3), (KeyboardInterrupt(), 130)]
)
def test_failures_leave_no_objects(
    memory: MemoryStore, error: BaseException, code: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail or interrupt a put in each part, whose answer alone is lost."""
    puts = itertools.count()

    def fails(verb: Verb, key: str, number: int) -> bool:
        return verb == "put" and next(puts) >= after

    fault = Fault(fails, "response", persistent=True, error=lambda: error)
    assert bench(FaultyStore(memory, [fault]), monkeypatch) == code
    assert list(memory.list()) == []


def test_objects_that_cannot_be_deleted(
    memory: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Deny deletions: the results are complete, a warning names the URL, and the exit code is 1."""
    assert bench(KeepingStore(memory), monkeypatch, "--json") == 3
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["measured"]["up"]) == len(PARALLEL)
    assert "Some objects could not be deleted" in captured.err
    (warning,) = caplog.messages
    assert f"{memory.url}/bench-" in warning
    assert f"objects={len(list(memory.list()))}" in warning


def test_transient_failures_are_counted(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse the first attempt of each read for its rate."""

    def busy() -> FaultyStore:
        seen: set[str] = set()

        def is_first(verb: Verb, key: str, number: int) -> bool:
            is_new = verb == "get_into" and key not in seen
            seen.update([key] if verb == "get_into" else [])
            return is_new

        slow_down = Fault(is_first, "request", persistent=True, error=lambda: TransientStorageError("Slow down."))
        return FaultyStore(memory, [slow_down])

    assert bench(busy(), monkeypatch, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["measured"]["requests_again"] == 63  # with the one that is not measured
    assert bench(busy(), monkeypatch) == 0
    assert "; the last because: Slow down." in capsys.readouterr().out


# ---- interruptions


@contextmanager
def running_bench(server: BenchServer) -> Iterator[subprocess.Popen[str]]:
    """Start the command in its own process, for tests of signals and pipes."""
    options = ["--endpoint-url", server.endpoint_url, "--option", "key=k1", "--option", "secret=s1", *BYTES]
    # The signal is reset, because a shell that runs the tests in the background ignores it.
    code = (
        "import signal, sys; from dcp_remote.cli import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "bench", "s3://bench/run", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark's server needs Linux")
@pytest.mark.parametrize("is_closed", [False, True])
def test_interruptions_leave_no_objects(*, is_closed: bool) -> None:
    """Send SIGINT, or close standard output as `| head` does, in the middle: no object is left."""
    with bench_server(size_bytes=64 * MiB, shape=Shape(latency_ms=10)) as server:
        with running_bench(server) as process:
            assert process.stdout is not None
            assert any(line.split()[0] == "2" for line in process.stdout)
            server.shape(Shape(latency_ms=500))  # the signal must arrive before the measurement ends
            if is_closed:
                process.stdout.close()
            else:
                process.send_signal(signal.SIGINT)
            assert process.wait(60) == (141 if is_closed else 130)
        assert server.counts().operations["PutObject"] > 6
        assert list(open_store("s3://bench", server.storage_options).list()) == []
