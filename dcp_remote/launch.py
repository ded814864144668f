"""`python -m dcp_remote.launch <command>`: start a training program with remote checkpoints, without changing it.

    DCP_REMOTE_URL=s3://bucket/run python -m dcp_remote.launch llamafactory-cli train x.yaml

Each Python process of the command, also those of torchrun, finds `integrations/startup` on its path, whose
`sitecustomize` enables the integration of a framework when the program imports the framework. What could not be enabled
is said by the process, and here when the command ends; the exit status is that of the command. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from dcp_remote.errors import DcpRemoteError
from dcp_remote.storage import open_store

# Read by `integrations/startup/sitecustomize.py`.
URL = "DCP_REMOTE_URL"
STORAGE_OPTIONS = "DCP_REMOTE_STORAGE_OPTIONS"
RESUME = "DCP_REMOTE_RESUME"
MARKS = "DCP_REMOTE_MARKS"

_STARTUP = Path(__file__).parent / "integrations" / "startup"

# Exit status of a command that does not exist, as a shell gives it.
_NOT_FOUND = 127

# Longest delay of a signal that is passed on.
_TURN_SECONDS = 0.5

# Signals by which a job is asked to end. Ctrl-C is not among them: the terminal sends it to the command as well.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status; 128 and the number of the signal that ended it, as a shell does."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    url = options.url or os.environ.get(URL)
    storage_options = options.storage_options or os.environ.get(STORAGE_OPTIONS) or "{}"
    if not url:
        parser.error(f"there is no run: set {URL}, or pass --url s3://bucket/run")
    if "://" not in url:  # as a path, the checkpoints would lie in a local folder of that name
        parser.error(f"the run must be a URL, such as s3://bucket/run or file:///folder/run, not {url!r}")
    resume = "never" if options.no_resume else os.environ.get(RESUME) or "auto"
    if resume not in {"auto", "never"}:
        parser.error(f"{RESUME} must be auto or never, not {resume!r}")
    try:
        settings = json.loads(storage_options)
        if not isinstance(settings, dict):
            parser.error(f"{STORAGE_OPTIONS} must be a JSON object, as " + '{"endpoint_url": "http://localhost:9000"}')
        open_store(url, settings)
    except DcpRemoteError as error:
        parser.error(str(error))
    except json.JSONDecodeError as error:
        parser.error(f"{STORAGE_OPTIONS} is no JSON: {error}")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("there is no command: write it behind the options, as it is started without dcp_remote")
    with tempfile.TemporaryDirectory(prefix="dcp_remote-launch-", ignore_cleanup_errors=True) as marks:
        environment = {
            **os.environ,
            URL: url,
            STORAGE_OPTIONS: storage_options,
            RESUME: resume,
            MARKS: marks,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_STARTUP), os.environ.get("PYTHONPATH")])),
        }
        status = _run(command, environment)
        _say_what_is_not_saved(Path(marks), url)
    return status


def _say_what_is_not_saved(marks: Path, url: str) -> None:
    """Print what processes of this host could not enable; or that none has enabled anything."""
    with suppress(OSError):  # a command that cleans the folder of temporary files
        failed = sorted(marks.glob("*.failed"))
        for mark in failed:
            print(mark.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
        if not failed and not any(marks.iterdir()):
            print(
                "dcp_remote: no process of this command on this host imported Trainer of Transformers, Accelerate or "
                "DeepSpeed in a Python that reads PYTHONPATH and has DCP_REMOTE_URL in its environment: from here, "
                f"nothing was saved to {url}.",
                file=sys.stderr,
            )


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dcp_remote.launch",
        description="Start a training program that saves its checkpoints to a run in object storage and resumes from "
        "the newest: programs built on Transformers' Trainer, Accelerate or DeepSpeed.",
        epilog=f"Environment: {URL}, {STORAGE_OPTIONS} (JSON), {RESUME} (auto or never).",
    )
    parser.add_argument("--url", help=f"URL of the run (default: {URL})")
    parser.add_argument("--storage-options", metavar="JSON", help="options of the store, by the names of boto3")
    parser.add_argument(
        "--no-resume",
        action="store_true",
        help="resume only where the program itself says so (default: from the newest checkpoint, if there is one)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command in the foreground, and pass on the signals by which a job is asked to end."""
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        print(f"dcp_remote: there is no command {command[0]!r}.", file=sys.stderr)
        return _NOT_FOUND
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    handlers = {number: signal.signal(number, forward) for number in _FORWARDED}
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)  # not ignored: a command inherits that
    try:
        process = subprocess.Popen([program, *command[1:]], env=environment)  # noqa: S603  # the user's own command
        for number in early:
            process.send_signal(number)
        status = None
        while status is None:
            # In turns: Python calls no handler of a signal that came just before a wait began, until the wait ends.
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(_TURN_SECONDS)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
