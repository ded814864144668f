"""Pieces and block tables in invalid places: outside of the shard, in its header, in its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcp_remote.errors import CorruptCheckpointError
from tests.attacks.attacker import assert_refused, bucket, numbers, with_number

pytestmark = pytest.mark.torture


def change_of(path: str, change: Callable[[int], int]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: with_number(document, path, 0, change)


RANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "start in the header": change_of("pieces.start", lambda n: 8),
    "start at 0": change_of("pieces.start", lambda n: 0),
    "start in the table": change_of("pieces.start", lambda n: n - 1),
    "start behind the end": change_of("pieces.start", lambda n: 2**52),
    "start below 0": change_of("pieces.start", lambda n: -1),
    "start that wraps around": change_of("pieces.start", lambda n: 2**63 - 1),
    "longer than the shard": change_of("pieces.length", lambda n: 2**52),
    "longer by an element": change_of("pieces.length", lambda n: n + 4),
    "empty": change_of("pieces.length", lambda n: 0),
    "half an element": change_of("pieces.length", lambda n: n - 2),
    "no such shard": change_of("pieces.shard", lambda n: 100),
    "shard below 0": change_of("pieces.shard", lambda n: -1),
    "table behind the table": change_of("pieces.table", lambda n: 2**40),
    "data that begins in the header": change_of("shards.data_starts", lambda n: 9),
    "data that begins behind the end": change_of("shards.data_starts", lambda n: 2**40),
    "table before the shard": change_of("shards.table_lengths", lambda n: 2**40),
    "half a digest": change_of("shards.table_lengths", lambda n: n + 1),
    "shard that ends earlier": change_of("shards.sizes", lambda n: n - 1),
    "shard larger than any store": change_of("shards.sizes", lambda n: 2**53),
    "no shard": change_of("shards.sizes", lambda n: 0),
}


@pytest.mark.parametrize("name", RANGES)
def test_a_range_that_is_none(name: str) -> None:
    """Each invalid range is refused."""
    attacked = bucket()
    attacked.commit(RANGES[name](attacked.document()))
    assert_refused(attacked, CorruptCheckpointError)


def test_a_table_of_a_piece_that_has_none() -> None:
    """An entry in the block table for a piece of one block, which has none, is refused."""
    attacked = bucket()
    document = attacked.document()
    single = numbers(document["pieces"]["length"]).index(5 * 4)
    attacked.commit(with_number(document, "pieces.table", single, lambda n: 1))
    assert_refused(attacked, CorruptCheckpointError)


def test_a_table_that_takes_all_of_the_shard() -> None:
    """A block table of 400,000 bytes for 400,000 bytes of data is refused before it is read."""
    attacked = bucket()
    document = attacked.document()
    start = numbers(document["shards"]["data_starts"])[0]
    document = with_number(document, "shards.table_lengths", 0, lambda n: n + 300_000 // 16 * 16)
    document = with_number(document, "shards.data_starts", 0, lambda n: start + 300_000 // 16 * 16)
    document = with_number(document, "shards.sizes", 0, lambda n: n + 300_000 // 16 * 16)
    document["pieces"]["start"] = with_number(document, "pieces.start", 0, lambda n: n + 300_000 // 16 * 16)["pieces"][
        "start"
    ]
    attacked.commit(document)
    assert_refused(attacked, CorruptCheckpointError)
