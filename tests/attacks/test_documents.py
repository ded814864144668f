"""Attacks on the manifest: document x place x bad value, each sealed as the package does. Every victim refuses each.

A place is a path such as `shards.keys.0`. A bad value replaces it: as JSON text, so that it need not be valid JSON, or
as one number of a column.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

from dcp_remote import load
from dcp_remote.common.geometry import Box
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, UnsupportedFormatError
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.manifest import TensorKind
from dcp_remote.format.manifest_json import decode_head, encode
from dcp_remote.format.manifest_validation import PATH_PARTS_MAX
from tests.attacks.attacker import Bucket, assert_harmless, assert_refused, bucket, column, numbers, with_number
from tests.support.figures import count
from tests.support.manifests import Layout, build, decode

Document: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[Document], Document]

_LEVELS = 200_000


@dataclass(frozen=True, slots=True)
class Attack:
    """Change of a valid document, and of its text; the victims raise one of these errors."""

    change: Change = lambda document: document
    before: str = ""
    after: str = ""
    errors: tuple[type[DcpRemoteError], ...] = (CorruptCheckpointError,)

    def text(self) -> bytes:
        """Return the changed document."""
        text = json.dumps(self.change(json.loads(_document())), separators=(",", ":"))
        assert self.before in text
        return (
            text.replace(self.before, self.after).encode("utf-8", "surrogateescape") if self.before else text.encode()
        )


@functools.cache
def _document() -> str:
    return json.dumps(bucket().document())


def put(path: str, value: object) -> Change:
    """Return a change that replaces a place, or adds a field."""

    def change(document: Document) -> Document:
        *above, last = path.split(".")
        place: Any = document
        for part in above:
            place = place[int(part) if isinstance(place, list) else part]
        place[int(last) if isinstance(place, list) else last] = value
        return document

    return change


def get(document: Document, path: str) -> Any:
    for part in path.split("."):
        document = document[part]
    return document


def change_number(path: str, index: int, change: Callable[[int], int]) -> Change:
    return lambda document: with_number(document, path, index, change)


def change_column(path: str, change: Callable[[list[int]], Sequence[int]]) -> Change:
    return lambda document: put(path, column(change(numbers(get(document, path)))))(document)


def together(*changes: Change) -> Change:
    """Return all of the changes, one after another."""

    def changed(document: Document) -> Document:
        for change in changes:
            document = change(document)
        return document

    return changed


def to(value: int) -> Callable[[int], int]:
    return lambda _: value


def plus(difference: int) -> Callable[[int], int]:
    return lambda number: number + difference


def append(path: str, entry: object) -> Change:
    """Return a change that adds an entry to a list."""
    return lambda document: put(path, [*get(document, path), entry])(document)


def drop_last(path: str) -> Change:
    """Return a change that leaves out the last entry of a list."""
    return lambda document: put(path, get(document, path)[:-1])(document)


def merge(fields: Document) -> Change:
    """Return a change that replaces whole fields."""
    return lambda document: document | fields


def to_document(other: Document) -> Change:
    return lambda _: other


def as_text(path: str, text: str) -> Attack:
    """Return an attack that writes this text at a place."""
    return Attack(put(path, "HERE"), '"HERE"', text)


# ---- numbers

COLUMNS = [
    *("shards.sizes", "shards.data_starts", "shards.table_lengths"),
    *("tensors.kind", "tensors.dimensions", "tensors.shape", "tensors.chunks"),
    *("chunks.offsets", "chunks.sizes", "chunks.pieces"),
    *("pieces.shard", "pieces.start", "pieces.length", "pieces.table", "objects.positions"),
]
COUNTS = ["tensors.dimensions", "tensors.chunks", "chunks.pieces"]
INTEGERS = ["world_size", "objects.stored.0.pieces"]

# No integers that the fields may have, though some parsers take them for one.
NO_INTEGERS = [
    "0",
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "true", "false", "null", "1.0", "1e0", "1.5", "0x1", "1_0"),
    *("01", "+1", ".5", "5.", "-", "1-", "-0"),
    *("\u0661", '"1"', '"NaN"', "[1]", "{}", "1 1", "\x001", "--1", "1e", "Nan", "inf", ""),
    *(str(2**53 + 1), str(2**63), str(2**64), "-1", str(-(2**63)), "9" * 4000, "-" + "9" * 4000),
]
OUT_OF_BOUNDS = [2**53 + 1, 2**62, 2**63 - 1, -1, -(2**63)]

NO_COLUMNS = [
    *("", ":", "1", "1:", "1:A", "1:A===", "0:", "3:AAAA", "16:", "1 :AA==", "1:AA==\n", "1:A A=", "\uff11:AA=="),
    *("-1:AA==", "1:AA==AA==", "1:_-==", "2:AA==", "8:AAAA", "1:AA", "NaN", "1:\x00", "01:AA==", "1:AAA=:"),
    *("\u0661:AA==", "1:" + "A" * 400_000),
]


def attacks_by_numbers() -> Iterator[tuple[str, Attack]]:
    """Yield bad integers for each field, and bad numbers and spellings for each column."""
    for path, text in itertools.product(INTEGERS, NO_INTEGERS):
        yield f"{path} {text}", as_text(path, text)
    for token in (2**53 + 1, 2**64, -1):
        yield f"run.token {token}", Attack(put("run", {"step": 1, "token": token, "revision": 1}))
        yield f"flatten {token}", Attack(put("flatten.step", ["steps", token]))
    # Takes quadratic time to parse, and so is refused by its length.
    for path in ("world_size", "user.a"):
        yield f"{path} of a million digits", as_text(path, "9" * 1_000_000)
    for path in COLUMNS:
        for index, value in itertools.product((0, -1), OUT_OF_BOUNDS):
            yield f"{path}[{index}] {value}", Attack(change_number(path, index, to(value)))
        for text in NO_COLUMNS:
            yield f"{path} {text}", Attack(put(path, text))
        yield f"{path} cut", Attack(change_column(path, lambda values: values[:-1]))
        yield f"{path} prolonged", Attack(change_column(path, lambda values: [*values, values[-1]]))
    for path, text in itertools.product(("pieces.digests", "shards.table_digests"), ("", "A" * 400_000, "A" * 64, "A")):
        yield f"{path} {text}", Attack(put(path, text))
    for path, index in itertools.product(COUNTS, (0, -1)):
        for difference in (1, -1, 2**30, 2**61):
            yield f"{path}[{index}] {difference:+}", Attack(change_number(path, index, plus(difference)))
    # The sum is right, and one of the two is negative.
    for pieces in (0, -1, -4, 2**63 - 1, 2**70):
        change = change_number("chunks.pieces", -1, plus(1 - pieces))
        yield f"pieces of an object {pieces}", Attack(together(put("objects.stored.0.pieces", pieces), change))
    # The product wraps around, to zero or to the true size, or is hidden behind a zero.
    for shape in ([2**53] * 64, [2**32, 2**32], [2**31, 2**31, 4], [2**53, 0], [0, 2**40, 2**40]):
        yield f"shape {shape}", Attack(with_shape(shape))


def with_shape(shape: list[int]) -> Change:
    """Return a change of the shape of the first tensor, which has two dimensions and one chunk."""
    return together(
        change_number("tensors.dimensions", 0, lambda _: len(shape)),
        *(change_column(path, lambda values: [*shape, *values[2:]]) for path in ("tensors.shape", "chunks.sizes")),
        change_column("chunks.offsets", lambda values: [0] * len(shape) + values[2:]),
    )


# ---- ranges of bytes

RANGES: list[tuple[str, Callable[[int], int]]] = [
    ("pieces.start", to(8)),
    ("pieces.start", to(0)),
    ("pieces.start", plus(-1)),
    ("pieces.start", to(2**52)),
    ("pieces.length", to(2**52)),
    ("pieces.length", plus(4)),
    ("pieces.length", plus(-2)),
    ("pieces.length", plus(-1)),
    ("pieces.length", to(0)),
    ("pieces.shard", to(100)),
    ("pieces.table", to(1)),
    ("pieces.table", to(2**40)),
    ("shards.data_starts", to(9)),
    ("shards.data_starts", to(2**40)),
    ("shards.table_lengths", to(2**40)),
    ("shards.table_lengths", plus(1)),
    ("shards.table_lengths", to(0)),
    ("tensors.kind", to(2)),
    ("tensors.shape", plus(1)),
    ("tensors.shape", plus(-1)),
    ("shards.sizes", plus(-1)),
    ("shards.sizes", to(2**53)),
    ("shards.sizes", to(0)),
]

# As many bytes of block table as of data.
TABLE_BYTES = 300_000 // 16 * 16
LARGE_TABLE = ["shards.table_lengths", "shards.data_starts", "shards.sizes", "pieces.start"]


def attacks_by_ranges() -> Iterator[tuple[str, Attack]]:
    """Yield pieces and block tables outside of the shard, in its header, in its table, and in each other's place."""
    for number, (path, change) in enumerate(RANGES):
        yield f"range {number} of {path}", Attack(change_number(path, 0, change))
    # The second piece has one block, and so no entry in a table.
    yield "a table of one block", Attack(change_number("pieces.table", 1, to(1)))
    changes = [change_number(path, 0, plus(TABLE_BYTES)) for path in LARGE_TABLE]
    yield "a table that takes all of the shard", Attack(together(*changes))
    for (one, other), shift in itertools.product(itertools.permutations(range(5), 2), (0, -1)):
        yield f"pieces {one} and {other} in one place{shift}", Attack(overlap(one, other, shift))
    for name, boxes in LAYOUTS.items():
        yield f"chunks: {name}", Attack(to_document(document_of(boxes)))


