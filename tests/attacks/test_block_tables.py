"""Block tables that were forged, moved, exchanged or shared: a partial read and a full read must see the same."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_remote.common.digests import digest, table_entries
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.columns import decode_bytes, encode_bytes
from tests.attacks.attacker import LOADS, SHAPE, Bucket, assert_refused, bucket, numbers, outcomes, with_number

pytestmark = pytest.mark.torture

LENGTH = SHAPE[0] * SHAPE[1] * 4


def table_of(attacked: Bucket) -> tuple[str, int, int]:
    """Return the key of the model's shard, and the start and end of its block table."""
    shards = attacked.document()["shards"]
    stop = numbers(shards["data_starts"])[0]
    return shards["keys"][0], stop - numbers(shards["table_lengths"])[0], stop


def with_table(attacked: Bucket, table: bytes) -> dict[str, Any]:
    """Write another table of the same length; return the document with its valid digest."""
    key, start, stop = table_of(attacked)
    assert len(table) == stop - start
    data = attacked.objects[key]
    attacked.put(key, data[:start] + table + data[stop:])
    document = attacked.document()
    digests = decode_bytes(document["shards"]["table_digests"], name="table_digests")
    document["shards"]["table_digests"] = encode_bytes(digest(table) + digests[16:])
    attacked.commit(document)
    return document


def test_a_forged_table_for_forged_data() -> None:
    """A block of rows, its entry and the table's digest are exchanged: the digest of the piece shows it."""
    attacked = bucket()
    key, start, stop = table_of(attacked)
    data = bytearray(attacked.objects[key])
    size = 65536
    block = 4  # of rows 285 to 356
    where = slice(stop + block * size, stop + (block + 1) * size)
    data[where] = bytes(len(data[where]))
    attacked.put(key, bytes(data))
    table = bytearray(data[start:stop])
    table[16 * block : 16 * block + 16] = digest(bytes(len(data[where])))
    with_table(attacked, bytes(table))
    for error in outcomes(attacked, LOADS).values():
        assert isinstance(error, CorruptCheckpointError)


@pytest.mark.parametrize("name", ["zeros", "reversed", "shifted"])
def test_a_table_of_other_digests(name: str) -> None:
    """A table of wrong entries with a valid digest fails partial reads; whole pieces are read without the table."""
    attacked = bucket()
    key, start, stop = table_of(attacked)
    table = attacked.objects[key][start:stop]
    entries = [table[at : at + 16] for at in range(0, len(table), 16)]
    forged = {"zeros": [bytes(16)] * len(entries), "reversed": entries[::-1], "shifted": [*entries[1:], entries[0]]}
    with_table(attacked, b"".join(forged[name]))
    found = outcomes(attacked, LOADS)
    assert isinstance(found["rows"], CorruptCheckpointError)
    assert found["load"] is found["template"] is None


def test_a_piece_that_points_to_other_entries() -> None:
    """A piece whose entries would end beyond its table is refused."""
    assert table_entries(LENGTH) == 6
    attacked = bucket()
    document = attacked.document()
    attacked.commit(with_number(document, "pieces.table", 0, lambda _: 1))
    assert_refused(attacked, CorruptCheckpointError)


def test_a_table_that_begins_elsewhere() -> None:
    """A table that begins in the header fails partial reads, unless the piece's entries are moved along with it."""
    attacked = bucket()
    document = attacked.document()
    key, start, stop = table_of(attacked)
    longer = attacked.objects[key][start - 16 : stop]
    digests = decode_bytes(document["shards"]["table_digests"], name="table_digests")
    document["shards"]["table_digests"] = encode_bytes(digest(longer) + digests[16:])
    attacked.commit(with_number(document, "shards.table_lengths", 0, lambda n: n + 16))
    found = outcomes(attacked, LOADS)
    assert isinstance(found["rows"], CorruptCheckpointError)
    # The piece's entries now begin at the second place: with that stated, the checkpoint is as before.
    attacked.commit(with_number(document, "pieces.table", 0, lambda _: 1))
    assert set(outcomes(attacked, LOADS).values()) == {None}


def test_digests_of_other_pieces() -> None:
    """Digests exchanged between pieces in the manifest fail every full load, in any order of reads."""
    pieces = len(numbers(bucket().document()["pieces"]["start"]))
    for one in range(pieces):
        attacked = bucket()
        document = attacked.document()
        digests = decode_bytes(document["pieces"]["digests"], name="digests")
        parts = [digests[at : at + 16] for at in range(0, len(digests), 16)]
        parts[one], parts[(one + 1) % pieces] = parts[(one + 1) % pieces], parts[one]
        document["pieces"]["digests"] = encode_bytes(b"".join(parts))
        attacked.commit(document)
        found = outcomes(attacked, LOADS)
        assert isinstance(found["load"], CorruptCheckpointError)
        assert isinstance(found["template"], CorruptCheckpointError)
