"""Python objects to bytes and back, without trusting any pickle.

What training keeps beside its tensors (steps, learning rates, states of schedulers and of random number generators)
is written as JSON, with tags where JSON has no word, and large buffers behind it as they are. What has no tag, or is
reachable on two paths, stays a stream of `torch.save` if that loads without running code. Anything else is refused when
it is saved, not when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError
from dcp_remote.object_classes import CLASS_TAGS, class_tag
from dcp_remote.object_numpy import NUMPY_TAGS
from dcp_remote.object_program import DamagedStreamError, UnsafeStreamError
from dcp_remote.object_raw import TEXT_BYTES_MAX, Segments, head_of, lay_out, split
from dcp_remote.object_streams import load_restricted, load_trusted, save
from dcp_remote.object_tags import INNER_TAGS, PYTHON_TAGS
from dcp_remote.object_text import by_place, from_text, to_text
from dcp_remote.object_torch import TORCH_TAGS
from dcp_remote.object_tree import Decoder, Encoder, Json, Refusal, Tag, type_name

Encoding: TypeAlias = Literal["json", "json+raw", "torch", "pickle"]

_TAG_BY_TYPE: dict[type, Tag] = {tag.kind: tag for tag in (*PYTHON_TAGS, *NUMPY_TAGS, *TORCH_TAGS)}
_TAG_BY_NAME: dict[str, Tag] = {tag.name: tag for tag in (*_TAG_BY_TYPE.values(), *INNER_TAGS, *CLASS_TAGS)}

# As many as help; an error crosses ranks.
_REFUSALS_NAMED_MAX = 5

_WHAT_TO_DO = (
    "An object cannot be stored without pickle, which runs code when it is loaded: pass allow_pickle=True to whoever "
    "saves and loads, or store it in another way."
)


@dataclass(frozen=True, slots=True)
class EncodedObject:
    """An object as it is stored.

    Attributes:
        encoding: "json": UTF-8 JSON text, tagged. "json+raw": the same with raw bytes behind it, see `object_raw.py`.
            "torch": a `torch.save` stream that loads without running code. "pickle": one that does not.
        data: Its bytes, or the first of them.
        buffers: Memory whose bytes follow: of the live object, or that an object was read into, which may keep it.
    """

    encoding: Encoding
    data: bytes
    buffers: tuple[memoryview, ...] = ()

    @property
    def segments(self) -> Segments:
        """All bytes."""
        return Segments([memoryview(self.data), *self.buffers] if self.data else self.buffers)

    @property
    def length_bytes(self) -> int:
        """The length of all bytes."""
        return len(self.segments)


def encode_object(key: str, value: object, *, allow_pickle: bool = False) -> EncodedObject:
    """Encode a live object.

    Args:
        key: Its name, for errors.
        value: Anything. It is not changed, and must not change until it is stored: its large buffers are not copied.
        allow_pickle: Take what only code could load, as "pickle".

    Raises:
        UnsafeObjectError: It has no encoding without pickle, or not even that one; names the types and their places.
    """
    encoded, refusals = _encode_json(value)
    if encoded is not None:
        return encoded
    try:
        stream = save(value)
    except MemoryError:
        raise
    except Exception as error:
        # Its own `__reduce__` may raise anything.
        raise _refused(
            key,
            "An object cannot be pickled, so not even allow_pickle=True stores it. Keep it out of the state.",
            refusals,
            error,
        ) from error
    try:
        load_restricted(stream, is_own=True)
    except (UnsafeStreamError, DamagedStreamError) as error:
        if allow_pickle:
            return EncodedObject("pickle", stream)
        raise _refused(key, _WHAT_TO_DO, refusals, error) from error
    return EncodedObject("torch", stream)


def encode_stream(key: str, stream: bytes, *, allow_pickle: bool = False, tagged: bool = True) -> EncodedObject:
    """Encode what torch's planner pickled in this very process a moment ago.

    Args:
        key: Its name, for errors.
        stream: From `torch.save`. Never bytes from anywhere else: they may be unpickled without restriction.
        allow_pickle: Take what only code could load, as "pickle".
        tagged: Encode as JSON what has tags. A tensor by itself stays a stream.

    Raises:
        UnsafeObjectError: It has no encoding without pickle, or does not load; names the types and their places.
    """
    refused: Exception | None = None
    try:
        value = load_restricted(stream, is_own=True)
    except (UnsafeStreamError, DamagedStreamError) as error:
        refused = error
        value = _load_own(key, stream)
    encoded, refusals = _encode_json(value) if tagged or refused is not None else (None, [])
    if encoded is not None and tagged:
        return encoded
    if refused is None:
        return EncodedObject("torch", stream)
    if allow_pickle:
        return EncodedObject("pickle", stream)
    raise _refused(key, _WHAT_TO_DO, refusals, refused) from refused


def decode_object(key: str, encoded: EncodedObject, *, allow_pickle: bool = False) -> object:
    """The object again, its tensors on the CPU. Runs no code that `encoded` names, unless pickle is allowed.

    Memory is in proportion to the length of the data, whatever that claims; large tensors and arrays of "json+raw" take
    none of their own.

    Args:
        key: Its name, for errors.
        encoded: From any writer.
        allow_pickle: Load "pickle": runs any code that the checkpoint names.

    Raises:
        CorruptCheckpointError: The bytes are none that an encoder writes.
        UnsafeObjectError: It needs code, or a class that is not imported, or pickle, which is not allowed.
        UnsupportedFormatError: It has a tag, a type or an encoding of a newer version.
    """
    if encoded.encoding in ("json", "json+raw"):
        return _decode_json(key, encoded)
    if encoded.encoding == "torch":
        try:
            return load_restricted(_stream_of(encoded))
        except UnsafeStreamError as error:
            raise UnsafeObjectError(
                "A stored object needs code to load, although it was stored as one that does not: this checkpoint was "
                "tampered with, or written by a newer torch.",
                key=key,
                types=", ".join(error.type_names),
                cause=error,
            ) from error
        except DamagedStreamError as error:
            raise CorruptCheckpointError("A stored object is damaged.", key=key, cause=error) from error
    if encoded.encoding == "pickle":
        return _load_pickle(key, _stream_of(encoded), allow_pickle=allow_pickle)
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
            return EncodedObject("json+raw", head_of(to_text(tree, by_place)), views), []
    except RecursionError:
        # Called from deep inside the user's own recursion.
        return None, [Refusal(type_name(value), "", "nested too deep")]
    return None, encoder.refusals


def _decode_json(key: str, encoded: EncodedObject) -> object:
    segments = encoded.segments
    text, raw = segments[0 : len(segments)], memoryview(b"")
    if encoded.encoding == "json+raw":
        try:
            text, raw = split(text)
        except ValueError as error:
            raise CorruptCheckpointError("A stored object is damaged.", key=key, cause=error) from error
    decoder = Decoder(key, _TAG_BY_NAME, raw)
    try:
        value: object = decoder.value(from_text(key, text))
    except RecursionError as error:
        raise CorruptCheckpointError("A stored object nests too deep.", key=key) from error
    decoder.finish()
    return value


def _stream_of(encoded: EncodedObject) -> bytes:
    return b"".join(encoded.buffers) if encoded.buffers else encoded.data


def _load_own(key: str, stream: bytes) -> object:
    # No new trust: this process pickled these bytes a moment ago, from objects that are alive in it.
    try:
        return load_trusted(stream)
    except MemoryError:
        raise
    except Exception as error:
        raise UnsafeObjectError(
            "An object cannot be stored: this process itself cannot load what it just pickled.", key=key, cause=error
        ) from error


def _load_pickle(key: str, stream: bytes, *, allow_pickle: bool) -> object:
    if not allow_pickle:
        raise UnsafeObjectError(
            "A stored object is a pickle, and loading one runs code that it names. If you trust whoever wrote this "
            "checkpoint, pass allow_pickle=True.",
            key=key,
        )
    try:
        return load_trusted(stream)
    except MemoryError:
        raise
    except (ImportError, AttributeError) as error:
        raise UnsafeObjectError(
            "A stored pickle needs code that is not here: load with the code that saved it.", key=key, cause=error
        ) from error
    except Exception as error:
        raise CorruptCheckpointError("A stored pickle does not load.", key=key, cause=error) from error


def _refused(key: str, what: str, refusals: Sequence[Refusal], cause: Exception) -> UnsafeObjectError:
    named = refusals[:_REFUSALS_NAMED_MAX]
    return UnsafeObjectError(
        what,
        key=key,
        types=", ".join(dict.fromkeys(refusal.type_name for refusal in named)),
        where=", ".join(refusal.where or "the object itself" for refusal in named),
        why="; ".join(dict.fromkeys(refusal.why for refusal in named)),
        refused=len(refusals) if len(refusals) > len(named) else None,
        cause=cause,
    )
