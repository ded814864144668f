"""Random changes of valid documents and objects: whole fields, numbers at their bounds, halves of two.

Refusals are typed errors. Accepted data is sound: it is written and read again as the same, and every victim loads it
or gets a typed error.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

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
from dcp_remote.format.document import unseal
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.serialization.objects import EncodedObject, decode_object, encode_object
from dcp_remote.serialization.torch_streams import save
from tests.attacks.attacker import assert_saved, bucket, column, numbers, show_text
from tests.format.test_schema import places
from tests.support.figures import count
from tests.support.manifests import assert_sound, manifests, plain

# As long as the campaign is told to, which may be hours.
pytestmark = [pytest.mark.torture, pytest.mark.timeout(0)]

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


def at(root: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        root = root[part]
    return root


BOUNDS = [-(2**63), -1, 0, 1, 2, 15, 16, 17, 2**16 - 1, 2**16, 2**25, 2**31, 2**32]
BOUNDS += [2**53 - 1, 2**53, 2**53 + 1, 2**62, 2**63]
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


DOCUMENTS = st.builds(lambda: bucket().document()) | manifests().map(
    lambda manifest: json.loads(unseal(manifest_json.encode(manifest)))
)


def assert_refused_or_sound(document: object) -> None:
    attacked = bucket()
    attacked.commit(document)
    try:
        manifest = manifest_json.decode(attacked.objects[MANIFEST_KEY])
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


def test_documents(torture_seconds: float) -> None:
    """Changed documents, sealed again to reach the code behind the digest, are refused or sound."""
    run(assert_refused_or_sound, torture_seconds, mutated(DOCUMENTS))


def check_flipped(flip: tuple[int, int, int]) -> None:
    position, bit, key = flip
    attacked = bucket()
    whole = sorted(attacked.objects)[key % len(attacked.objects)]
    data = bytearray(attacked.objects[whole])
    data[position % len(data)] ^= 1 << bit
    attacked.put(whole, bytes(data))
    with contextlib.suppress(DcpRemoteError):
        found = load(attacked.store)
        assert_saved(found)


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
