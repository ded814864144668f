"""The local store: the shipped suite, and processes, kills, full disks and mounts."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcp_remote import latest, open_run
from dcp_remote.common.mounts import LOCAL_FILE_SYSTEMS, file_system_type, swap_refusal
from dcp_remote.errors import (
    ConditionFailedError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage import Content, LocalStore, ObjectStore, open_store
from dcp_remote.storage.local import HIDDEN_FOLDER
from dcp_remote.storage.local_files import sweep_temporaries, translate_os_errors
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.testing.store_suite import StoreSuite


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        # Trusted explicitly, or the suite would depend on the file system of the temporary folder.
        return LocalStore(tmp_path / "root", allow_network_replace=True)

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        path = _path(store, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        return _path(store, key).read_bytes()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root", allow_network_replace=True)


def test_the_url_of_a_file(tmp_path: Path) -> None:
    """Open a file, and URLs below it: refused at once, and the file is named."""
    file = tmp_path / "x.txt"
    file.write_text("no folder")
    for open_ in (open_store, open_run, latest):
        for url in (file.as_uri(), str(file)):
            with pytest.raises(InvalidArgumentError, match="The URL is a file"):
                open_(url)
        for url in (f"{file}/run", f"{file.as_uri()}/a/b"):
            with pytest.raises(InvalidArgumentError, match=f"lies below the file {file}"):
                open_(url)


def test_folders_may_be_new(tmp_path: Path) -> None:
    """Open a folder, a link to one, and what does not exist yet: nothing is refused, and nothing is created."""
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in ("", "link", "link/new", "new/run", "dangling"):
        open_store(tmp_path / path)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "link"]


def _path(store: ObjectStore, key: str) -> Path:
    assert isinstance(store, LocalStore)
    return Path(store._root.path) / key


def _temporaries(store: LocalStore) -> list[Path]:
    hidden = _path(store, HIDDEN_FOLDER)
    return sorted(hidden.iterdir()) if hidden.exists() else []


def _python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process with this package, and pipes to it."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_no_update_of_many_processes_is_lost(store: LocalStore) -> None:
    """Count in one object from four processes of two threads, half of them with a store opened at the parent.

    Each process begins when it can create its own key; of a key that all create, one is the winner.
    """
    code = """
        import pathlib, sys, threading
        from dcp_remote.errors import ConditionFailedError
        from dcp_remote.storage import LocalStore
        root = pathlib.Path(sys.argv[1])
        above, prefix = (root.parent, f"{root.name}/") if int(sys.argv[2]) % 2 else (root, "")
        store = LocalStore(above, allow_network_replace=True)
        sys.stdin.readline()
        def count():
            for number in range(15):
                try:
                    store.put(f"{prefix}created/{number}", [b"x"], condition="absent")
                    print("created", number)
                except ConditionFailedError:
                    pass
                while True:
                    found = store.get(f"{prefix}counter", limit_bytes=100)
                    try:
                        store.put(f"{prefix}counter", [b"%d" % (int(found.data) + 1)], condition=found.version)
                        break
                    except ConditionFailedError:
                        pass
        threads = [threading.Thread(target=count) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """
    store.put("counter", [b"0"])
    processes = [_python(code, _path(store, ""), number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda process: process.communicate("go", timeout=60), processes))
    assert [error for _, error in results] == [""] * 4
    created = [line for out, _ in results for line in out.splitlines()]
    assert sorted(created) == sorted(f"created {number}" for number in range(15))
    assert _path(store, "counter").read_bytes() == b"120"
    assert _temporaries(store) == []


def test_a_killed_put_leaves_nothing_visible(store: LocalStore) -> None:
    """Let the kernel kill a process in the middle of a write, at its file size limit.

    Its temporary stays hidden until the first put of the next process removes it; one that is being written stays.
    """
    store.put("object", [b"before"])
    code = """
        import resource, signal, sys
        from dcp_remote.storage import LocalStore
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        LocalStore(sys.argv[1]).put(sys.argv[2], [bytes(1 << 19)] * 16)
    """
    for key in ("object", "new"):
        process = _python(code, _path(store, ""), key)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGXFSZ
    assert [info.key for info in store.list()] == ["object"]
    assert store.get("object", limit_bytes=10).data == b"before"
    left = _temporaries(store)
    assert [path.stat().st_size for path in left] == [1 << 20]  # the second process removed the temporary of the first
    with left[0].open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        LocalStore(_path(store, "")).put("other", [b"x"])
        assert _temporaries(store) == left
    LocalStore(_path(store, "")).put("other", [b"x"])
    assert _temporaries(store) == []


def test_a_killed_process_releases_its_lock(store: LocalStore) -> None:
    """Kill a process that holds the lock of an object: a swap that waits for the lock succeeds."""
    version = store.put("key", [b"1"])
    code = """
        import sys, time
        from dcp_remote.storage.local_files import locked
        with locked(sys.argv[1], writable=False):
            print("ready", flush=True)
            sys.stdin.readline()
    """
    process = _python(code, _path(store, "key"))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(1) as pool:
        swapped = pool.submit(store.put, "key", [b"2"], condition=version)
        process.kill()
        process.communicate()
        version = swapped.result(timeout=60)
    assert store.get("key", limit_bytes=1) == Content(data=b"2", version=version)


def test_a_lock_that_is_never_released_is_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the lock of an object without end, with a waiting time of zero: puts and deletes fail."""
    monkeypatch.setattr("dcp_remote.storage.local_files._LOCK_WAIT_SECONDS_MAX", 0.0)
    version = store.put("key", [b"1"])
    with _path(store, "key").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for condition in (version, "any"):
            with pytest.raises(TransientStorageError, match="another process holds the lock"):
                store.put("key", [b"2"], condition=condition)
        assert list(store.delete(["key"])) == ["key"]
    assert store.get("key", limit_bytes=1).data == b"1"
    assert _temporaries(store) == []


def test_a_file_that_is_replaced_after_each_lock_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Let another process replace the file each time that it was locked: the put fails, and replaces nothing."""
    store.put("key", [b"1"])
    usual = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        usual(descriptor, operation)
        if os.path.samestat(os.fstat(descriptor), _path(store, "key").stat()) and operation & fcntl.LOCK_EX:
            (tmp_path / "other").write_bytes(b"2")
            os.replace(tmp_path / "other", _path(store, "key"))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        limit_requests(lambda: 0.1),
        pytest.raises(TransientStorageError, match="replaced by another process each time"),
    ):
        store.put("key", [b"3"])
    assert store.get("key", limit_bytes=1).data == b"2"
    assert _temporaries(store) == []


def test_a_file_too_large_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """Write more than RLIMIT_FSIZE allows, with its signal ignored: the kernel writes a part and then refuses."""
    code = """
        import resource, sys
        from dcp_remote.errors import StorageError
        from dcp_remote.storage import LocalStore
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            LocalStore(sys.argv[1]).put("key", [bytes(70_001)] * 5)
        except StorageError as error:
            print(type(error).__name__, error)
    """
    out, err = _python(code, tmp_path).communicate(timeout=60)
    assert out.startswith("StorageError The file is larger than the file system"), err
    assert "key='key'" in out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("verb", "kind", "numbers"),
    [
        ("put", StorageError, [errno.ENOSPC, errno.EDQUOT, errno.EXDEV, errno.ENOTDIR]),
        ("get", StorageError, [errno.EIO, errno.EXFULL]),
        ("put", PermissionDeniedError, [errno.EROFS]),
        ("delete", PermissionDeniedError, [errno.EPERM]),
        ("get", PermissionDeniedError, [errno.EACCES]),
        ("get", ObjectNotFoundError, [errno.ENOENT]),
        ("head", ObjectNotFoundError, [errno.ENOTDIR, errno.ENAMETOOLONG]),
        ("put", InvalidArgumentError, [errno.ENAMETOOLONG]),
        ("put", TransientStorageError, [errno.ENOENT]),
        ("get", TransientStorageError, [errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EMFILE]),
    ],
)
def test_errors_by_errno(verb: str, kind: type[DcpRemoteError], numbers: list[int]) -> None:
    """Check the exact class for each errno, with key, URL and cause."""
    for number in numbers:
        with pytest.raises(kind) as caught, translate_os_errors(verb, key="a/b", url="file:///x"):
            raise OSError(number, os.strerror(number))
        error = caught.value
        assert type(error) is kind
        assert "key='a/b' url='file:///x'" in str(error)
        assert os.strerror(number) in str(error)


def test_reading_creates_nothing(tmp_path: Path) -> None:
    """Call every verb but put on a root that does not exist."""
    store = LocalStore(tmp_path / "a" / "b")
    with pytest.raises(ObjectNotFoundError):
        store.get("key", limit_bytes=1)
    with pytest.raises(ObjectNotFoundError):
        store.head("key")
    assert list(store.list()) == []
    assert store.delete(["key"]) == {}
    assert list(tmp_path.iterdir()) == []
    store.put("key", [b"x"])
    assert (tmp_path / "a" / "b" / "key").read_bytes() == b"x"


def test_the_hidden_folder_may_be_removed(store: LocalStore) -> None:
    """Remove it between two puts."""
    store.put("a", [b"x"])
    _path(store, HIDDEN_FOLDER).rmdir()
    store.put("b", [b"x"])
    assert [info.key for info in store.list()] == ["a", "b"]


def test_the_hidden_folder_stays_hidden(store: LocalStore) -> None:
    """Check that it is neither listed nor a valid key, that children share it, and that it is empty at rest."""
    store.child("child").put("key", [b"x"])
    above = LocalStore(_path(store, "").parent)
    _path(store, f"{HIDDEN_FOLDER}/left").write_bytes(b"left by someone")
    assert [info.key for info in store.list()] == ["child/key"]
    assert [info.key for info in above.list()] == ["root/child/key"]
    assert list(store.list(f"{HIDDEN_FOLDER}/")) == list(store.list(HIDDEN_FOLDER)) == []
    assert not _path(store, f"child/{HIDDEN_FOLDER}").exists()
    for key in (HIDDEN_FOLDER, f"{HIDDEN_FOLDER}/left", f"a/{HIDDEN_FOLDER}/b"):
        with pytest.raises(InvalidArgumentError):
            store.put(key, [b"x"])


def test_sweeping_without_locks_goes_by_age(tmp_path: Path) -> None:
    """Sweep a new file, one of two days ago and a folder, without trust in locks."""
    (tmp_path / "new").touch()
    (tmp_path / "old").touch()
    (tmp_path / "folder").mkdir()
    two_days_ago = (tmp_path / "old").stat().st_mtime - 2 * 24 * 3600
    os.utime(tmp_path / "old", (two_days_ago, two_days_ago))
    sweep_temporaries(str(tmp_path), trust_locks=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]
    sweep_temporaries(str(tmp_path), trust_locks=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    sweep_temporaries(str(tmp_path / "missing"), trust_locks=True)


def test_swept_files_are_locked_until_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try to lock a file at the moment when it is swept: refused, so its writer notices the loss."""
    path = tmp_path / "made, not locked yet"
    path.touch()
    unpatched = os.unlink
    removed: list[str] = []

    def unlink(name: str) -> None:
        with path.open() as writer, pytest.raises(BlockingIOError):
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removed.append(name)
        unpatched(name)

    monkeypatch.setattr("dcp_remote.storage.local_files.os.unlink", unlink)
    sweep_temporaries(str(tmp_path), trust_locks=True)
    assert removed == [str(path)]
    assert list(tmp_path.iterdir()) == []


def test_folders_and_objects_exclude_each_other(store: LocalStore) -> None:
    """Put a key that is a folder, and a key below an object: refused with the reason, and nothing is left."""
    store.put("a/b", [b"x"])
    version = store.head("a/b").version
    for condition in ("absent", "any", version):
        with pytest.raises(StorageError, match="A folder has this name"):
            store.put("a", [b"y"], condition=condition)
        with pytest.raises(StorageError, match="A file has the name of a folder") as caught:
            store.put("a/b/c/d", [b"y"], condition=condition)
        assert not isinstance(caught.value, TransientStorageError | ConditionFailedError)
    assert store.delete(["a/b/c"]) == {}
    assert [info.key for info in store.list()] == ["a/b"]
    assert _temporaries(store) == []


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    """Put into it: refused. Read: no such object."""
    (tmp_path / "root").write_bytes(b"x")
    store = LocalStore(tmp_path / "root")
    with pytest.raises(StorageError, match="A file has the name of a folder"):
        store.put("key", [b"x"])
    with pytest.raises(ObjectNotFoundError):
        store.get("key", limit_bytes=1)
    assert list(store.list()) == []


def test_empty_folders_are_removed(store: LocalStore) -> None:
    """Delete the last object of a folder; the root and other folders stay."""
    store.child("a").put("b/c/one", [b"x"])
    store.put("a/two", [b"x"])
    store.child("a").delete(["b/c/one"])
    assert [path.name for path in _path(store, "a").iterdir()] == ["two"]
    store.delete(["a/two"])
    assert [path.name for path in _path(store, "").iterdir()] == [HIDDEN_FOLDER]


@pytest.mark.parametrize("condition", ["absent", "any"])
def test_removing_folders_breaks_no_writer(store: LocalStore, condition: str) -> None:
    """Put and delete keys in one folder from four threads, so that the folder comes and goes."""
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait()
        for _ in range(200):
            store.put(f"a/b/{number}", [b"x"], condition="absent" if condition == "absent" else "any")
            assert store.head(f"a/b/{number}").size_bytes == 1
            assert store.delete([f"a/b/{number}"]) == {}

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert list(store.list()) == []


def test_a_swap_to_equal_bytes_has_a_new_version(store: LocalStore) -> None:
    """Swap 300 times after the clock was set back by an hour: each version is new."""
    versions = [store.put("key", [b"same"])]
    begin_ns = _path(store, "key").stat().st_mtime_ns + 3600 * 10**9  # the clock went back by an hour
    os.utime(_path(store, "key"), ns=(begin_ns, begin_ns))
    versions.append(store.head("key").version)
    for _ in range(300):
        versions.append(store.put("key", [b"same"], condition=versions[-1]))
    assert len(set(versions)) == len(versions)
    assert begin_ns < _path(store, "key").stat().st_mtime_ns


def test_a_created_object_has_a_random_time(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the random part of the time stamp at an hour: it is in the file's time and in the version.

    Whether two files can get equal times depends on the kernel; since 6.13 they hardly can.
    """
    monkeypatch.setattr("dcp_remote.storage.local_files.secrets.randbelow", lambda _: 3600 * 10**9)
    version = store.put("key", [b"x"], condition="absent")
    status = _path(store, "key").stat()
    assert status.st_mtime > time.time() + 3500
    assert f"{status.st_mtime_ns:x}" in str(version.etag)


def test_partial_writes(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writev(2) write 1, 2, 3, … bytes per call; the kernel itself writes a part from 2 GiB on."""
    takes = itertools.count(1)

    def writev(descriptor: int, views: list[memoryview]) -> int:
        return os.write(descriptor, b"".join(views)[: next(takes)])

    monkeypatch.setattr("dcp_remote.storage.local_files.os.writev", writev)
    buffers = [bytes([number]) * (number % 7) for number in range(200)]
    store.put("key", buffers)
    assert _path(store, "key").read_bytes() == b"".join(buffers)


def test_other_files_are_no_objects(store: LocalStore) -> None:
    """Read a pipe, which would block; list links to a folder and to itself, and a name that is not Unicode."""
    store.put("real/key", [b"x"])
    os.mkfifo(_path(store, "pipe"))
    _path(store, "loop").symlink_to(_path(store, "loop"))
    _path(store, "link").symlink_to(_path(store, "real"))
    Path(os.fsdecode(os.fsencode(_path(store, "")) + b"/\xff")).touch()
    assert [info.key for info in store.list()] == ["real/key"]
    with pytest.raises(ObjectNotFoundError):
        store.get("pipe", limit_bytes=1)
    with pytest.raises(ObjectNotFoundError):
        store.head("pipe")


def test_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open paths, relative paths and URLs, with known and unknown options; pickles keep the options."""
    monkeypatch.chdir(tmp_path)
    for url in ("x y/z", tmp_path / "x y/z", f"file://{tmp_path}/x%20y/z"):
        assert open_store(url).url == f"file://{tmp_path}/x%20y/z"
    trusting = open_store("x", {"allow_network_replace": True}).child("a/b")
    assert trusting.capabilities.compare_and_swap
    assert pickle.loads(pickle.dumps(trusting)).capabilities == trusting.capabilities
    with pytest.raises(InvalidArgumentError, match=r"Known: allow_network_replace.*endpoint_url, key") as caught:
        open_store("x", {"key": "hunter2", "endpoint_url": "y"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="True or False"):
        open_store("x", {"allow_network_replace": "no"})


def test_local_use_imports_no_client() -> None:
    """Open a path in a new process: no torch, obstore or boto3 is imported."""
    code = """
        import sys
        from dcp_remote.storage import open_store
        open_store("some/path"), open_store("memory://name")
        print({"torch", "obstore", "boto3", "fsspec"} & set(sys.modules))
    """
    out, err = _python(code).communicate(timeout=60)
    assert out == "set()\n", err


_MOUNTINFO = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw - proc proc rw
30 22 0:40 / /net rw,relatime shared:5 - nfs4 server:/net rw,vers=4.2
31 30 8:17 / /net/job/scratch rw - xfs /dev/sdb1 rw
32 22 0:41 / /vol/with\040space rw - cifs //server/share rw
33 22 0:42 / /vol/twice rw - nfs server:/old rw
34 33 0:43 / /vol/twice rw - tmpfs none rw
35 22 0:44 / /gcs rw master:3 propagate_from:2 - fuse.gcsfuse bucket rw
a line that is none
"""

_TYPES = {
    "ext4": ["/", "/data", "/network"],
    "nfs4": ["/net", "/net/job/run", "/net/job/scratchy"],
    "xfs": ["/net/job/scratch", "/net/job/scratch/run"],
    "cifs": ["/vol/with space/x"],
    "tmpfs": ["/vol/twice/x"],
    "fuse.gcsfuse": ["/gcs/x"],
}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "fuse.s3fs", "lustre", "virtiofs"}


def test_file_system_types() -> None:
    """Find the longest mount point that covers the path; of two on one folder the later. No network is trusted."""
    assert {kind: [file_system_type(_MOUNTINFO, path) for path in paths] for kind, paths in _TYPES.items()} == {
        kind: [kind] * len(paths) for kind, paths in _TYPES.items()
    }
    assert file_system_type("", "/x") is None
    assert not _NETWORK & LOCAL_FILE_SYSTEMS


def test_an_untrusted_file_system_refuses_swaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust no file system, as on a network mount: create, put and delete work, a swap says why it does not."""
    monkeypatch.setattr("dcp_remote.common.mounts.LOCAL_FILE_SYSTEMS", frozenset())
    assert "allow_network_replace" in swap_refusal(str(tmp_path))
    store = LocalStore(tmp_path)
    assert store.capabilities.swap_refusal
    version = store.put("key", [b"1"], condition="absent")
    with pytest.raises(ConditionFailedError):
        store.put("key", [b"2"], condition="absent")
    with pytest.raises(InvalidArgumentError, match=r"the file system is .*allow_network_replace"):
        store.put("key", [b"2"], condition=version)
    version = store.put("key", [b"3"])
    assert store.get("key", limit_bytes=1).version == version
    assert store.delete(["key"]) == {}
    trusted = LocalStore(tmp_path, allow_network_replace=True)
    version = trusted.put("key", [b"4"], condition="absent")
    trusted.put("key", [b"5"], condition=version)
    assert (tmp_path / "key").read_bytes() == b"5"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no file system here that makes no folders")
def test_a_file_system_without_folders() -> None:
    """Put into /proc, which refuses folders as if the parent were missing: an error, and no endless loop."""
    with pytest.raises(StorageError, match="no folder can be made here") as caught:
        LocalStore("/proc/nope/nor/this").put("key", [b"1"])
    assert not isinstance(caught.value, TransientStorageError)