def overlap(one: int, other: int, shift: int) -> Change:
    """Return a change that moves one piece to another, or to the byte before."""

    def change(document: Document) -> Document:
        for name, moved in (("shard", 0), ("start", shift)):
            values = numbers(document["pieces"][name])
            values[one] = values[other] + moved
            document["pieces"][name] = column(values)
        return document

    return change


ROWS, WIDTH = 400, 23


def document_of(boxes: Sequence[Box], shape: tuple[int, int] = (ROWS, WIDTH)) -> Document:
    """Return the unvalidated document of one tensor of bytes in these chunks, each with one piece."""
    whole = Layout("w", TensorKind("uint8"), shape, (Box((0, 0), shape),), ((shape[0] * shape[1],),))
    document: Document = json.loads(unseal(encode(build([whole]))))
    lengths = [box.elements for box in boxes if box.elements]
    start = 500_000
    document["shards"] |= {
        "table_lengths": column([16 * 1024]),
        "data_starts": column([start]),
        "sizes": column([2**44]),
    }
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
    return document


def slabs(*rows: tuple[int, int]) -> list[Box]:
    """Return boxes of whole rows, each given by first row and number of rows."""
    return [Box((first, 0), (number, WIDTH)) for first, number in rows]


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

# ---- names, keys and lists

