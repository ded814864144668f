"""Tests of `dcp-remote watch` through its command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_remote.cli import watch as watch_module
from dcp_remote.format.catalog import CATALOG_KEY, Entry
from dcp_remote.run.waiting import watch_run
from dcp_remote.storage import LocalStore, open_store
from dcp_remote.testing import Fault, FaultyStore
from dcp_remote.testing.servers import S3Server
from tests.support.command_line import CommandLine, open_with
from tests.support.runs import save
from tests.support.schemas import require_schema

HOSTILE = "$(touch owned)\x1b[2J`touch owned`;touch owned"
SHOW = 'echo "$DCP_REMOTE_STEP $DCP_REMOTE_SAVE_ID $DCP_REMOTE_URL" >> {log}'


def _watch_soon(*arguments: Any, poll_seconds: float, **options: Any) -> Iterator[Entry]:
    return watch_run(*arguments, poll_seconds=0.02, **options)


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again after some milliseconds."""
    monkeypatch.setattr(watch_module, "watch_run", _watch_soon)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[Entry]]:
    """Save steps 1 to 3 of a run, the last with a hostile name."""
    store = LocalStore(tmp_path / "run")
    how: list[dict[str, Any]] = [{}, {"base": 1, "metrics": (("loss", 0.5),)}, {"base": 2, "names": (HOSTILE,)}]
    return tmp_path / "run", [save(store, step, **one) for step, one in enumerate(how, start=1)]


def test_a_line_for_each_checkpoint_above_a_step(cli: CommandLine, run: tuple[Path, list[Entry]]) -> None:
    """Begin after step 1: two lines without control characters, then none in time, which the exit code tells."""
    folder, entries = run
    shown = cli.run("watch", folder, "--after", 1, "--timeout", 0.05, code=1)
    title, second, third = shown.lines
    assert title == f"file://{folder}: waiting for new checkpoints, with a look every 30 s"
    assert second == f"step 2  {entries[1].created}  {entries[1].size_bytes} B  loss 0.5"
    assert third.startswith("step 3  ")
    assert third.isprintable()
    assert shown.err == f"dcp-remote: file://{folder}: no new checkpoint for 0.05 s\n"


