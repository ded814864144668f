"""Documents of manifest and catalog, read by this package, by the reference reader, and checked by the JSON Schemas.

The schemas accept what was and is written; what breaks a document is refused by all three, or is listed here.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given

import dcp_remote.format
from dcp_remote.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_remote.format import catalog_json, manifest_json
from dcp_remote.format.catalog import Catalog
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest import Manifest
from dcp_remote.serialization.objects import _TAG_BY_NAME
from read_without_torch import Checkpoint, UnreadableError, read_document
from tests.format.test_catalog_json import document as catalog_example
from tests.format.test_manifest_json import example_document as manifest_example
from tests.format.write_golden import GOLDEN
from tests.support.catalogs import catalogs
from tests.support.manifests import assert_sound, manifests

FOLDER = Path(dcp_remote.format.__file__).parent / "schema"
DOCUMENTS = sorted(GOLDEN.rglob("*.json"))
MANIFEST = min((GOLDEN / "dedup").rglob("step*.json"))
CATALOG = GOLDEN / "labels" / "catalog.json"
REFUSED = (CorruptCheckpointError, UnsupportedFormatError)

Change = Callable[[Any], object]


def validator(name: str) -> Any:
    """Return the validator of a schema, which is itself valid."""
    schema = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


VALIDATORS = {name: validator(name) for name in ("manifest", "catalog")}


def has_form(document: Any, form: str) -> bool:
    """Return whether the schema accepts a document, with the digest that is its first field."""
    return bool(VALIDATORS[form].is_valid({"xxh3-128": "0" * 32, **document}))


def form_of(path: Path) -> str:
    return "catalog" if path.name == "catalog.json" else "manifest"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(GOLDEN).as_posix())
def test_golden_files_have_the_form(path: Path) -> None:
    """Manifests, tombstones and catalogs of all golden folders, as the reference reader opens them."""
    form = form_of(path)
    VALIDATORS[form].validate(read_document(lambda *_: path.read_bytes(), path.name, f"dcp_remote {form}"))


@given(manifests())
def test_written_manifests_have_the_form(manifest: Manifest) -> None:
    assert has_form(json.loads(unseal(manifest_json.encode(manifest))), "manifest")


@given(catalogs())
def test_written_catalogs_have_the_form(catalog: Catalog) -> None:
    data = catalog_json.encode(replace(catalog, requires_to_write=()), "0" * 32)
    assert has_form(json.loads(unseal(data)), "catalog")


def test_lists_are_those_of_the_code() -> None:
    """The schema has the dtypes and tags that this release reads."""
    definitions = VALIDATORS["manifest"].schema["$defs"]
    assert set(definitions["kind"]["properties"]["dtype"]["enum"]) == set(ITEM_BYTES)
    assert set(definitions["value"]["anyOf"][-1]["propertyNames"]["enum"]) == set(_TAG_BY_NAME)


def decode(data: bytes, form: str) -> Catalog | Manifest | None:
    return catalog_json.decode(data) if form == "catalog" else manifest_json.decode(data)


# ---- broken documents


def setting(*path: str | int, to: Any) -> Change:
    """Return the change that sets a field."""

    def change(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = to

    return change


def stored(**fields: Any) -> Change:
    """Return the change that adds a stored object."""
    return lambda document: document["objects"]["stored"].append(
        {"name": "x", "encoding": "json", "pieces": 1} | fields
    )


BROKEN_MANIFESTS: dict[str, Change] = {
    "another format": setting("format", to="zarr"),
    "another version": setting("version", to="2"),
    "a feature": setting("requires", to=["wings"]),
    "a feature that is a number": setting("requires", to=[1]),
    "features that are a text": setting("requires", to=""),
    "features that are an object": setting("requires", to={}),
    "no features": lambda document: document.pop("requires"),
    "an unknown kind": setting("kind", to="grave"),
    "a short id": setting("save_id", to="f" * 31),
    "an id in upper case": setting("save_id", to="F" * 32),
    "too many replaced": setting("replaces", to=["0" * 32] * 65),
    "no shards": lambda document: document.pop("shards"),
    "no user metadata": lambda document: document.pop("user"),
    "another digest": setting("digest", to="md5"),
    "no ranks": setting("world_size", to=0),
    "a key of the system": setting("shards", "keys", 0, to="/etc/passwd"),
    "a key that leads out": setting("shards", "keys", 0, to="shards/00/../x.safetensors"),
    "a key twice": lambda document: document["shards"]["keys"].append(document["shards"]["keys"][0]),
    "a column of numbers": setting("pieces", "start", to=[1, 2]),
    "a column of another width": setting("pieces", "start", to="3:AAAA"),
    "a column that is no base64": setting("pieces", "start", to="1:A?=="),
    "a column with a newline": setting("chunks", "pieces", to="1:AQ\n=="),
    "a column with stars": setting("chunks", "pieces", to="1:****AQ=="),
    "a column without padding": setting("chunks", "pieces", to="1:AQ"),
    "digests that are no base64": setting("pieces", "digests", to="?"),
    "digests with a newline": setting("pieces", "digests", to="AA\nAA"),
    "a digest of 15 bytes": setting("pieces", "digests", to="A" * 20),
    "a kind that is not listed": setting("tensors", "kind", to="1:CQ=="),
    "an unknown dtype": setting("tensors", "kinds", 0, "dtype", to="float7"),
    "an unknown encoding of tensors": setting("tensors", "kinds", 0, "encoding", to="zip"),
    "an unknown layout": setting("tensors", "kinds", 0, "layout", to="round"),
    "a flag that is no boolean": setting("tensors", "kinds", 0, "pin_memory", to=0),
    "an unknown encoding of objects": stored(encoding="xml"),
    "a stored object without pieces": stored(pieces=0),
    "an unknown tag": setting("objects", "inline", "step", to={"$wing": 1}),
    "two tags": setting("objects", "inline", "step", to={"$int": "0x1", "$str": ""}),
    "a tag inside": setting("objects", "inline", "step", to=[{"a": {"$wing": 1}}]),
    "no paths": lambda document: document.pop("flatten"),
    "an empty path": setting("flatten", "step", to=[]),
    "a list at the top": setting("flatten", "step", to=[0]),
    "a list that is too long": setting("flatten", "step", to=["step", 2**40]),
    "a negative index": setting("flatten", "step", to=["a", -1]),
    "a step that is negative": setting("run", "step", to=-1),
    "a metric that is a text": setting("run", "metrics", to={"loss": "1"}),
    "user metadata that is a list": setting("user", to=[]),
}

BROKEN_CATALOGS: dict[str, Change] = {
    "another version of the catalog": setting("version", to="1-draft.3"),
    "a feature of the catalog": setting("requires", to=["wings"]),
    "no nonce": lambda document: document.pop("nonce"),
    "a revision that is a text": setting("revision", to="1"),
    "a number that is too large": setting("floor", to=2**53 + 1),
    "a step that is a fraction": setting("checkpoints", 0, "step", to=0.5),
    "a manifest above": setting("checkpoints", 0, "manifest", to="manifests/../x.json"),
    "a manifest of the system": setting("checkpoints", 0, "manifest", to="/etc/passwd"),
    "the catalog as a manifest": setting("checkpoints", 0, "manifest", to="manifests/../catalog.json"),
    "a shard as a manifest": setting("checkpoints", 0, "manifest", to="shards/x.json"),
    "a manifest that is a number": setting("checkpoints", 0, "manifest", to=5),
    "no save_id": lambda document: document["checkpoints"][0].pop("save_id"),
    "a name that is too long": setting("checkpoints", 0, "names", to=["x" * 1001]),
    "a pin that is a number": setting("checkpoints", 0, "pinned", to=1),
    "features to write that are a text": setting("requires_to_write", to="wings"),
}

# What a schema cannot say; what the package finds only when the value is decoded; and what a reader need not check.
ACCEPTED_BY = {
    "schema": {"a column without padding", "a digest of 15 bytes", "a kind that is not listed"},
    "package": {"an unknown layout", "an unknown tag", "two tags", "a tag inside"},
    "reader": {
        *("too many replaced", "no user metadata", "no ranks", "an unknown dtype", "an unknown layout"),
        *("a flag that is no boolean", "two tags", "a step that is negative", "a metric that is a text"),
        *("user metadata that is a list", "no nonce", "a revision that is a text", "a number that is too large"),
        *("a name that is too long", "a pin that is a number", "features to write that are a text"),
    },
}


def accepts(call: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...]) -> bool:
    try:
        call()
    except error:
        return False
    return True


@pytest.mark.parametrize("what", [*BROKEN_MANIFESTS, *BROKEN_CATALOGS])
def test_broken_documents_are_refused(what: str, tmp_path: Path) -> None:
    """One field of a document with a valid digest is broken."""
    source, step = (MANIFEST, 1) if what in BROKEN_MANIFESTS else (CATALOG, 2)
    name, form = source.relative_to(GOLDEN), form_of(source)
    path, folder = tmp_path / name, tmp_path / name.parts[0]
    shutil.copytree(GOLDEN / name.parts[0], folder)
    document = json.loads(unseal(source.read_bytes()))
    assert has_form(document, form)
    (BROKEN_MANIFESTS | BROKEN_CATALOGS)[what](document)
    data = seal(json.dumps(document).encode())
    path.write_bytes(data)
    assert {by for by, names in ACCEPTED_BY.items() if what in names} == {
        *(["schema"] if has_form(document, form) else []),
        *(["package"] if accepts(lambda: decode(data, form), REFUSED) else []),
        *(["reader"] if accepts(lambda: Checkpoint(folder, step).read_state(), UnreadableError) else []),
    }


def test_unknown_fields_are_allowed() -> None:
    """Fields of later releases are valid at every level; that the package reads them, `test_golden.py` shows."""
    for path in (GOLDEN / "future").rglob("*.json"):
        assert b"a field of the future" in path.read_bytes()
        assert has_form(json.loads(unseal(path.read_bytes())), form_of(path))


# ---- each field of a document, by values of every type


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield every place in a JSON value except the root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


WRONG_TYPES: list[object] = [None, True, -1, 0, 2**63, 2**80, 1.5, "", "x", [], [[]], {}, {"x": 1}]
# Information alone, which the package does not check.
UNCHECKED = {"nonce", "layout", "memory_format"}
WHOLE = {"manifest": manifest_example(), "catalog": catalog_example()}
PLACES = {".".join(map(str, (form, *path))): (form, path) for form, whole in WHOLE.items() for path in places(whole)}


@pytest.mark.parametrize("place", PLACES)
def test_a_field_of_another_type(place: str) -> None:
    """A field that is deleted or replaced is refused with an error of ours, or has the form and is sound."""
    form, path = PLACES[place]
    for value in ("deleted", *WRONG_TYPES):
        document = copy.deepcopy(WHOLE[form])
        parent: Any = document
        for part in path[:-1]:
            parent = parent[part]
        parent[path[-1]] = value
        if value == "deleted":
            del parent[path[-1]]
        data = seal(json.dumps(document).encode())
        try:
            found = decode(data, form)
        except REFUSED:
            continue
        assert path[-1] in UNCHECKED or has_form(document, form), value
        if isinstance(found, Manifest):
            assert_sound(found)