KEYS = [
    *("", ".", "/", "manifest.json", "/etc/passwd", "file:///etc/passwd", "http://169.254.169.254/latest/meta-data"),
    *("../shards/00/a.safetensors", "shards/../shards/00/a.safetensors", "shards/00/../00/a.safetensors"),
    *("shards/00/..safetensors", "shards/00/a..safetensors", "shards/00/.safetensors", "shards//00/a.safetensors"),
    *("/shards/00/a.safetensors", "./shards/00/a.safetensors", "shards/00/a.safetensors/"),
    *("shards/00/a/b.safetensors", "shards/0/a.safetensors", "shards/0A/a.safetensors"),
    *("shards/00/a.safetensors\n", "shards/00/a.safetensors\x00.safetensors", "shards/00/a\\..\\b.safetensors"),
    *("shards/00/%2e%2e%2fb.safetensors", "shards/00/a?versionId=1.safetensors", "shards/00/a#b.safetensors"),
    *("shards/0g/a.safetensors", "shards/00/\u0430.safetensors", "shards/\u0660\u0660/a.safetensors"),
    *("shards/00/a.safetensors\u202e", "Shards/00/a.safetensors", "shards/00/a.SAFETENSORS"),
    *(f"shards/00/{'a' * length}.safetensors" for length in (201, 1_000_000)),
    "s3://elsewhere/shards/00/a.safetensors",
]

