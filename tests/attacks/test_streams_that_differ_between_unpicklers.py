"""Streams that two readers read differently: the content that is checked must be the content that is loaded.

Python's `zipfile`, torch's zip reader, `pickletools` and two unpicklers each read a part of a stream. In every file one
of them sees only the harmless half; the other half would make a folder.
"""

from __future__ import annotations

import io
import os
import pathlib
import struct
import zipfile
from typing import Any

import pytest

from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError
from dcp_remote.serialization.objects import EncodedObject, decode_object
from dcp_remote.serialization.torch_streams import save
from tests.attacks.attacker import innocent_stream, integer, named, stream, tensor, word
from tests.support.figures import count

pytestmark = pytest.mark.torture


class Folder:
    """Object that makes a folder when unpickled without restriction."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def program_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def renamed(data: bytes, before: bytes, after: bytes, *, central: bool) -> bytes:
    """Rename a record in its own header alone, or in the directory at the end alone."""
    signature, offset = (b"PK\x01\x02", 46) if central else (b"PK\x03\x04", 30)
    at = data.index(signature)
    while data[at + offset : at + offset + len(before)] != before:
        at = data.index(signature, at + 1)
    return data[: at + offset] + after + data[at + offset + len(before) :]


def two_programs(evil: bytes, good: bytes, *, evil_first: bool) -> bytes:
    """Return a zip with two records that each could be the program."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        names = ["archive/data.pkl", "archive/data.pkL"]
        for name, content in zip(names, [evil, good] if evil_first else [good, evil], strict=True):
            archive.writestr(name, content)
        archive.writestr("archive/version", b"3\n")
    data = packed.getvalue()
    return renamed(data, b"archive/data.pkL", b"archive/data.pkl", central=evil_first)


def with_comment(data: bytes, comment: bytes) -> bytes:
    """Return a zip whose directory's end announces a comment."""
    at = data.rindex(b"PK\x05\x06")
    return data[: at + 20] + struct.pack("<H", len(comment)) + comment


def zips(evil: bytes) -> dict[str, bytes]:
    good = innocent_stream()
    evil_program, good_program = program_of(evil), program_of(good)
    return {
        "evil before good": evil + good,
        "good before evil": good + evil,
        "good in a comment of evil": with_comment(evil, good),
        "evil in a comment of good": with_comment(good, evil),
        "two programs, evil first": two_programs(evil_program, good_program, evil_first=True),
        "two programs, good first": two_programs(evil_program, good_program, evil_first=False),
        "named otherwise in its header": renamed(evil, b"archive/data.pkl", b"archive/data.pkL", central=False),
        "named otherwise in the directory": renamed(evil, b"archive/data.pkl", b"archive/data.pkL", central=True),
        "named with a backslash": renamed(evil, b"archive/data.pkl", b"archive\\data.pkl", central=True),
        "evil behind the end of the program": stream(good_program[2:] + evil_program),
        "evil behind the first value": stream(good_program[2:-1] + evil_program[2:-1]),
        "another protocol in the middle": stream(good_program[2:-1] + b"\x80\x04" + evil_program[2:-1]),
        "a pickle before the zip": evil_program + good,
        "a pickle alone": evil_program,
        "evil constants": stream(good_program[2:-1], d0=b"0" * 12).replace(b"byteorder", b"constants"),
    }


NAMES = list(zips(save(None)))


@pytest.mark.parametrize("name", NAMES)
def test_two_readers_of_one_zip(name: str, tmp_path: pathlib.Path) -> None:
    """A zip is refused, or only its harmless half is loaded; the folder is never made."""
    count("attacks")
    folder = tmp_path / "made"
    evil = save([Folder(folder)])
    assert b"archive/data.pkl" in evil
    data = zips(evil)[name]
    for encoding in ("torch", "pickle", "json"):
        try:
            found = decode_object("k", EncodedObject(encoding, data))
        except (CorruptCheckpointError, UnsafeObjectError):
            continue
        assert isinstance(found, dict)
        assert found["d"] == (1, (2.5, None))
    assert not folder.exists()


def storage(key: str, kind: str, items: int) -> bytes:
    return b"(" + word("storage") + named("torch", kind) + word(key) + word("cpu") + integer(items) + b"tQ"


# Python's unpickler, torch's, and pickletools read, or may read, each of these differently.
PROGRAMS: dict[str, bytes] = {
    "names of Python 2": b"ccopy_reg\n_reconstructor\n(c__builtin__\nobject\n",
    "a module with a space": b"ctorch Size\nx\n",
    "a name with dots": b"ctorch\nSize.__class__\n",
    "a name of nothing": b"ctorch\n\n",
    "a name with a carriage return": b"ctorch\nSize\r\n",
    "a name of another alphabet": "ctorch\n\uff33ize\n".encode(),
    "the same storage twice, larger": storage("0", "FloatStorage", 1) + storage("0", "FloatStorage", 10**6) + b"\x86",
    "the same storage as another class": b"("
    + tensor(4, 1, items=4, storage="ByteStorage")
    + tensor(10**6, 1, items=10**6, storage="DoubleStorage")
    + b"t",
    "a negative index of the memo": b"Nr\xff\xff\xff\xffh\xff",
    "a text with a wrong length": b"X\xff\xff\xff\xffabc",
    "a text of Python 2": b"U\x03abc",
    "a number in words": b"I01\n",
    "a number with an underscore": b"I1_000\n",
    "a long number without an end": b"\x8b\xff\xff\xff\x7f1",
    "a frame": b"\x95\x00\x00\x00\x00\x00\x00\x00\x00N",
    "out of band": b"\x97",
    "duplicated": b"]2\x86",
    "popped": b"]]0",
    "popped to a mark": b"](]1",
    "an instance": b"(c__builtin__\nset\n]o",
    "an old instance": b"(]i__builtin__\nset\n",
    "a persistent name": b"Pabc\n",
    "an extension": b"\x82\x01",
    "a build of a list": b"]}b",
    "items of a list": b"]K\x01K\x02s",
    "a list as a persistent id": b"]Q",
    "two values": b"NN",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_program_for_three_machines(name: str) -> None:
    """A program is refused, or gives a plain value from the top of the stack."""
    count("attacks")
    try:
        found = decode_object("k", EncodedObject("torch", stream(PROGRAMS[name], d0=b"1234")))
    except (CorruptCheckpointError, UnsafeObjectError):
        return
    assert name in ("a text of Python 2", "a number in words", "two values"), found
    assert found in (None, "abc", True)


def test_what_is_checked_is_what_is_loaded() -> None:
    """A storage is loaded once, by its first use: a second, larger use does not evade its bounds."""
    count("attacks")
    program = b"(" + tensor(1, 1, items=1) + tensor(250_000, 1, items=250_000) + b"t"
    for items in (1, 250_000):
        with pytest.raises(CorruptCheckpointError):
            decode_object("k", EncodedObject("torch", stream(program, d0=bytes(4 * items))))
