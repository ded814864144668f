"""Random changes of valid data: whole fields, numbers at their bounds, halves of two, opcodes of a pickle.

Refusals are typed errors. Accepted data is sound: it is written and read again as the same, and every victim loads it
or gets a typed error.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dcp_remote import load
from dcp_remote.errors import (
    CorruptCheckpointError,
    DcpRemoteError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.serialization.objects import EncodedObject, decode_object, encode_object
from dcp_remote.serialization.torch_streams import save
from tests.attacks.attacker import Bucket, bucket, column, innocent_stream, numbers, show_text, stream
from tests.support.figures import count
from tests.support.manifests import assert_sound, manifests, plain

# As long as the campaign is told to, which may be hours.
pytestmark = [pytest.mark.torture, pytest.mark.timeout(0)]

Path: TypeAlias = tuple[str | int, ...]

REFUSALS = (CorruptCheckpointError, UnsupportedFormatError)
OBJECT_REFUSALS = (*REFUSALS, UnsafeObjectError)

# Examples on a busy machine.
EXAMPLES_PER_SECOND = 60


def run(check: Callable[[Any], None], seconds: float, attacks: st.SearchStrategy[Any]) -> None:
    """Run as many examples as the time allows; hypothesis prints a failing one, shrunk."""
    examples = max(1, round(seconds * EXAMPLES_PER_SECOND))

    def counted(attack: Any) -> None:
        count("generated attacks")
        check(attack)

    settings(
        max_examples=examples,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )(given(attacks)(counted))()


# ---- documents


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every place in a JSON value except the root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(root: Any, path: Path) -> Any:
    for part in path:
        root = root[part]
    return root


BOUNDS = [
    -(2**63),
    -1,
    0,
    1,
    2,
    15,
    16,
    17,
    65_535,
    65_536,
    2**25,
    2**31,
    2**32,
    2**53 - 1,
    2**53,
    2**53 + 1,
    2**62,
    2**63,
]
OTHERS: list[Any] = [None, True, False, 0.5, "", "1:", "$", [], {}, [[]], {"a": 1}, *BOUNDS]


def is_column(value: object) -> bool:
    return isinstance(value, str) and value[:2] in ("1:", "2:", "4:", "8:")


@st.composite
def mutated(draw: st.DrawFn, documents: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """Draw one to four changes of a document."""
    document = copy.deepcopy(draw(documents))
    for _ in range(draw(st.integers(1, 4))):
        paths = list(places(document))
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        holder, last = at(document, path[:-1]), path[-1]
        value = holder[last]
        how = draw(st.sampled_from(["number", "number", "delete", "twice", "retype", "swap", "splice", "rename"]))
        if how == "number" and is_column(value):
            with contextlib.suppress(CorruptCheckpointError):
                values = numbers(value)
                index = draw(st.integers(0, len(values)))
                near = values[index] if index < len(values) else 0
                values[index : index + draw(st.integers(0, 1))] = [draw(st.sampled_from([*BOUNDS, near - 1, near + 1]))]
                holder[last] = column(values)
        elif how == "delete":
            del holder[last]
        elif how == "twice" and isinstance(holder, list):
            holder.insert(draw(st.integers(0, len(holder))), copy.deepcopy(value))
        elif how == "swap":
            other = draw(st.sampled_from(paths))
            if other[: len(path)] != path and path[: len(other)] != other:
                holder[last], at(document, other[:-1])[other[-1]] = at(document, other), value
        elif how == "splice":
            from_other = draw(documents)
            with contextlib.suppress(LookupError, TypeError):
                holder[last] = copy.deepcopy(at(from_other, path))
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from([*holder, "", "$tuple", "x"]))] = holder.pop(last)
        else:
            holder[last] = copy.deepcopy(draw(st.sampled_from(OTHERS)))
    return document


def sealed(document: object) -> bytes:
    return seal(json.dumps(document, separators=(",", ":")).encode())


def parsed(data: bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(unseal(data))
    return document


DOCUMENTS = st.builds(lambda: bucket().document()) | manifests().map(lambda m: parsed(manifest_json.encode(m)))


def assert_refused_or_sound(attacked: Bucket, data: bytes) -> None:
    attacked.put(MANIFEST_KEY, data)
    try:
        manifest = manifest_json.decode(data)
    except REFUSALS:
        manifest = None
    if manifest is not None:
        assert_sound(manifest)
        written = manifest_json.encode(manifest)
        again = manifest_json.decode(written)
        assert plain(again) == plain(manifest)
        for patterns in ((), ("*",)):
            with contextlib.suppress(DcpRemoteError):
                show_text(attacked, patterns=patterns)
    with contextlib.suppress(DcpRemoteError):
        load(attacked.store)


def check_document(document: dict[str, Any]) -> None:
    if document:
        assert_refused_or_sound(bucket(), sealed(document))


def test_documents(torture_seconds: float) -> None:
    """Changed documents, sealed again to reach the code behind the digest, are refused or sound."""
    run(check_document, torture_seconds, mutated(DOCUMENTS))


def check_flipped(flip: tuple[int, int, int]) -> None:
    position, bit, key = flip
    attacked = bucket()
    whole = sorted(attacked.objects)[key % len(attacked.objects)]
    data = bytearray(attacked.objects[whole])
    data[position % len(data)] ^= 1 << bit
    attacked.put(whole, bytes(data))
    with contextlib.suppress(DcpRemoteError):
        found = load(attacked.store)
        assert found["step"] == 3
        assert torch.equal(found["model"]["bias"], torch.ones(5))
        assert found["notes"] == "0123456789" * 10_000
        assert found["shared"] == [[1, 2], [1, 2]]


def test_flipped_bits(torture_seconds: float) -> None:
    """After a flipped bit in any object a load fails, or returns the saved values."""
    run(check_flipped, torture_seconds, st.tuples(st.integers(0, 2**20), st.integers(0, 7), st.integers(0, 2)))


# ---- objects

TREES: list[dict[str, Any]] = [
    json.loads(encode_object("k", value).data)
    for value in (
        {"a": [1, 2.5, None, "ä"], "b": {3, "x"}, "c": {"d": (1, b"x"), "e": 2**70}},
        {1: np.float32(2), (1, 2): np.arange(6, dtype="<i4").reshape(2, 3)},
        {"t": torch.ones(2, 2), "p": torch.nn.Parameter(torch.zeros(1)), "s": torch.Size([1]), "d": torch.float16},
        {"g": np.random.Generator(np.random.Philox(1)), "r": np.random.RandomState(1), "c": 1j},
    )
]


def check_tree(tree: object) -> None:
    try:
        value = decode_object("k", EncodedObject("json", json.dumps(tree).encode()))
    except OBJECT_REFUSALS:
        return
    written = encode_object("k", value)
    assert written.encoding == "json"
    assert encode_object("k", decode_object("k", written)).data == written.data
    save(value)


def test_objects_as_json(torture_seconds: float) -> None:
    """Accepted JSON objects are written and read again as the same, and can be given to torch's planner."""
    run(check_tree, torture_seconds, mutated(st.sampled_from(TREES)))