# Paths of entries in the nested state dict that cannot be there together.
PATHS: list[dict[str, list[str | int]]] = [
    {"step": ["notes"], "notes": ["notes"]},
    {"step": ["a"], "notes": ["a", "b"]},
    {"step": ["a", "b"], "notes": ["a"]},
    {"step": ["a", 0], "notes": ["a", "0"]},
    {"step": [0], "notes": [1]},
    {"step": []},
    {"step": ["sparse"]},
    {"step": ["a"] * (PATH_PARTS_MAX + 1)},
    {"step": ["a"] * _LEVELS},
]

# Lists that are not as long as their columns; an unused kind does no harm.
MORE: dict[str, object] = {
    "tensors.names": "another",
    "shards.keys": "shards/00/a.safetensors",
    "objects.stored": {"name": "another", "encoding": "json", "pieces": 1},
}

NO_UNICODE = ["\\ud800", "\\udfff", "a\\udc00b", "\\ud800\\ud800"]
NO_UTF_8 = [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x00", b"\n", b"\xe2\x82"]


def attacks_by_names() -> Iterator[tuple[str, Attack]]:
    """Yield keys that leave the prefix, names that are given twice or are no text, and lists of another length."""
    for key in KEYS:
        yield f"key {key}", Attack(put("shards.keys.0", key))
    yield "one key twice", Attack(lambda document: put("shards.keys.0", get(document, "shards.keys")[1])(document))
    for before, after in (
        ('"sparse"],"kinds"', '"model.bias"],"kinds"'),
        ('"step":3', '"model.bias":3'),
        ('"name":"notes"', '"name":"step"'),
        ('"name":"notes"', '"name":"model.weight"'),
    ):
        yield f"one entry twice: {after}", Attack(before=before, after=after)
    for paths in PATHS:
        yield f"paths {paths}", Attack(together(*(put(f"flatten.{name}", path) for name, path in paths.items())))
    for path in (*MORE, "tensors.kinds"):
        yield f"{path} fewer", Attack(drop_last(path))
    for path, entry in MORE.items():
        yield f"{path} more", Attack(append(path, entry))
    for before, escape in itertools.product(('"model.weight"', '"notes"', '"step"', '"user":{}'), NO_UNICODE):
        after = f'"user":{{"{escape}":1}}' if before == '"user":{}' else f'"{escape}"'
        yield f"{before} {escape}", Attack(before=before, after=after)
    for data in NO_UTF_8:
        yield f"bytes {data!r}", Attack(before='"model.weight"', after=f'"{data.decode("utf-8", "surrogateescape")}"')
    for path, opening in itertools.product(("user", "objects", "flatten", "run", "shards", "future"), ("[", '{"a":')):
        deep = opening * _LEVELS + "1" + {"[": "]", '{"a":': "}"}[opening] * _LEVELS
        yield f"{path} {opening} deep", as_text(path, deep)


# ---- what another version could write

NEWER: list[Document] = [
    {"version": "2"},
    {"version": ""},
    {"version": "9" * 1_000_000},
    {"version": "\x1b[2J\x1b]0;owned\x07"},
    {"version": "2", "shards": 7, "tensors": None, "user": []},
    {"requires": ["dedup"]},
    {"requires": [f"feature {n}" for n in range(100_000)]},
    {"requires": [""]},
    {"digest": "md5"},
]
NEWER_PLACES: dict[str, list[str]] = {
    "tensors.kinds.0.dtype": ["float7", "", "load", "nn", "float32\x00", "Float32", "x" * 1_000_000],
    "tensors.kinds.0.encoding": ["float7", "", "load", "json", "json+raw", "x" * 1_000_000],
    "objects.stored.0.encoding": ["yaml", "raw", "", "Pickle", "json\x00"],
}
NO_MANIFEST: list[Document] = [{"format": "zarr"}, {"kind": "grave"}, {"version": 1}, {"requires": None}]
HEADS = ['{"":0}', '{"version":"9"}', '{"format":"dcp_remote manifest","version":"2"}']


def attacks_by_versions() -> Iterator[tuple[str, Attack]]:
    """Yield manifests of future versions, which are refused by what they require, and what is no manifest."""
    newer = (UnsupportedFormatError,)
    for fields in NEWER:
        yield f"newer {fields}", Attack(merge(fields), errors=newer)
    for path, values in NEWER_PLACES.items():
        for value in values:
            yield f"{path} {value}", Attack(put(path, value), errors=newer)
    for fields in NO_MANIFEST:
        yield f"no manifest {fields}", Attack(merge(fields))
    for text in HEADS:
        yield f"head {text}", Attack(to_document(json.loads(text)), errors=(CorruptCheckpointError, *newer))


_GENERATORS = (attacks_by_versions, attacks_by_names, attacks_by_ranges, attacks_by_numbers)
ATTACKS = {
    f"{number} {ascii(name)[1:50]}": attack
    for number, (name, attack) in enumerate(itertools.chain.from_iterable(generate() for generate in _GENERATORS))
}


def is_refused(attack: Attack) -> bool:
    try:
        decode(seal(attack.text()))
    except attack.errors:
        return True
    return False


def test_the_decoder_refuses_every_attack() -> None:
    """An error of the right class, whose text is short; for a manifest of another version by its head, too."""
    assert [name for name, attack in ATTACKS.items() if not is_refused(attack)] == []
    for fields in NEWER[:-1]:
        with pytest.raises(UnsupportedFormatError) as caught:
            decode_head(seal(Attack(merge(fields)).text()))
        assert len(str(caught.value)) < 1500


@pytest.mark.torture
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name: str) -> None:
    """Each victim gets an error of the right class, and requests only the manifest."""
    attacked = bucket()
    attacked.put("manifest.json", seal(ATTACKS[name].text()))
    assert_refused(attacked, *ATTACKS[name].errors)


