"""A host: a process with its own network, mounts, host name and process ids, and the processes on that host."""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.rank_pool import start_process

# Namespaces of a host (`<linux/sched.h>`), which setns(2) enters in one call (Linux 5.8).
_MOUNTS, _NAMES, _PROCESSES, _NETWORK = 0x00020000, 0x04000000, 0x20000000, 0x40000000

_START_SECONDS_MAX = 60.0
_POLL_SECONDS = 0.02


def shell(script: str, *prefix: str) -> str:
    """Run a script, after a prefix such as `nsenter`, and return its output; raise with its errors if it fails."""
    done = subprocess.run([*prefix, "sh", "-ec", script], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{script.strip()}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """A host without a network, until the rig connects it.

    The kernel kills all of its processes if the first one ends, and that one if this process does.

    Args:
        name: Name of the host.
        names: File that is its `/etc/hosts`; a change is seen at once.
    """

    def __init__(self, name: str, names: Path) -> None:
        """Start the host's first process, which only sleeps."""
        self.name = name
        script = f'hostname {name}; mount --bind "$1" /etc/hosts; ip link set lo up; echo; exec sleep infinity'
        namespaces = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._outer = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *namespaces, "sh", "-ec", script, "sh", str(names)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == b"\n", f"{name} did not start"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text()
        self.init = int(children)

    def shell(self, script: str) -> str:
        """Run a script on the host."""
        return shell(script, "nsenter", f"--target={self.init}", "--net", "--mount", "--uts", "--pid")

    def signal_all(self, name: str) -> None:
        """Send a signal to every process of the host."""
        self.shell(f"kill -{name} -1")

    def kill(self) -> None:
        """End the host with all of its processes, as if its power were lost."""
        self._outer.kill()
        self._outer.wait()
        if self._outer.stdout is not None:
            self._outer.stdout.close()


class HostProcess:
    """A Python module that runs on a host, in a fork of a process that has imported torch.

    Args:
        host: The host.
        environment: All environment variables of the process.
        log: File that its output is appended to.
        module: Name of the module, which runs as by `python -m`.
        arguments: Arguments of the module.
    """

    def __init__(
        self, host: Host, environment: Mapping[str, str], log: Path, module: str, arguments: Sequence[str]
    ) -> None:
        """Start the process."""
        self.host = host
        self._process = start_process(_run_on_host, host.init, dict(environment), str(log), module, list(arguments))

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.exitcode

    def join(self, deadline_seconds: float) -> int | None:
        """Wait for the end until a time of `time.monotonic`, and return the exit code; None if it still runs."""
        self._process.join(max(0.0, deadline_seconds - time.monotonic()))
        return self.exit_code


def _run_on_host(init: int, environment: Mapping[str, str], log: str, module: str, arguments: Sequence[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(init), _MOUNTS | _NAMES | _PROCESSES | _NETWORK):
        raise OSError(ctypes.get_errno(), "setns")
    pid = os.fork()  # only a child is in the host's namespace of processes
    if pid:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) % 256)
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir("/")
    tempfile.tempdir = None
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  # printed, as by the interpreter
        sys.excepthook(*sys.exc_info())
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # with all that an interpreter does at its end: threads, atexit, standard output
