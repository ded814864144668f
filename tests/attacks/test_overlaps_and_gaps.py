"""Chunks and pieces that overlap or leave gaps: two tensors in one range of bytes, elements of no chunk."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from dcp_remote.common.geometry import Box
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.manifest import TensorKind
from dcp_remote.format.manifest_json import encode
from tests.attacks.attacker import assert_refused, bucket, column, numbers
from tests.support.figures import count
from tests.support.manifests import Layout, build, decode

pytestmark = pytest.mark.torture

ROWS, WIDTH = 400, 23


def test_two_pieces_in_one_place() -> None:
    """Two pieces in one place, or overlapping by all but a byte, are refused, for each pair."""
    pieces = range(len(numbers(bucket().document()["pieces"]["start"])))
    for (one, other), shift in itertools.product(itertools.permutations(pieces, 2), (0, -1)):
        attacked = bucket()
        document = attacked.document()
        for name, moved in (("shard", 0), ("start", shift)):
            values = numbers(document["pieces"][name])
            values[one] = values[other] + moved
            document["pieces"][name] = column(values)
        attacked.commit(document)
        assert_refused(attacked, CorruptCheckpointError)


def document_of(boxes: Sequence[Box], shape: tuple[int, int] = (ROWS, WIDTH)) -> dict[str, Any]:
    """Return the unvalidated document of one tensor of bytes in these chunks, each with one piece."""
    whole = Layout("w", TensorKind("uint8"), shape, (Box((0, 0), shape),), ((shape[0] * shape[1],),))
    document: dict[str, Any] = json.loads(unseal(encode(build([whole]))))
    lengths = [box.elements for box in boxes if box.elements]
    start = 500_000
    document["shards"]["table_lengths"] = column([start - 20])
    document["shards"]["data_starts"] = column([start])
    document["shards"]["sizes"] = column([2**44])
    document["tensors"]["chunks"] = column([len(boxes)])
    document["chunks"] = {
        "offsets": column([value for box in boxes for value in box.offsets]),
        "sizes": column([value for box in boxes for value in box.sizes]),
        "pieces": column([1 if box.elements else 0 for box in boxes]),
    }
    document["pieces"] = {
        "shard": column([0] * len(lengths)),
        "start": column([start + before for before in itertools.accumulate([0, *lengths[:-1]])]),
        "length": column(lengths),
        "table": column([0] * len(lengths)),
        "digests": "A" * (len(lengths) * 16 // 3 * 4) + {0: "", 1: "AA==", 2: "AAA="}[len(lengths) * 16 % 3],
    }
    document["shards"]["table_lengths"] = column([16 * 1024])
    return document


def slabs(*rows: tuple[int, int]) -> list[Box]:
    """Return boxes of whole rows, each given by first row and number of rows."""
    return [Box((first, 0), (number, WIDTH)) for first, number in rows]


def test_chunks_that_tile_their_tensor() -> None:
    """The document that the attacks below change is valid."""
    assert decode(seal(json.dumps(document_of(slabs((0, 200), (200, 200)))).encode())).tensors.names == ("w",)


LAYOUTS: dict[str, list[Box]] = {
    "overlap, no gap": slabs((0, 200), (199, 201)),
    "overlap, as many elements": slabs((0, 200), (199, 199), (399, 1)),
    "one twice": slabs((0, 200), (0, 200)),
    "one inside another": slabs((0, 399), (0, 1)),
    "a gap": slabs((0, 200), (201, 199)),
    "one outside": slabs((0, 200), (201, 200)),
    "one of no elements outside": slabs((0, 200), (200, 200), (401, 0)),
    "one far away": slabs((0, 399), (2**53 - 1, 1)),
    "one too large": slabs((0, 2**53)),
    "none": slabs(),
    "a corner in no chunk": [Box((0, 0), (400, 22)), Box((0, 22), (399, 1)), Box((0, 0), (1, 1))],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_chunks_that_do_not(name: str) -> None:
    """Chunks that overlap, leave gaps or lie outside are refused, also with the right number of elements."""
    attacked = bucket()
    attacked.commit(document_of(LAYOUTS[name]))
    assert_refused(attacked, CorruptCheckpointError)


def test_a_layout_that_would_be_compared_for_ever() -> None:
    """Strips of rows beside strips of columns are refused: 15,000 of each are 10^8 pairs to compare."""
    count("attacks")
    strips = 15_000
    lying = [Box((row, 0), (1, strips)) for row in range(strips)]
    standing = [Box((0, strips + column_), (strips, 1)) for column_ in range(strips)]
    data = seal(json.dumps(document_of(lying + standing, (strips, 2 * strips))).encode())
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="too irregular"):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * MiB
    finally:
        tracemalloc.stop()
