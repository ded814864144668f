"""Encoding of Python objects as bytes, and decoding without trusting any pickle.

Objects that training keeps beside its tensors (steps, learning rates, states of schedulers and random number
generators) are written as JSON, with tags for types that JSON lacks, and large buffers follow as raw bytes. An object
that has no tag, or that is reachable on two paths, stays a `torch.save` stream if that stream loads without running
code. Any other object is refused when it is saved, not when it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dcp_remote.common.digests import digest
from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError
from dcp_remote.format.json_text import encode_by_place, from_text, to_text
from dcp_remote.format.json_tree import Decoder, Encoder, Json, Refusal, Tag, type_name
from dcp_remote.format.raw_buffers import TEXT_BYTES_MAX, Segments, head_of, lay_out, split
from dcp_remote.serialization.class_tags import CLASS_TAGS, class_tag
from dcp_remote.serialization.numpy_tags import NUMPY_TAGS
from dcp_remote.serialization.python_tags import PYTHON_TAGS
from dcp_remote.serialization.restricted_unpickler import DamagedStreamError, UnsafeStreamError
from dcp_remote.serialization.torch_streams import load_restricted, load_trusted, save
from dcp_remote.serialization.torch_tags import TORCH_TAGS

# "json": tagged UTF-8 JSON text. "json+raw": the same followed by raw bytes, see `format/raw_buffers.py`. "torch": a
# `torch.save` stream that loads without running code. "pickle": a `torch.save` stream that runs code.
Encoding: TypeAlias = Literal["json", "json+raw", "torch", "pickle"]

_TAGS = (*PYTHON_TAGS, *NUMPY_TAGS, *TORCH_TAGS)
_TAG_BY_TYPE: dict[type, Tag] = {tag.kind: tag for tag in _TAGS}
_TAG_BY_NAME: dict[str, Tag] = {tag.name: tag for tag in (*_TAGS, *CLASS_TAGS)}

_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})

# Refused values that an error names. The error is sent to all ranks, so it stays short.
_REFUSALS_NAMED_MAX = 5

_NEEDS_PICKLE = (
    "An object cannot be stored without pickle, which runs code when it is loaded. Put Opaque(as_plain(value)), which "
    "stores its fields, or what it is made of in its place; or pass allow_pickle=True where it is saved and loaded."
)


@dataclass(frozen=True, slots=True)
class EncodedObject:
    """An object as it is stored."""

    encoding: Encoding
    data: bytes  # the stored bytes, or the first of them
    # Memory whose bytes follow `data`: parts of the object when encoded; when decoded, the memory that the stored bytes
    # were read into, which the decoded object may keep.
    buffers: tuple[memoryview, ...] = ()

    @property
    def segments(self) -> Segments:
        """`data` and `buffers` as one sequence of bytes."""
        return Segments([memoryview(self.data), *self.buffers] if self.data else self.buffers)

    @property
    def length_bytes(self) -> int:
        """Length of `data` and `buffers` together."""
        return len(self.segments)


def encode_object(key: str, value: object, *, allow_pickle: bool = False) -> EncodedObject:
    """Encode an object. Its large buffers are not copied, so it must not change until it is stored.

    Raises:
        UnsafeObjectError: The object needs pickle, which is not allowed, or cannot be pickled either. Names the refused
            types and their places in the object.
    """
    encoded, refusals = _encode_json(value)
    if encoded is not None:
        return encoded
    try:
        stream = save(value)
    except MemoryError:
        raise
    except Exception as error:
        # The `__reduce__` of a user's class may raise anything.
        raise _unsafe_object_error(
            key,
            "An object cannot be pickled, so not even allow_pickle=True stores it. Keep it out of the state.",
            refusals,
            error,
        ) from error
    return encode_saved(key, value, stream, allow_pickle=allow_pickle)


def encode_saved(key: str, value: object, stream: bytes, *, allow_pickle: bool = False) -> EncodedObject:
    """Encode a value as the stream that `torch.save` made of it: "torch" if it loads without running code."""
    try:
        load_restricted(stream)
    except (UnsafeStreamError, DamagedStreamError) as error:
        if allow_pickle:
            return EncodedObject("pickle", stream)
        raise _unsafe_object_error(key, _NEEDS_PICKLE, _encode_json(value)[1], error) from error
    return EncodedObject("torch", stream)


def digest_object(value: object) -> int:
    """Return a digest of 32 bits above 0, the same for equal objects of different processes.

    Returns 0 for an object that has no encoding as JSON, of which nothing is known. The order of a dict's keys does not
    count. Buffers are read in place, at 0.05 s per GiB.
    """
    if type(value) in _PLAIN_TYPES:  # nearly all objects of a state: a tenth of the time
        text = repr(value).encode("utf-8", "surrogatepass")
    else:
        encoder = Encoder(_find_tag)
        try:
            tree = encoder.value(value)
            if encoder.refusals:
                return 0
            text = json.dumps(tree, sort_keys=True, default=lambda buffer: digest(buffer.view).hex()).encode()
        except RecursionError:
            return 0
    return int.from_bytes(digest(text)[:4]) or 1


def find_refusals(value: object) -> list[Refusal]:
    """Return the parts of an object for which `encode_object` refuses it without `allow_pickle`."""
    try:
        encode_object("", value)
    except UnsafeObjectError:
        _, refusals = _encode_json(value)
        return refusals
    return []


def encode_stream(key: str, stream: bytes, *, allow_pickle: bool = False) -> EncodedObject:
    """Encode an object that torch's planner has just pickled in this process, from its `torch.save` stream.

    Bytes from anywhere else must not be passed: they may be unpickled without restriction.

    Raises:
        UnsafeObjectError: The object needs pickle, which is not allowed, or the stream does not load. Names the refused
            types and their places in the object.
    """
    try:
        value = load_restricted(stream)
    except (UnsafeStreamError, DamagedStreamError):
        value = _load_own_stream(key, stream)
    encoded, _ = _encode_json(value)
    return encoded or encode_saved(key, value, stream, allow_pickle=allow_pickle)


def decode_object(key: str, encoded: EncodedObject, *, allow_pickle: bool = False) -> object:
    """Decode an object, with its tensors on the CPU. Runs no code that `encoded` names, unless pickle is allowed.

    Memory is proportional to the length of the data, whatever sizes the data claims; large tensors and arrays of
    "json+raw" use the memory of `encoded.buffers` instead of their own.

    Raises:
        CorruptCheckpointError: The bytes are not what an encoder writes.
        UnsafeObjectError: The object needs code to load, or a class that is not imported, or pickle, which is not
            allowed.
        UnsupportedFormatError: The object has a tag, a type or an encoding of a newer version.
    """
    data = encoded.segments[0 : encoded.length_bytes]
    if encoded.encoding in ("json", "json+raw"):
        return _decode_json(key, data, has_raw=encoded.encoding == "json+raw")
    if encoded.encoding == "torch":
        try:
            return load_restricted(bytes(data))
        except UnsafeStreamError as error:
            raise UnsafeObjectError(
                "A stored object needs code to load although it is marked as safe: this checkpoint was tampered with, "
                "or written by a newer torch.",
                key=key,
                types=", ".join(error.type_names),
                cause=error,
            ) from error
        except DamagedStreamError as error:
            raise CorruptCheckpointError("A stored object is damaged.", key=key, cause=error) from error
    if encoded.encoding == "pickle":
        return _load_pickle(key, bytes(data), allow_pickle=allow_pickle)
    raise UnsupportedFormatError(
        "A stored object has an encoding that this version does not know. Upgrade dcp_remote.",
        key=key,
        encoding=encoded.encoding,
    )


def _find_tag(value: object) -> Tag | None:
    return _TAG_BY_TYPE.get(type(value)) or class_tag(type(value))


def _encode_json(value: object) -> tuple[EncodedObject | None, list[Refusal]]:
    encoder = Encoder(_find_tag)
    try:
        tree: Json = encoder.value(value)
        if not encoder.refusals:
            if sum(buffer.view.nbytes for buffer in encoder.buffers) <= TEXT_BYTES_MAX:
                return EncodedObject("json", to_text(tree)), []
            views = tuple(buffer.view for buffer in lay_out(encoder.buffers))
            return EncodedObject("json+raw", head_of(to_text(tree, encode_by_place)), views), []
    except RecursionError:
        # The caller may have used up most of the stack already.
        return None, [Refusal(type_name(value), "", "nested too deep")]
    return None, encoder.refusals


def _decode_json(key: str, data: memoryview, *, has_raw: bool) -> object:
    try:
        text, raw = split(data) if has_raw else (data, memoryview(b""))
    except ValueError as error:
        raise CorruptCheckpointError("A stored object is damaged.", key=key, cause=error) from error
    decoder = Decoder(key, _TAG_BY_NAME, raw)
    try:
        value: object = decoder.value(from_text(key, text))
    except RecursionError as error:
        raise CorruptCheckpointError("A stored object nests too deep.", key=key) from error
    decoder.finish()
    return value


def _load_own_stream(key: str, stream: bytes) -> object:
    # Unpickling is safe here, because this process has just pickled these bytes from its own objects.
    try:
        return load_trusted(stream)
    except MemoryError:
        raise
    except Exception as error:
        raise UnsafeObjectError(
            "An object cannot be stored: this process cannot load what it just pickled.", key=key, cause=error
        ) from error


def _load_pickle(key: str, stream: bytes, *, allow_pickle: bool) -> object:
    if not allow_pickle:
        raise UnsafeObjectError(
            "A stored object is a pickle, and loading a pickle runs code that it names.", key=key
        ).advise(allow_pickle="allow_pickle=True loads it, if you trust the writer of this checkpoint")
    try:
        return load_trusted(stream)
    except MemoryError:
        raise
    except (ImportError, AttributeError) as error:
        raise UnsafeObjectError(
            "A stored pickle needs code that cannot be imported: load with the code that saved it.",
            key=key,
            cause=error,
        ) from error
    except Exception as error:
        raise CorruptCheckpointError("A stored pickle does not load.", key=key, cause=error) from error


def _unsafe_object_error(key: str, message: str, refusals: Sequence[Refusal], cause: Exception) -> UnsafeObjectError:
    named = refusals[:_REFUSALS_NAMED_MAX]
    return UnsafeObjectError(
        message,
        key=key,
        types=", ".join(dict.fromkeys(refusal.type_name for refusal in named)),
        where=", ".join(refusal.where or "the object itself" for refusal in named),
        why="; ".join(dict.fromkeys(refusal.why for refusal in named)),
        refused=len(refusals) if len(refusals) > len(named) else None,
        cause=cause,
    )