def test_the_interval(cli: CommandLine, run: tuple[Path, list[Entry]], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def note(*_: Any, poll_seconds: float, **__: Any) -> Iterator[Entry]:
        asked.append(poll_seconds)
        return iter(())

    monkeypatch.setattr(watch_module, "watch_run", note)
    cli.run("watch", run[0], "--interval", 7, code=1)
    assert asked == [7.0]


def test_json_is_a_document_per_line(cli: CommandLine, run: tuple[Path, list[Entry]]) -> None:
    """Print documents, of which each has the schema; the output of a command is elsewhere."""
    folder, entries = run
    shown = cli.run("watch", folder, "--after", 0, "--timeout", 0.05, "--json", code=1)
    documents = [json.loads(line) for line in shown.lines]
    for document in documents:
        require_schema("watch", document)
    assert [document["save_id"] for document in documents] == [entry.save_id for entry in entries]
    program = [sys.executable, "-c", "import sys; from dcp_remote.cli import main; sys.exit(main(sys.argv[1:]))"]
    program += ["watch", str(folder), "--after", "2", "--once", "--json", "--exec", "echo printed"]
    ended = subprocess.run(program, check=True, capture_output=True, text=True)
    assert (json.loads(ended.stdout)["step"], ended.stderr) == (3, "printed\n")


def test_the_command_finds_the_checkpoint_in_its_environment(
    cli: CommandLine, run: tuple[Path, list[Entry]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a shell command for each: no name of a checkpoint is run, and a URL with quotes is one word."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "it's $(touch owned) a run"
    os.rename(run[0], folder)
    cli.run("watch", folder, "--after", 0, "--timeout", 0.05, "--exec", SHOW.format(log=tmp_path / "log"), code=1)
    url = LocalStore(folder).url
    expected = [f"{entry.step} {entry.save_id} {url}" for entry in run[1]]
    assert (tmp_path / "log").read_text().splitlines() == expected
    assert not (tmp_path / "owned").exists()


def test_a_command_that_fails(cli: CommandLine, run: tuple[Path, list[Entry]], tmp_path: Path) -> None:
    """Fail for step 2 alone: said, step 3 follows, and the exit code is 1 also with `--once`; 0 if none fails."""
    command = f'echo "$DCP_REMOTE_STEP" >> {tmp_path}/log; test "$DCP_REMOTE_STEP" != 2'
    shown = cli.run("watch", run[0], "--after", 1, "--timeout", 0.05, "--exec", command, code=1)
    assert "dcp-remote: the command failed for step 2 with exit code 1\n" in shown.err
    assert (tmp_path / "log").read_text().split() == ["2", "3"]
    cli.run("watch", run[0], "--after", 1, "--once", "--exec", command, code=1)
    cli.run("watch", run[0], "--after", 2, "--once", "--exec", command)


def test_an_outage_is_said_once(
    cli: CommandLine, run: tuple[Path, list[Entry]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fail some looks: one line when it begins, one when it ends, and the checkpoint after it."""
    down = Fault(lambda verb, _key, number: number < 5, "request", persistent=True)
    monkeypatch.setattr(watch_module, "open_store", open_with(lambda store: FaultyStore(store, [down])))
    shown = cli.run("watch", run[0], "--after", 2, "--once")
    assert len(shown.lines) == 2
    first, last = caplog.messages
    assert "still waiting for a newer checkpoint: " in first
    assert last.endswith("the store answers again")


def test_wrong_calls(cli: CommandLine, run: tuple[Path, list[Entry]], caplog: pytest.LogCaptureFixture) -> None:
    """Give a timeout of nothing, and a run that has lost its catalog: an error; a mistyped run: similar ones."""
    shown = cli.run("watch", run[0], "--timeout", 0, code=2)
    assert "--timeout must be a number above zero" in shown.err
    assert shown.out == ""
    assert "--interval must be a number above zero" in cli.run("watch", run[0], "--interval", 0, code=2).err
    cli.run("watch", run[0].parent / "rnu", "--timeout", 0.05, code=1)
    assert caplog.messages[-1].endswith("waiting for one. Is one of these runs meant: run?")
    (run[0] / CATALOG_KEY).unlink()
    assert "dcp-remote recover" in cli.run("watch", run[0], code=1).err


def test_a_run_in_a_bucket(cli: CommandLine, s3_server: S3Server) -> None:
    """Watch a run of an S3 server; a bucket that does not exist is an error at once."""
    named = [f"--option={name}={value}" for name, value in s3_server.storage_options.items() if name != "endpoint_url"]
    options = ["--endpoint-url", s3_server.endpoint_url, *named, "--once", "--after", 0]
    bucket = f"cli-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(bucket)
    save(open_store(f"s3://{bucket}/run", s3_server.storage_options), 7)
    assert cli.run("watch", f"s3://{bucket}/run", *options).lines[1].startswith("step 7  ")
    assert "no-such-bucket" in cli.run("watch", "s3://no-such-bucket/run", *options, code=1).err


def test_ctrl_c_ends_the_wait_and_the_command(run: tuple[Path, list[Entry]]) -> None:
    """Press Ctrl-C while it waits, and while a command runs, which the terminal interrupts as well: exit code 130."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from dcp_remote.cli import main; sys.exit(main(sys.argv[1:]))"
    for lines, more in ((1, []), (3, ["--after", "2", "--exec", "echo $$; exec sleep 120"])):
        program = [sys.executable, "-c", code, "watch", str(run[0]), *more]
        with subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as watching:
            assert watching.stdout is not None
            shown = [watching.stdout.readline() for _ in range(lines)]
            os.killpg(watching.pid, signal.SIGINT)
            # The pipes close only when the command has ended, too.
            rest, error = watching.communicate(timeout=20)
        assert (watching.returncode, rest, error) == (130, "", "dcp-remote: interrupted\n"), shown
