"""Targets of a coverage-guided fuzzer: bytes from a bucket, or a typed URL, and the functions that read them.

    python tests/attacks/fuzz.py TARGET [CORPUS] [options of libFuzzer]
    python tests/attacks/fuzz.py TARGET artifact-of-a-finding        # runs that one input again

A target raises only errors that its reader must not raise. Only the modules concerned are instrumented: torch is large.
"""

from __future__ import annotations

import importlib
import io
import sys
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

_TEXT = [f"dcp_remote.format.{name}" for name in ("json_tree", "json_text", "raw_buffers")]

# Modules that guide the fuzzer, by target. torch and numpy are known by what they raise.
MODULES = {
    "manifest": ["dcp_remote.format.document", "dcp_remote.format.manifest_json"],
    "sealed": [f"dcp_remote.format.{name}" for name in ("columns", "manifest_json", "manifest_validation", "tiling")],
    "columns": ["dcp_remote.format.columns"],
    "envelope": ["dcp_remote.format.document"],
    "json": [*_TEXT, *(f"dcp_remote.serialization.{name}_tags" for name in ("python", "class", "numpy", "torch"))],
    "raw": [*_TEXT, *(f"dcp_remote.serialization.{name}_tags" for name in ("python", "numpy", "torch"))],
    "program": [
        "dcp_remote.serialization.restricted_unpickler",
        "dcp_remote.serialization.torch_streams",
        "pickletools",
    ],
    "zip": ["dcp_remote.serialization.torch_streams", "zipfile"],
    "url": ["dcp_remote.storage.url"],
}

# The storage `data/0` of the fuzzer's programs.
STORAGE_BYTES = 64


def manifest(data: bytes) -> None:
    """Read `manifest.json` from these bytes; few get past the digest."""
    from dcp_remote.errors import CorruptCheckpointError, UnsupportedFormatError
    from dcp_remote.format import manifest_json

    for read in (manifest_json.decode_head, manifest_json.decode):
        try:
            read(data)
        except (CorruptCheckpointError, UnsupportedFormatError):
            continue


def sealed(data: bytes) -> None:
    """Read this JSON, sealed, without its first two bytes; an accepted document is written and read again."""
    from dcp_remote.errors import CorruptCheckpointError, UnsupportedFormatError
    from dcp_remote.format import manifest_json
    from dcp_remote.format.document import seal

    try:
        found = manifest_json.decode(seal(b'{"' + data))
    except (CorruptCheckpointError, UnsupportedFormatError):
        return
    if found is not None:
        written = manifest_json.encode(found)
        again = manifest_json.decode(written)
        assert again is not None
        assert manifest_json.encode(again) == written


def columns(data: bytes) -> None:
    """Read this text as a column; accepted columns are written and read again."""
    from dcp_remote.errors import CorruptCheckpointError
    from dcp_remote.format.columns import encode_column
    from tests.support.columns import decode_column

    try:
        values = decode_column(data.decode("utf-8", "replace"), name="fuzz")
    except CorruptCheckpointError:
        return
    assert values.tolist() == decode_column(encode_column(values), name="fuzz", count=len(values)).tolist()


def envelope(data: bytes) -> None:
    """Read a zstd frame, given without its magic number."""
    from dcp_remote.errors import CorruptCheckpointError
    from dcp_remote.format.document import unseal

    try:
        unseal(b"\x28\xb5\x2f\xfd" + data)
    except CorruptCheckpointError:
        return


def _decode(encoding: str, data: bytes) -> object:
    from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError
    from dcp_remote.serialization.objects import EncodedObject, decode_object

    try:
        return decode_object("k", EncodedObject(encoding, data))  # type: ignore[arg-type]  # one of the four encodings
    except (CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError):
        return None


def json(data: bytes) -> None:
    """Read this text as an object; accepted objects are given to torch's planner, as a reader does."""
    from dcp_remote.serialization.torch_streams import save

    save(_decode("json", data))


def raw(data: bytes) -> None:
    """Read this text of an object with the raw bytes behind it: all that follows the last line feed."""
    text, _, behind = data.rpartition(b"\n")
    padded = text + b" " * (-(8 + len(text)) % 64)
    _decode("json+raw", len(padded).to_bytes(8, "little") + padded + behind)


def program(data: bytes) -> None:
    """Read this pickle of a stream, without protocol and stop; accepted objects are given to torch's planner."""
    from dcp_remote.serialization.torch_streams import save

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + data + b".")
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data/0", bytes(STORAGE_BYTES))
    save(_decode("torch", packed.getvalue()))


def zip_(data: bytes) -> None:
    """Read these bytes as a whole stream."""
    _decode("torch", data)


def url(data: bytes) -> None:
    """Read a URL that a user typed; an accepted URL has one spelling."""
    from dcp_remote.errors import InvalidArgumentError
    from dcp_remote.storage.url import check_key, parse_url

    text = data.decode("utf-8", "surrogateescape")
    try:
        parsed = parse_url(text)
    except InvalidArgumentError:
        pass
    else:
        assert parse_url(parsed.canonical) == parsed
    try:
        check_key(text)
    except InvalidArgumentError:
        return
    assert not text.startswith("/")
    assert ".." not in text.split("/")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": manifest,
    "sealed": sealed,
    "columns": columns,
    "envelope": envelope,
    "json": json,
    "raw": raw,
    "program": program,
    "zip": zip_,
    "url": url,
}


def main(arguments: list[str]) -> None:
    """Run a target for ever, or as long as libFuzzer is told to."""
    name = arguments[1]
    # The fuzzer has no types, and wheels for Linux alone.
    atheris: Any = importlib.import_module("atheris")
    # A warning of a decoder is no finding, and would be printed a thousand times.
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=MODULES[name]):
        for module in MODULES[name]:
            importlib.import_module(module)
    target = TARGETS[name]
    target(b"")
    atheris.Setup([arguments[0], *arguments[2:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
