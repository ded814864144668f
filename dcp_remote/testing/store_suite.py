"""Tests that every store must pass. Subclass `StoreSuite`, provide a store and raw access to its bytes, and run pytest.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def store(self, tmp_path: Path) -> ObjectStore:
            return MyStore(tmp_path)

        def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None: ...
        def raw_read(self, store: ObjectStore, key: str) -> bytes: ...

`raw_write` and `raw_read` access the bytes by other means than the store, so that the store is not tested by itself.
"""

from __future__ import annotations

import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import pytest

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import (
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    TransientStorageError,
)
from dcp_remote.storage.base import ObjectStore, Version, may_follow

_Result = TypeVar("_Result")

_BAD_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/./b", "a\\b", "a\0b", "a\nb"]

# Valid keys that URL encoding, a shell or a file system may mishandle.
_STRANGE_KEYS = [
    "with space",
    " leading",
    "trailing ",
    "per%cent",
    "escaped%2Fslash%20",
    "plus+and&and=",
    "question?",
    "fragment#",
    "quote'\"",
    "colon:semi;comma,",
    "tilde~at@star*bang!(){}[]|^`$<>",
    "...",
    ".hidden",
    "umlaut-äöü",
    "日本語/データ",
    "\U0001f600",
    "x" * 200,
]

# Nearly twice the number of buffers that Linux takes in one call (1,024), so that a store must make several calls.
_MANY_BUFFERS = 2_000


