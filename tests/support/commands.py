"""Commands that start processes of their own, such as torchrun, bounded in time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Time in which a command ends its own processes once it is asked to, in seconds.
_END_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Ended:
    """Command that has ended."""

    code: int
    output: str


def run_command(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], output: Path, timeout_seconds: float
) -> Ended:
    """Run a command in a session of its own, and wait for it.

    At the timeout it is asked to end, by SIGTERM: torchrun then ends its ranks, which are in sessions of their own.

    Raises:
        AssertionError: The command did not end in time; the text is the end of its output.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    is_late = False
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = output.read_text(errors="replace")
    assert not is_late, f"{' '.join(command)} did not end within {timeout_seconds:g} s.\n{text[-10_000:]}"
    return Ended(process.returncode, text)
