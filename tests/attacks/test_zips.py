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
from tests.attacks.attacker import innocent_stream, stream
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
