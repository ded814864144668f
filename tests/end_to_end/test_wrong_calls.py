"""Wrong calls, and the whole message of each: `wrong_calls.md` beside this file, for people to read.

Run with `UPDATE_WRONG_CALLS=1` to write the page anew; then read it aloud.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_remote
from dcp_remote import CheckpointManager, RemoteWriter
from dcp_remote.common.deadline import RetryPolicy
from dcp_remote.testing.servers import S3Server
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

PAGE = Path(__file__).with_name("wrong_calls.md")

TITLE = "# Wrong calls, and what they say"
INTRODUCTION = f"""{TITLE}

Written by `UPDATE_WRONG_CALLS=1 python -m pytest tests/end_to_end/test_wrong_calls.py`, which otherwise makes each call
and compares its whole message with this page. `memory://run` has the checkpoints of steps 100 and 200, the latter named
"best"; `memory://single` is a checkpoint by itself; `file` is the path of a file. Folders, ports, ids and seconds are
replaced by words in angle brackets.
"""


@dataclass(frozen=True, slots=True)
class WrongCall:
    """Call that a user gets wrong.

    Attributes:
        title: Mistake, in a few words.
        code: Statements; the last one raises.
    """

    title: str
    code: str


CALLS = [
    # ---- the URL and the store
    WrongCall("A URL with one slash", 'CheckpointManager("s3:/bucket/run")'),
    WrongCall("The URL of a server", 'CheckpointManager("https://minio.example:9000/bucket/run")'),
    WrongCall("A home folder", 'load("~/checkpoints/run")'),
    WrongCall(
        "An endpoint without its scheme",
        'CheckpointManager("s3://bucket/run", storage_options={"endpoint_url": "localhost:9000"})',
    ),
    WrongCall("A misspelled option", 'load("s3://bucket/run", storage_options={"regoin_name": "eu-west-1"})'),
    WrongCall("An option of another store", 'load("memory://run", storage_options={"region_name": "eu-west-1"})'),
    WrongCall("One key of two", 'load("s3://bucket/run", storage_options={"key": "AKIAIOSFODNN7EXAMPLE"})'),
    WrongCall("A limit as a text", 'load("s3://bucket/run", storage_options={"requests_in_flight": "8"})'),
    WrongCall("A bucket that does not exist, read", 'load("s3://no-such-bucket/run")'),
    WrongCall(
        "A bucket that does not exist, saved into",
        'CheckpointManager("s3://no-such-bucket/run").save(1, state, wait=True)',
    ),
    WrongCall("Another region", 'load("s3://bucket-in-frankfurt/run", storage_options=to_another_region)'),
    WrongCall("No credentials", 'del os.environ["AWS_ACCESS_KEY_ID"]\nload("s3://bucket/run")'),
    WrongCall(
        "A server that does not run",
        'load("s3://bucket/run", storage_options={"endpoint_url": "http://127.0.0.1:9"})',
    ),
    # ---- the arguments of a manager
    WrongCall("A number as retention", 'CheckpointManager("memory://run", retention=3)'),
    WrongCall("A text as timeout", 'CheckpointManager("memory://run", timeout_seconds="30")'),
    WrongCall("A negative memory budget", 'CheckpointManager("memory://run", memory_budget_bytes=-1)'),
    WrongCall("A text as memory budget", 'RemoteWriter("memory://single", memory_budget_bytes="1GB")'),
    WrongCall("A text as progress", 'CheckpointManager("memory://run", progress="no")'),
    WrongCall("The name of an interface as sockets", 'CheckpointManager("memory://run", rank_sockets="eth1")'),
    WrongCall("Rules that keep everything", "Retention(keep_every=1000)"),
    # ---- saves
    WrongCall("A step as a text", 'CheckpointManager("memory://run").save("300", state)'),
    WrongCall("Step and state exchanged", 'CheckpointManager("memory://run").save(state, 300)'),
    WrongCall(
        "A metric that is no number",
        'CheckpointManager("memory://run").save(300, state, metrics={"loss": torch.tensor([1.0, 2.0])})',
    ),
    WrongCall("Notes that are no JSON", 'CheckpointManager("memory://run").save(300, state, user={"when": now})'),
    WrongCall(
        "An object of a class of one's own",
        'CheckpointManager("memory://new-run").save(1, {**state, "settings": Settings()}, wait=True)',
    ),
    WrongCall("A save without a restore before", 'CheckpointManager("memory://run").save(300, state, wait=True)'),
    WrongCall(
        "A step that was saved already",
        'checkpoints = CheckpointManager("memory://run")\ncheckpoints.restore(state)\n'
        "checkpoints.save(200, state, exist_ok=False, wait=True)",
    ),
    WrongCall(
        "A checkpoint that exists", 'dcp.save(state, storage_writer=RemoteWriter("memory://single"), no_dist=True)'
    ),
    WrongCall(
        "A manager that is closed",
        'with CheckpointManager("memory://run") as checkpoints:\n    pass\ncheckpoints.save(300, state)',
    ),
    # ---- loads
    WrongCall("A URL without a checkpoint", 'load("memory://rum")'),
    WrongCall("A step that is not there", 'CheckpointManager("memory://run").restore(state, 150)'),
    WrongCall("A step as a text, restored", 'CheckpointManager("memory://run").restore(state, "100")'),
    WrongCall("A misspelled name", 'load("memory://run", step="bset")'),
    WrongCall("A misspelled pattern", 'load("memory://run", keys="modle.*")'),
    WrongCall("A pin of a step that is not there", 'CheckpointManager("memory://run").run.pin(150)'),
    # ---- a state that does not fit
    WrongCall(
        "A state that the checkpoint does not fit",
        'CheckpointManager("memory://run").restore({"model": {"weights": torch.zeros(3)}, "epoch": 0})',
    ),
    WrongCall(
        "A pattern that matches nothing",
        'CheckpointManager("memory://run").restore(state, exclude="modle.*")',
    ),
    WrongCall(
        "An optimizer without its model",
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)\n"
        'CheckpointManager("memory://new-run").save(1, {"optim": optimizer}, wait=True)',
    ),
    WrongCall(
        "A run that must exist",
        'CheckpointManager("memory://rum").restore(state, must_exist=True)',
    ),
    WrongCall("A URL that was made a path", 'CheckpointManager("/data/s3:/bucket/run")'),
    WrongCall("The URL of a file", "load(file)"),
    WrongCall("A URL below a file", 'CheckpointManager(f"file://{file}/run")'),
    WrongCall("The URL of a manifest", 'load("s3://bucket/run/manifests/step-000000000200-8-0123456789abcdef.json")'),
    WrongCall("A name that means the newest", 'CheckpointManager("memory://run").save(300, state, name="latest")'),
    WrongCall("A question without a policy", 'CheckpointManager("memory://run").should_save(100)'),
    WrongCall("Files that Windows does not have", 'Files({"aux.json": b"{}", "vocab.txt": b"a", "Vocab.txt": b"A"})'),
    WrongCall(
        "Files where a number was saved",
        'CheckpointManager("memory://run").restore(state | {"step": Files()})',
    ),
    WrongCall(
        "Two values with one name, by dcp.save",
        "with plain_errors():\n"
        '    dcp.save({"a": {"b": 1}, "a.b": 2}, storage_writer=RemoteWriter("memory://new"), no_dist=True)',
    ),
]


class Settings:
    """Object that only code can load."""


@pytest.fixture(scope="module")
def frankfurt() -> Iterator[str]:
    """Answer as S3 does for a bucket of another region; return the endpoint."""

    def answer(_request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(status=HTTPStatus.MOVED_PERMANENTLY, headers={"x-amz-bucket-region": "eu-central-1"})

    with scripted_server(answer) as server:
        yield server.endpoint_url


@pytest.fixture
def environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, frankfurt: str) -> dict[str, Any]:
    """Point the environment at a local server, and return the names that the calls use."""
    # No attempt but the first: an hour is longer than every deadline.
    monkeypatch.setattr("dcp_remote.storage.retrying.RetryPolicy", lambda: RetryPolicy(3600.0, 3600.0))
    for name in [name for name in os.environ if name.startswith(("AWS_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server.endpoint_url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }.items():
        monkeypatch.setenv(name, value)
    state = {"model": {"weight": torch.ones(3), "bias": torch.zeros(3)}, "step": 1}
    file = tmp_path / "model.pt"
    file.touch()
    return {
        **{name: getattr(dcp_remote, name) for name in dcp_remote.__all__},
        "Settings": Settings,
        "dcp": dcp,
        "file": str(file),
        "now": datetime(2026, 1, 2, tzinfo=UTC),
        "os": os,
        "state": state,
        "to_another_region": {"endpoint_url": frankfurt},
        "torch": torch,
    }


def test_the_page_holds_every_message(environment: dict[str, Any]) -> None:
    """Make each wrong call, and compare what is raised with the page."""
    state = environment["state"]
    with CheckpointManager("memory://run") as checkpoints:
        checkpoints.save(100, state)
        checkpoints.save(200, state, name="best")
    dcp.save(state, storage_writer=RemoteWriter("memory://single"), no_dist=True)
    sections = [INTRODUCTION]
    for number, call in enumerate(CALLS, start=1):
        message = _message(call.code, environment)
        indented = textwrap.indent(call.code, "    ")
        quoted = textwrap.fill(
            message, 118, initial_indent="> ", subsequent_indent="> ", break_long_words=False, break_on_hyphens=False
        )
        sections.append(f"## {number}. {call.title}\n\n{indented}\n\n{quoted}\n")
    page = "\n".join(sections)
    if os.environ.get("UPDATE_WRONG_CALLS"):
        PAGE.write_text(page)
    assert page == PAGE.read_text()


def _message(code: str, names: dict[str, Any]) -> str:
    """Return the class and the message that the code raises, without what differs between runs."""
    made: list[CheckpointManager] = []

    def make(*args: Any, **options: Any) -> CheckpointManager:
        made.append(CheckpointManager(*args, **options))
        return made[-1]

    before = dict(os.environ)
    try:
        exec(code, {**names, "CheckpointManager": make})
    except CheckpointException as failed:
        ((error, _),) = failed.failures.values()
        return f"**CheckpointException**, whose last line is **{type(error).__name__}**: {_plain(str(error))}"
    except Exception as error:  # noqa: BLE001  # whatever a user would see
        return f"**{type(error).__name__}**: {_plain(str(error))}"
    finally:
        os.environ.update(before)
        for manager in made:
            manager.close()
    raise AssertionError(f"nothing was raised by {code!r}")


def _plain(message: str) -> str:
    for pattern, word in (
        (r"127\.0\.0\.1:(?!9\b)\d+", "127.0.0.1:<port>"),
        (r"\b[0-9a-f]{32}\b", "<id>"),
        (r"\b(seconds=)[\d.]+", r"\1<seconds>"),
        (r"\b(holder=)'[^']+'", r"\1'<job>'"),
        (r"(?<=[ '/])/\S+(?=/model\.pt)", "/<folder>"),
    ):
        message = re.sub(pattern, word, message)
    # Outside code, Markdown would take `<id>` for a tag, and what is between two stars for emphasis.
    return re.sub(r"`[^`]*`|[<*]", lambda found: {"<": "&lt;", "*": "\\*"}.get(found[0], found[0]), message)
