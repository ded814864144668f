"""A real S3 server on this machine, for tests: Ceph's gateway, with one monitor and one OSD, all in memory.

moto shows what a client sends; Ceph shows what a store does with the requests: it decides conditions among racing
writers, checks signatures, and refuses bodies that end too early. Needs Ceph's programs, on Debian 12:

    apt-get install --no-install-recommends ceph-mon ceph-osd radosgw

That is Ceph 16. It wants ETags in conditions without quotes, verifies the length of a body, its MD5 and the SHA-256 of
a signed payload, and accepts S3's newer checksums without verifying them.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.session import Session

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.testing.servers import S3Server
from tests.support.ports import reserved_port

_PROGRAMS = ("ceph-mon", "ceph-osd", "monmaptool", "osdmaptool", "radosgw", "radosgw-admin", "setpriv")

# Limit of the start: a second or two on an idle machine, on a busy one many times that.
_START_SECONDS_MAX = 120.0

_POLL_SECONDS = 0.05

# Enough for the shards of tests; more is refused, and not swapped out.
_MEMORY_BYTES = 2 * 1024**3

_USER = "testing"

# Length of the log that a failure's message quotes.
_LOG_CHARACTERS_MAX = 900

_CONFIGURATION = """
[global]
fsid = {fsid}
# With names and fsid, and no `mon host`: a client that learns these from the monitor sometimes speaks before it has.
monmap = {folder}/monmap
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false

# Whoever reaches the loopback interface may do everything; S3's own keys are checked all the same.
auth cluster required = none
auth service required = none
auth client required = none

# Everything lies in the folder that is removed at the end; logs are what a daemon prints. Nobody asks for its socket.
keyring = {folder}/keyring
log to file = false
log to stderr = true
mon cluster log to file = false
admin socket =
pid file =

# One copy of everything, on the one OSD that there is.
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon max pg per osd = 1000

# The gateway begins by making its pools, each a change of the map that waits this long for others; by default a second.
paxos propose interval = 0.02

# When a request that found no OSD yet is sent again; by default after five seconds.
objecter tick interval = 0.2

# The monitor's few megabytes lie on a disk whose other contents are none of its business.
mon data avail crit = 1
mon data avail warn = 2

[mon.a]
mon data = {folder}/mon

[osd.0]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {memory_bytes}