def program_of(data: bytes) -> list[bytes]:
    """Return the opcodes of a stream's pickle with their arguments, without protocol and stop."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        program = archive.read("archive/data.pkl")
    starts = [position for _, _, position in pickletools.genops(program) if position is not None]
    return [program[a:b] for a, b in itertools.pairwise(starts[1:])]


def sample_streams() -> list[bytes]:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = [1]  # type: ignore[attr-defined]  # torch.save keeps it
    values: list[object] = [parameter, [torch.eye(2).to_sparse(), {1, 2}, b"ab", 1j], {"a": torch.Size([2]), 1: (2, 3)}]
    return [innocent_stream(), *map(save, values)]


PROGRAMS = [program_of(data) for data in sample_streams()]
OPCODES = sorted({opcode for program in PROGRAMS for opcode in program})
STRAY = [
    b"0",
    b"2",
    b"1",
    b"\x81",
    b"b",
    b"R",
    b"Q",
    b"h\x00",
    b"h\x01",
    b"q\x00",
    b"(",
    b"t",
    b")",
    b"]",
    b"}",
    b"s",
    b"u",
]
STRAY += [
    b"a",
    b"e",
    b"N",
    b"\x8a\x09" + b"\xff" * 8 + b"\x7f",
    b"J\xff\xff\xff\xff",
    b"G\x7f\xf8" + bytes(6),
    b"\x85",
    b"\x87",
]


@st.composite
def programs(draw: st.DrawFn) -> bytes:
    """Draw a program with opcodes left out, doubled, exchanged, inserted, cut off, or taken from two programs."""
    program = list(draw(st.sampled_from(PROGRAMS)))
    for _ in range(draw(st.integers(1, 5))):
        index = draw(st.integers(0, max(0, len(program) - 1)))
        how = draw(st.sampled_from(["delete", "double", "exchange", "insert", "cut", "splice"]))
        if how == "delete":
            del program[index : index + 1]
        elif how == "double":
            program[index:index] = program[index : index + draw(st.integers(1, 12))]
        elif how == "exchange":
            program[index : index + 1] = [draw(st.sampled_from(OPCODES + STRAY))]
        elif how == "insert":
            program.insert(index, draw(st.sampled_from(OPCODES + STRAY)))
        elif how == "cut":
            del program[index : index + draw(st.integers(1, 12))]
        else:
            other = draw(st.sampled_from(PROGRAMS))
            first = draw(st.integers(0, len(other) - 1))
            program[index:index] = other[first : first + draw(st.integers(1, 40))]
    return b"".join(program)


def check_program(program: bytes) -> None:
    try:
        value = decode_object("k", EncodedObject("torch", stream(program, d0=bytes(32), d1=bytes(32))))
    except OBJECT_REFUSALS:
        return
    # As a reader does before torch's planner gets it.
    save(value)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_objects_as_streams(torture_seconds: float) -> None:
    """Reordered opcodes of `torch.save` are refused, or can be given to torch's planner."""
    run(check_program, torture_seconds, programs())


def check_bytes(data_and_encoding: tuple[bytes, str]) -> None:
    data, encoding = data_and_encoding
    with contextlib.suppress(*OBJECT_REFUSALS):
        decode_object("k", EncodedObject(encoding, data))  # type: ignore[arg-type]  # mypy joins the two


def test_streams_of_which_bytes_are_another(torture_seconds: float) -> None:
    """Zips and texts with bytes replaced, cut out or inserted, read under either encoding, raise only typed errors."""
    samples = [*sample_streams(), *(json.dumps(tree).encode() for tree in TREES)]
    edits = st.lists(st.tuples(st.integers(0, 2**14), st.integers(0, 2), st.binary(max_size=8)), min_size=1, max_size=4)

    def edited(sample: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
        for position, removed, added in changes:
            start = position % len(sample) if sample else 0
            sample = sample[:start] + added + sample[start + removed * len(added) :]
        return sample

    attacks = st.tuples(st.builds(edited, st.sampled_from(samples), edits), st.sampled_from(["json", "torch"]))
    run(check_bytes, torture_seconds, attacks)
