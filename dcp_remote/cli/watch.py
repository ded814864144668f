"""`dcp-remote watch`."""

from __future__ import annotations

import math
import os
import subprocess
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag
from dcp_remote.cli.ls import build_entry, describe_notes
from dcp_remote.cli.output import Output, complain
from dcp_remote.common.text import human_bytes
from dcp_remote.format.catalog import Entry
from dcp_remote.run.waiting import POLL_SECONDS, require_times, watch_run
from dcp_remote.storage import open_store

_STDERR = 2


def watch(
    out: Output,
    url: Url,
    *,
    exec_: Annotated[
        str | None,
        argument("--exec", metavar="CMD", help="shell command to run for each checkpoint, one at a time"),
    ] = None,
    once: Annotated[bool, flag("end after the first checkpoint")] = False,
    after: Annotated[
        int | None,
        argument(type=int, metavar="STEP", help="begin with the checkpoints above this step that are there already"),
    ] = None,
    timeout_seconds: Annotated[
        float,
        argument("--timeout", type=float, metavar="SECONDS", help="end with exit code 1 if none comes for so long"),
    ] = math.inf,
    poll_seconds: Annotated[
        float,
        argument("--interval", type=float, metavar="SECONDS", help="pause between two looks (default: %(default)g)"),
    ] = POLL_SECONDS,
    storage_options: StorageOptions = None,
) -> bool:
    """Print a line for each new checkpoint of a run.

    Looks at the run again and again, one GET each time, and waits out an outage. The command of --exec finds the
    checkpoint in its environment: DCP_REMOTE_URL, DCP_REMOTE_STEP, DCP_REMOTE_SAVE_ID. If it fails, the next checkpoint
    is waited for, and the exit code is 1 at the end. With --json, each line is a document.
    """
    require_times(timeout_seconds, poll_seconds)
    store = open_store(url, storage_options)
    out.say(f"{store.url}: waiting for new checkpoints, with a look every {poll_seconds:g} s")
    has_failed = False
    for entry in watch_run(store, after=after, timeout_seconds=timeout_seconds, poll_seconds=poll_seconds):
        line = f"step {entry.step}  {entry.created}  {human_bytes(entry.size_bytes)}  {describe_notes(entry)}"
        out.say(line.rstrip())
        out.give({"url": store.url, **build_entry(entry)}, in_line=True)
        if exec_ is not None and (code := _run(exec_, store.url, entry, as_json=out.as_json)):
            has_failed = True
            complain(f"dcp-remote: the command failed for step {entry.step} with exit code {code}")
        if once:
            return has_failed
    complain(f"dcp-remote: {store.url}: no new checkpoint for {timeout_seconds:g} s")
    return True


def _run(command: str, url: str, entry: Entry, *, as_json: bool) -> int:
    """Run a command by the shell, and return its exit code.

    Nothing of the run becomes a part of the command's text: its environment has an integer, an ID and the user's URL.
    With `--json` it prints to standard error, since standard output has documents.
    """
    found = {"DCP_REMOTE_URL": url, "DCP_REMOTE_STEP": str(entry.step), "DCP_REMOTE_SAVE_ID": entry.save_id}
    return subprocess.run(  # noqa: S603  # the user's own command
        ["/bin/sh", "-c", command],
        check=False,
        env={**os.environ, **found},
        stdin=subprocess.DEVNULL,
        stdout=_STDERR if as_json else None,
    ).returncode