[client.rgw]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable usage log = false
"""


def ceph_is_installed() -> bool:
    """Return whether Ceph's programs are installed, in version 16: later ones have another start."""
    if not all(map(shutil.which, _PROGRAMS)):
        return False
    said = subprocess.run(["radosgw", "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return said.startswith("ceph version 16.")


@dataclass(frozen=True, slots=True)
class CephGateway(S3Server):
    """A running gateway."""

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the `storage_options` of all features of Ceph 16, including the checks of bodies that it makes."""
        return self._credentials | {"etag_quotes": False, "sign_payload": True, "checksum_algorithm": "none"}

    @property
    def _credentials(self) -> dict[str, str]:
        return {
            "endpoint_url": self.endpoint_url,
            "region_name": "us-east-1",
            "aws_access_key_id": _USER,
            "aws_secret_access_key": _USER,
        }

    def client(self) -> Any:
        """Return a botocore client, to read without a store; it sends none of the newer checksums."""
        # `Any`: botocore makes its clients' classes while it runs.
        session: Any = Session()
        config = Config(request_checksum_calculation="when_required")
        return session.create_client("s3", **self._credentials, config=config)

    def create_bucket(self, name: str) -> None:
        """Create a bucket, in one request; a bucket that exists is left as it is."""
        self.client().create_bucket(Bucket=name)


@contextmanager
def ceph_gateway() -> Iterator[CephGateway]:
    """Run a gateway while the block runs; stored objects are lost with it.

    Starts in a second or two. Its three processes are killed at the end of the block, however that ends. If this thread
    dies before that, the kernel kills them, and a temporary folder of a few megabytes stays.

    Raises:
        InvalidArgumentError: Ceph 16 is not installed, or did not start within two minutes; the message quotes the log
            of the process that failed.
    """
    if not ceph_is_installed():
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        raise InvalidArgumentError("Ceph 16 is not installed.", missing=", ".join(missing) or None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-remote-ceph-")))
        mon_port, port = (stack.enter_context(reserved_port()).getsockname()[1] for _ in range(2))
        cluster = _Cluster(folder, stack)
        fsid = str(uuid.uuid4())
        cluster.configuration.write_text(
            _CONFIGURATION.format(folder=folder, fsid=fsid, port=port, memory_bytes=_MEMORY_BYTES)
        )
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()

        # A monitor that knows no other is a quorum.
        monmap = ["--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", str(folder / "monmap")]
        osdmap = str(folder / "osdmap")
        cluster.run("monmaptool", *monmap)
        cluster.run("osdmaptool", "--createsimple", "1", osdmap)
        cluster.run("ceph-mon", "-i", "a", "--mkfs", "--osdmap", osdmap)
        cluster.start("ceph-mon", "-i", "a")
        cluster.run("ceph-osd", "-i", "0", "--mkfs")
        cluster.start("ceph-osd", "-i", "0")

        # Both would create the missing pools, so that they run one after the other. They wait for the OSD by
        # themselves.
        user = ["user", "create", "--uid", _USER, "--display-name", _USER]
        keys = ["--access-key", _USER, "--secret-key", _USER]
        cluster.run("radosgw-admin", "-n", "client.rgw", *user, *keys)
        gateway = cluster.start("radosgw", "-n", "client.rgw")
        cluster.wait(lambda: _answers(port), "radosgw")
        yield CephGateway(endpoint_url=f"http://127.0.0.1:{port}", pid=gateway.pid)


class _Cluster:
    """The daemons of one cluster, and commands to it that end early when a daemon does."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.configuration = folder / "ceph.conf"
        self._folder = folder
        self._stack = stack
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._deadline = time.monotonic() + _START_SECONDS_MAX

    def start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a daemon, which is killed when the stack closes: its stored objects need no clean end."""
        process = self._open(program, "-f", "--no-mon-config", *arguments)
        self._stack.callback(_kill, process)
        self._daemons[program] = process
        return process

    def run(self, program: str, *arguments: str) -> None:
        """Run a command to its end."""
        process = self._open(program, *arguments)
        try:
            self.wait(lambda: process.poll() is not None, program)
        finally:
            _kill(process)
        if process.returncode != 0:
            raise self._failure(program, "failed", exit_status=process.returncode)

    def wait(self, ready: Callable[[], bool], program: str) -> None:
        """Poll until `ready` is true; raise with the program's name when a daemon has died, or the time is up."""
        while not ready():
            for daemon, process in self._daemons.items():
                if process.poll() is not None:
                    raise self._failure(daemon, "died while the server started", exit_status=process.returncode)
            if time.monotonic() > self._deadline:
                raise self._failure(program, "was not ready in time", seconds=_START_SECONDS_MAX)
            time.sleep(_POLL_SECONDS)

    def _open(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log(program).open("ab") as log:
            return subprocess.Popen(
                # The kernel ends the daemon with this process, if this process cannot do so.
                ["setpriv", "--pdeathsig", "KILL", program, "--conf", str(self.configuration), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                process_group=0,  # Ctrl-C goes to this process alone, which then ends the others
            )

    def _log(self, program: str) -> Path:
        return self._folder / f"{program}.out"

    def _failure(self, program: str, how: str, **details: object) -> InvalidArgumentError:
        said = self._log(program).read_text(errors="replace").splitlines()
        # Errors have level -1, and the other levels would hide them: a daemon that ends early often crashes as well.
        errors = [line for line in said if " -1 " in line]
        log = "\n".join(errors or said)[-_LOG_CHARACTERS_MAX:]
        return InvalidArgumentError(f"Ceph's {program} {how}.", **details, log=log)


def _environment() -> dict[str, str]:
    """Return this process's environment without variables of another cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _answers(port: int) -> bool:
    """Return whether an S3 server answers an anonymous list of buckets."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()