class StoreSuite:
    """Tests of the contract of `dcp_remote.storage.base`. Each test gets an empty store.

    Attributes:
        version_is_digest: True if equal contents have equal versions, as S3's ETag; the package writes a nonce into all
            objects that it replaces by compare-and-swap.
    """

    version_is_digest: ClassVar[bool] = False

    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        """Return an empty store; each subclass defines this fixture."""
        raise NotImplementedError

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Write an object by other means than the store."""
        raise NotImplementedError

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        """Read an object by other means than the store."""
        raise NotImplementedError

    def test_what_is_put_is_there(self, store: ObjectStore) -> None:
        """Put an object; every verb that reads, and raw_read, sees it, all with the same version."""
        version = store.put("a/b", [b"hello ", b"world"])
        assert self.raw_read(store, "a/b") == b"hello world"
        content = store.get("a/b", limit_bytes=100)
        assert content.data == b"hello world"
        info = store.head("a/b")
        assert (info.key, info.size_bytes) == ("a/b", 11)
        assert version == content.version == info.version
        assert [(found.key, found.size_bytes, found.version) for found in store.list()] == [("a/b", 11, version)]

    def test_reads_what_others_wrote(self, store: ObjectStore) -> None:
        """Write raw bytes; every verb that reads sees them."""
        self.raw_write(store, "foreign/key", b"0123456789")
        buffer = bytearray(4)
        store.get_into("foreign/key", 3, memoryview(buffer))
        assert buffer == b"3456"
        assert store.get("foreign/key", limit_bytes=10).data == b"0123456789"
        assert store.head("foreign/key").size_bytes == 10
        assert [info.key for info in store.list()] == ["foreign/key"]

    def test_modification_times_do_not_go_back(self, store: ObjectStore) -> None:
        """Put two objects in turn; their times are ascending, in head and in list."""
        store.put("first", [b"1"])
        store.put("second", [b"2"])
        first, second = store.head("first").modified_seconds, store.head("second").modified_seconds
        assert 0 < first <= second + 0.01  # a local store spreads its timestamps over 10 ms
        # Listings may have coarser timestamps.
        assert [info.modified_seconds for info in store.list()] == pytest.approx([first, second], abs=1.0)

    @pytest.mark.parametrize("others", [[], ["folder/object"]])
    def test_missing(self, store: ObjectStore, others: list[str]) -> None:
        """Use every verb on an absent key, on a key below it, and on a key that may be a prefix of another."""
        for other in others:
            store.put(other, [b"x"])
        for key in ("missing", "missing/below", "folder"):
            with pytest.raises(ObjectNotFoundError):
                store.head(key)
            with pytest.raises(ObjectNotFoundError):
                store.get(key, limit_bytes=10)
            with pytest.raises(FileNotFoundError):
                store.get_into(key, 0, memoryview(bytearray(1)))
            assert store.delete([key]) == {}
        assert [info.key for info in store.list()] == others
        assert all(self.raw_read(store, other) == b"x" for other in others)
        assert list(store.list("missing/")) == []

    def test_absent(self, store: ObjectStore) -> None:
        """Create twice: the second is refused and changes nothing; after a delete, a create succeeds again."""
        store.put("key", [b"first"], condition="absent")
        with pytest.raises(ConditionFailedError):
            store.put("key", [b"second"], condition="absent")
        assert self.raw_read(store, "key") == b"first"
        store.delete(["key"])
        store.put("key", [b"third"], condition="absent")
        assert self.raw_read(store, "key") == b"third"

    def test_one_of_many_creates(self, store: ObjectStore) -> None:
        """Let sixteen threads create one key at once, four times: one is told that it succeeded, and has its bytes."""
        for attempt in range(4):
            key = f"race-{attempt}"

            def create(number: int, key: str = key) -> bool:
                try:
                    store.put(key, [f"writer {number}".encode()], condition="absent")
                except ConditionFailedError:
                    return False
                return True

            won = _run_at_once(16, create)
            assert sum(won) == 1
            assert self.raw_read(store, key) == f"writer {won.index(True)}".encode()

    def test_any_replaces(self, store: ObjectStore) -> None:
        """Replace longer content by shorter; the version is new."""
        first = store.put("key", [b"the longer one"])
        second = store.put("key", [b"short"])
        assert first != second
        assert self.raw_read(store, "key") == b"short"
        assert store.head("key").version == second

    def test_readers_see_whole_objects(self, store: ObjectStore) -> None:
        """Let two threads overwrite one key with runs of one letter; two readers never see a mixture or a part."""
        size_bytes = 300_000
        store.put("key", [b"-" * size_bytes])

        def work(number: int) -> bool:
            for _ in range(10):
                if number < 2:
                    store.put("key", [b"ab"[number : number + 1] * size_bytes])
                else:
                    data = store.get("key", limit_bytes=size_bytes).data
                    if len(data) != size_bytes or len(set(data)) != 1:
                        return False
            return True

        assert all(_run_at_once(4, work))

    def test_swap(self, store: ObjectStore) -> None:
        """Replace the current version; refuse an older version, and any version of an absent object."""
        first = store.put("key", [b"1"], condition="absent")
        if not store.capabilities.compare_and_swap:
            assert store.capabilities.swap_refusal
            with pytest.raises(InvalidArgumentError):
                store.put("key", [b"2"], condition=first)
            return
        assert store.capabilities.swap_refusal == ""
        second = store.put("key", [b"2"], condition=first)
        assert self.raw_read(store, "key") == b"2"
        with pytest.raises(ConditionFailedError):
            store.put("key", [b"3"], condition=first)
        assert self.raw_read(store, "key") == b"2"
        store.delete(["key"])
        for version in (first, second, Version(etag='"unheard-of"')):
            with pytest.raises(ConditionFailedError):
                store.put("key", [b"4"], condition=version)
        with pytest.raises(ObjectNotFoundError):
            store.head("key")

    def test_versions_do_not_repeat(self, store: ObjectStore) -> None:
        """Put equal content in every way, also after deletes: no version occurs twice, and all older ones are stale.

        If versions are digests, the content carries a nonce, as all objects do that the package swaps.
        """

        def content() -> list[Buffer]:
            return [b"same", random.randbytes(16) if self.version_is_digest else b"same same same s"]

        versions = [store.put("key", content(), condition="absent")]
        for _ in range(30):
            versions.append(store.put("key", content()))
            if store.capabilities.compare_and_swap:
                versions.append(store.put("key", content(), condition=versions[-1]))
            store.delete(["key"])
            versions.append(store.put("key", content(), condition="absent"))
        assert len(set(versions)) == len(versions)
        if store.capabilities.compare_and_swap:
            for version in versions[:-1]:
                with pytest.raises(ConditionFailedError):
                    store.put("key", content(), condition=version)

    def test_no_update_is_lost(self, store: ObjectStore) -> None:
        """Let eight threads add ten lines each to one object by compare-and-swap; at the end all eighty are there.

        A swap may end without a clear outcome: then the thread reads the object to find out.
        """
        if not store.capabilities.compare_and_swap:
            with pytest.raises(InvalidArgumentError):
                store.put("lines", [b"0"], condition=Version(etag='"0"'))
            return
        store.put("lines", [b"first\n"], condition="absent")

        def write(_: int) -> list[bytes]:
            lines = [b"%032x" % random.getrandbits(128) for _ in range(10)]
            for line in lines:
                unclear = False  # a put without an answer may be carried out later, so that the next one is refused
                while line not in (found := store.get("lines", limit_bytes=10_000)).data.split():
                    try:
                        store.put("lines", [found.data, line, b"\n"], condition=found.version)
                        break
                    except (ConditionFailedError, TransientStorageError) as error:
                        unclear |= isinstance(error, TransientStorageError)
                        if not unclear:
                            assert line not in store.get("lines", limit_bytes=10_000).data.split()
            return lines

        written = [line for lines in _run_at_once(8, write) for line in lines]
        assert sorted(self.raw_read(store, "lines").split()) == sorted([b"first", *written])

    def test_delete(self, store: ObjectStore) -> None:
        """Delete many keys, some of them absent; no keys; the same keys again."""
        keys = [f"folder-{number % 3}/object-{number}" for number in range(20)]
        for key in keys:
            store.put(key, [b"x"])
        assert store.delete([]) == {}
        assert store.delete([*keys[:15], "missing", "missing/too"]) == {}
        assert [info.key for info in store.list()] == sorted(keys[15:])
        assert store.delete(keys) == {}
        assert store.delete(keys) == {}
        assert list(store.list()) == []

    def test_list(self, store: ObjectStore) -> None:
        """List with every prefix and `after`, and compare with a sorted list of the keys.

        The order of keys that are not ASCII is not checked: some stores order them by UTF-16.
        """
        keys = sorted(["a-b", "a.b", "a/b", "a/c/d", "a/c.d", "a0", "b/x", "b/y", "ä", "\uffee", "\U0001f600", "B"])
        for key in keys:
            self.raw_write(store, key, key.encode())
        for prefix in ("", "a", "a/", "a/c", "a/c/", "a/c.", "b", "b/x", "b/x/", "missing", "ä", "\uffee"):
            for after in ("", "a", "a/", "a/b", "a/c", "a/c/zz", "a0", "b", "b/x", "missing", "\uffee", "\U0001f600"):
                expected = [key for key in keys if key.startswith(prefix) and key > after]
                found = [info.key for info in store.list(prefix, after=after)]
                assert sorted(found) == expected, (prefix, after)
                assert [key for key in found if key.isascii()] == [key for key in expected if key.isascii()]
                assert all(may_follow(key, last) for last, key in itertools.pairwise(found))
        assert {info.key: info.size_bytes for info in store.list()} == {key: len(key.encode()) for key in keys}

    def test_get_has_a_limit(self, store: ObjectStore) -> None:
        """Get an object with its size as limit; one byte less is refused."""
        store.put("key", [b"12345"])
        assert store.get("key", limit_bytes=5).data == b"12345"
        with pytest.raises(CorruptCheckpointError, match="limit_bytes=4"):
            store.get("key", limit_bytes=4)

    def test_get_into(self, store: ObjectStore) -> None:
        """Read every range of a short object into the middle of a buffer, whose ends stay unchanged."""
        data = bytes(range(10))
        store.put("key", [data])
        for start in range(10):
            for stop in range(start + 1, 11):
                buffer = bytearray(b"\xff" * 12)
                store.get_into("key", start, memoryview(buffer)[1 : 1 + stop - start])
                assert buffer == (b"\xff" + data[start:stop]).ljust(12, b"\xff")

    def test_short_objects_are_noticed(self, store: ObjectStore) -> None:
        """Read ranges that end, or begin, after the end of the object."""
        store.put("key", [b"0123456789"])
        store.put("empty", [])
        for key, start, size_bytes in (("key", 0, 11), ("key", 9, 2), ("key", 10, 1), ("key", 99, 1), ("empty", 0, 1)):
            with pytest.raises(CorruptCheckpointError):
                store.get_into(key, start, memoryview(bytearray(size_bytes)))

    def test_empty_objects(self, store: ObjectStore) -> None:
        """Put no buffers, and empty buffers."""
        for key, buffers in (("none", []), ("empty", [b"", b""])):
            store.put(key, buffers, condition="absent")
            assert self.raw_read(store, key) == b""
            assert store.get(key, limit_bytes=0).data == b""
            assert store.head(key).size_bytes == 0

    def test_many_buffers(self, store: ObjectStore) -> None:
        """Put two thousand buffers of odd sizes, some of them empty; they arrive in order."""
        rng = random.Random(7)
        buffers: list[Buffer] = [rng.randbytes(rng.choice((0, 1, 3, 7, 1021, 4099))) for _ in range(_MANY_BUFFERS)]
        store.put("key", buffers)
        assert self.raw_read(store, "key") == b"".join(buffers)

    def test_large_objects(self, store: ObjectStore) -> None:
        """Put nine megabytes in two buffers; eight threads read a range each."""
        data = random.Random(11).randbytes(9_000_001)
        store.put("key", [memoryview(data)[:5_000_003], memoryview(data)[5_000_003:]])
        found = bytearray(len(data))

        def read(number: int) -> None:
            start, stop = (len(data) * number // 8, len(data) * (number + 1) // 8)
            store.get_into("key", start, memoryview(found)[start:stop])

        _run_at_once(8, read)
        assert found == data

    def test_kinds_of_buffers(self, store: ObjectStore) -> None:
        """Put buffers that are read-only or writable, whole or sliced; none is changed."""
        writable = bytearray(b"0123456789")
        buffers: list[Buffer] = [
            b"bytes",
            bytearray(b"bytearray"),
            memoryview(b"read-only"),
            memoryview(b"abcdef").toreadonly()[2:4],
            memoryview(writable)[3:7],
            memoryview(writable)[:0],
            memoryview(memoryview(writable)[1:])[8:],
        ]
        store.put("key", buffers)
        assert self.raw_read(store, "key") == b"bytesbytearrayread-onlycd34569"
        assert writable == b"0123456789"

    def test_children(self, store: ObjectStore) -> None:
        """Use a child: it is the same store below a prefix, and sees no object outside."""
        child = store.child("a/b")
        grandchild = child.child("c")
        version = grandchild.put("d/e", [b"x"])
        store.put("a/bb", [b"beside"])
        assert self.raw_read(store, "a/b/c/d/e") == b"x"
        assert store.head("a/b/c/d/e").version == version
        assert [info.key for info in child.list()] == ["c/d/e"]
        assert [info.key for info in child.list("c/", after="c/d")] == ["c/d/e"]
        assert [info.key for info in grandchild.list("d")] == ["d/e"]
        assert child.url == f"{store.url.rstrip('/')}/a/b"
        assert child.capabilities == store.capabilities
        with pytest.raises(ObjectNotFoundError):
            child.head("bb")
        assert child.delete(["c/d/e"]) == {}
        assert [info.key for info in store.list()] == ["a/bb"]

    @pytest.mark.parametrize("key", _STRANGE_KEYS)
    def test_strange_keys(self, store: ObjectStore, key: str) -> None:
        """Use each key with all verbs, at the top and in a child."""
        for place, name in ((store, key), (store.child("below"), f"below/{key}")):
            place.put(key, [name.encode()], condition="absent")
            assert self.raw_read(store, name) == name.encode()
            assert place.get(key, limit_bytes=1000).data == name.encode()
            assert place.head(key).key == key
            assert [info.key for info in place.list(key)] == [key]
            assert list(place.list(after=key)) == [] or place is store
            assert place.delete([key]) == {}
            assert list(place.list(key)) == []

    @pytest.mark.parametrize("key", _BAD_KEYS)
    def test_bad_keys(self, store: ObjectStore, key: str) -> None:
        """Use each invalid key with all verbs: refused before a request is sent."""
        calls: list[Callable[[], object]] = [
            lambda: store.head(key),
            lambda: store.get(key, limit_bytes=1),
            lambda: store.get_into(key, 0, memoryview(bytearray(1))),
            lambda: store.put(key, [b"x"]),
            lambda: store.delete(["good", key]),
            lambda: store.child(key),
        ]
        store.put("good", [b"x"])
        for call in calls:
            with pytest.raises(InvalidArgumentError):
                call()
        assert [info.key for info in store.list()] == ["good"]

    def test_pickling(self, store: ObjectStore) -> None:
        """Pickle the store, a child, and results: the copies see the same objects and are equal."""
        version = store.put("a/b", [b"x"])
        copy, child = pickle.loads(pickle.dumps(store)), pickle.loads(pickle.dumps(store.child("a")))
        assert (copy.url, copy.capabilities) == (store.url, store.capabilities)
        assert copy.get("a/b", limit_bytes=1).version == child.head("b").version == version
        assert pickle.loads(pickle.dumps(store.head("a/b"))) == store.head("a/b")

    def test_errors_cross_processes(self, store: ObjectStore) -> None:
        """Pickle each kind of error: the copy has the same type and text, and names the key."""
        store.put("key", [b"x"])
        calls: list[Callable[[], object]] = [
            lambda: store.put("key", [b"y"], condition="absent"),
            lambda: store.get("key", limit_bytes=0),
            lambda: store.get_into("key", 0, memoryview(bytearray(2))),
            lambda: store.child("key-of").head("nothing"),
            lambda: store.head("/key"),
        ]
        for call in calls:
            with pytest.raises((ConditionFailedError, CorruptCheckpointError, OSError, ValueError)) as caught:
                call()
            copy = pickle.loads(pickle.dumps(caught.value))
            assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
            assert "key" in str(copy)


def _run_at_once(threads: int, work: Callable[[int], _Result]) -> list[_Result]:
    """Run `work` in a number of threads, which start together."""
    barrier = threading.Barrier(threads)

    def run(number: int) -> _Result:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))
