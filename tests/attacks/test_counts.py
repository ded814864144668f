"""Counts that do not fit each other: more pieces than there are, chunks of no tensor, negative counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcp_remote.errors import CorruptCheckpointError
from tests.attacks.attacker import assert_refused, bucket, column, numbers, with_number

pytestmark = pytest.mark.torture

COUNTS = ["tensors.dimensions", "tensors.chunks", "chunks.pieces"]


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize(
    "change",
    [lambda n: n + 1, lambda n: n - 1, lambda n: 0, lambda n: 2**30, lambda n: 2**53, lambda n: 2**61],
    ids=["one more", "one less", "none", "2**30", "2**53", "2**61"],
)
def test_a_count_of_another_size(path: str, index: int, change: Callable[[int], int]) -> None:
    """A wrong number in any column of counts is refused."""
    attacked = bucket()
    attacked.commit(with_number(attacked.document(), path, index, change))
    assert_refused(attacked, CorruptCheckpointError)


@pytest.mark.parametrize("path", [*COUNTS, "shards.sizes", "pieces.shard", "pieces.digests", "objects.positions"])
def test_a_column_cut_or_prolonged(path: str) -> None:
    """A column shortened or lengthened by an entry, emptied, or of three million zeros is refused."""
    part, name = path.split(".")
    for change in ("cut", "nothing", "more", "many"):
        attacked = bucket()
        document = attacked.document()
        text: str = document[part][name]
        if name == "digests":
            changed = {"cut": text[:-24], "nothing": "", "more": text + "A" * 64, "many": "A" * 4_000_000}
        else:
            values = numbers(text)
            changed = {"cut": column(values[:-1]), "nothing": column([]), "more": column([*values, values[-1]])}
            changed["many"] = "1:" + "A" * 4_000_000
        document[part][name] = changed[change]
        attacked.commit(document)
        assert_refused(attacked, CorruptCheckpointError)


@pytest.mark.parametrize("pieces", [0, -1, -4, 2**63 - 1, 2**70])
def test_an_object_that_makes_up_for_pieces_of_chunks(pieces: int) -> None:
    """Counts of pieces with the right sum are refused if one of the two is negative."""
    attacked = bucket()
    document = attacked.document()
    stored: list[dict[str, Any]] = document["objects"]["stored"]
    difference = stored[0]["pieces"] - pieces
    stored[0]["pieces"] = pieces
    attacked.commit(with_number(document, "chunks.pieces", -1, lambda n: n + difference))
    assert_refused(attacked, CorruptCheckpointError)


def test_lists_that_are_no_longer_as_long_as_their_columns() -> None:
    """A list that is not as long as its columns is refused: a name, key, kind or object left out or added."""
    for part, name in (("tensors", "names"), ("tensors", "kinds"), ("shards", "keys"), ("objects", "stored")):
        for change in ("fewer", "more"):
            attacked = bucket()
            document = attacked.document()
            entries = document[part][name]
            other = {
                "names": "another",
                "keys": "shards/00/a.safetensors",
                "stored": {"name": "another", "encoding": "json", "pieces": 1},
            }
            if name == "kinds" and change == "more":
                continue  # an unused kind does no harm
            document[part][name] = entries[:-1] if change == "fewer" else [*entries, other[name]]
            attacked.commit(document)
            assert_refused(attacked, CorruptCheckpointError)