# ---- what is no attack


def commit_text(text: str) -> Bucket:
    """Return a bucket whose manifest is this text, sealed."""
    attacked = bucket()
    attacked.put("manifest.json", seal(text.encode()))
    return attacked


def test_chunks_that_tile_their_tensor() -> None:
    """The document that the layouts above replace is valid."""
    assert decode(seal(json.dumps(document_of(slabs((0, 200), (200, 200)))).encode())).tensors.names == ("w",)


def test_the_last_field_counts() -> None:
    """A false value before the true one has no effect, for each field; of a key given twice the last one counts."""
    fields = bucket().document()
    false: Document = {"save_id": "0" * 32, "version": "9", "kind": "tombstone", "format": "x", "requires": ["x"]}
    false |= {"digest": "md5", "world_size": 7, "flatten": None, "user": {"a": 1}}
    first = json.dumps(fields | false, separators=(",", ":"))[:-1]
    rest = json.dumps(fields, separators=(",", ":"))[1:]
    assert_harmless(commit_text(f"{first},{rest}"))
    assert load(commit_text(f"{{{rest}".replace('"step":3', '"step":3,"step":4')).store)["step"] == 4


def test_head_and_document_agree() -> None:
    """The parse that settles a commit and the parse that loads read the same values from one text."""
    text = json.dumps(bucket().document(), separators=(",", ":"))
    for one, other in (("a" * 32, "b" * 32), ("b" * 32, "a" * 32)):
        data = seal(f'{text[:-1]},"save_id":"{one}","save_id":"{other}"}}'.encode())
        assert decode_head(data).save_id == decode(data).save_id == other


def test_fields_of_the_future_are_ignored() -> None:
    """Additional fields are ignored, however many and large."""
    attacked = bucket()
    attacked.commit(attacked.document() | {f"future {n}": ["x" * 100] * 10 for n in range(1000)})
    assert_harmless(attacked)


def test_the_deepest_path_of_a_state_dict() -> None:
    """A path as deep as any that can be saved loads."""
    attacked = bucket()
    attacked.commit(put("flatten.step", ["a"] * PATH_PARTS_MAX)(attacked.document()))
    found: Any = load(attacked.store)
    for _ in range(PATH_PARTS_MAX):
        found = found["a"]
    assert found == 3


def test_a_deep_value_in_a_manifest() -> None:
    """A value in a manifest that is nested deeper than an object may be is refused by a load."""
    text = json.dumps(bucket().document(), separators=(",", ":"))
    for depth in (400, 404, 405, 900):
        count("attacks")
        with pytest.raises(CorruptCheckpointError):
            load(commit_text(text.replace('"step":3', '"step":' + "[" * depth + "]" * depth)).store)
