"""JSON Schemas of manifest and catalog: they accept what was and is written, and refuse broken documents."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given

import dcp_remote.format
from dcp_remote.format import catalog_json, manifest_json
from dcp_remote.format.catalog import Catalog
from dcp_remote.format.document import unseal
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest import Manifest
from dcp_remote.serialization.objects import _TAG_BY_NAME
from read_without_torch import read_document
from tests.format.write_golden import GOLDEN
from tests.support.catalogs import catalogs
from tests.support.manifests import manifests

FOLDER = Path(dcp_remote.format.__file__).parent / "schema"
DOCUMENTS = sorted(GOLDEN.rglob("*.json"))


def validator(name: str) -> Any:
    """Return the validator of a schema, which is itself valid."""
    schema = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


VALIDATORS = {f"dcp_remote {name}": validator(name) for name in ("manifest", "catalog")}


def validate(document: Any) -> None:
    """Check a document by the schema of its form."""
    VALIDATORS[document["format"]].validate(document)


def golden(path: Path) -> Any:
    """Return the document of a golden file."""
    form = "dcp_remote catalog" if path.name == "catalog.json" else "dcp_remote manifest"
    return read_document(lambda *_: path.read_bytes(), path.name, form)


def written(data: bytes) -> Any:
    """Return a document that this release writes, with its first field."""
    return {"xxh3-128": "0" * 32, **json.loads(unseal(data))}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(GOLDEN).as_posix())
def test_golden_files_have_the_form(path: Path) -> None:
    """Manifests, tombstones and catalogs of all golden folders are valid."""
    validate(golden(path))


@given(manifests())
def test_written_manifests_have_the_form(manifest: Manifest) -> None:
    """Any manifest that is written is valid."""
    validate(written(manifest_json.encode(manifest)))


@given(catalogs())
def test_written_catalogs_have_the_form(catalog: Catalog) -> None:
    """Any catalog that is written is valid."""
    validate(written(catalog_json.encode(replace(catalog, requires_to_write=()), "0" * 32)))


def test_lists_are_those_of_the_code() -> None:
    """The schema has the dtypes and tags that this release reads."""
    definitions = VALIDATORS["dcp_remote manifest"].schema["$defs"]
    assert set(definitions["kind"]["properties"]["dtype"]["enum"]) == set(ITEM_BYTES)
    assert set(definitions["value"]["anyOf"][-1]["propertyNames"]["enum"]) == set(_TAG_BY_NAME)


def setting(*path: str | int, to: Any) -> Callable[[Any], None]:
    """Return the change that sets a field."""

    def change(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = to

    return change


BROKEN_MANIFESTS: dict[str, Callable[[Any], None]] = {
    "another format": setting("format", to="zarr"),
    "another version": setting("version", to="2"),
    "a feature": setting("requires", to=["wings"]),
    "an unknown kind": setting("kind", to="grave"),
    "a short id": setting("save_id", to="f" * 31),
    "an id in upper case": setting("save_id", to="F" * 32),
    "too many replaced": setting("replaces", to=["0" * 32] * 65),
    "no shards": lambda document: document.pop("shards"),
    "no user metadata": lambda document: document.pop("user"),
    "another digest": setting("digest", to="md5"),
    "no ranks": setting("world_size", to=0),
    "a key that leads out": setting("shards", "keys", 0, to="shards/00/../x.safetensors"),
    "a key twice": lambda document: document["shards"]["keys"].append(document["shards"]["keys"][0]),
    "a column of numbers": setting("pieces", "start", to=[1, 2]),
    "a column of another width": setting("pieces", "start", to="3:AAAA"),
    "a column that is no base64": setting("pieces", "start", to="1:A?=="),
    "digests that are no base64": setting("pieces", "digests", to="?"),
    "digests with a newline": setting("pieces", "digests", to="AA\nAA"),
    "an unknown dtype": setting("tensors", "kinds", 0, "dtype", to="float7"),
    "an unknown encoding of tensors": setting("tensors", "kinds", 0, "encoding", to="zip"),
    "an unknown layout": setting("tensors", "kinds", 0, "layout", to="round"),
    "a flag that is no boolean": setting("tensors", "kinds", 0, "pin_memory", to=0),
    "an unknown encoding of objects": lambda document: document["objects"]["stored"].append(
        {"name": "x", "encoding": "xml", "pieces": 1}
    ),
    "a stored object without pieces": lambda document: document["objects"]["stored"].append(
        {"name": "x", "encoding": "json", "pieces": 0}
    ),
    "an unknown tag": setting("objects", "inline", "step", to={"$wing": 1}),
    "two tags": setting("objects", "inline", "step", to={"$int": "0x1", "$str": ""}),
    "a tag inside": setting("objects", "inline", "step", to=[{"a": {"$wing": 1}}]),
    "an empty path": setting("flatten", "step", to=[]),
    "a list at the top": setting("flatten", "step", to=[0]),
    "a negative index": setting("flatten", "step", to=["a", -1]),
    "a step that is negative": setting("run", "step", to=-1),
    "a metric that is a text": setting("run", "metrics", to={"loss": "1"}),
    "user metadata that is a list": setting("user", to=[]),
}

BROKEN_CATALOGS: dict[str, Callable[[Any], None]] = {
    "another version": setting("version", to="1-draft.3"),
    "a feature": setting("requires", to=["wings"]),
    "no nonce": lambda document: document.pop("nonce"),
    "a revision that is a text": setting("revision", to="1"),
    "a number that is too large": setting("floor", to=2**53 + 1),
    "a step that is a fraction": setting("checkpoints", 0, "step", to=0.5),
    "a manifest elsewhere": setting("checkpoints", 0, "manifest", to="manifests/../x.json"),
    "no save_id": lambda document: document["checkpoints"][0].pop("save_id"),
    "a name that is too long": setting("checkpoints", 0, "names", to=["x" * 1001]),
    "a pin that is a number": setting("checkpoints", 0, "pinned", to=1),
    "features that are a text": setting("requires_to_write", to="wings"),
}


def refuse(valid: Any, change: Callable[[Any], None]) -> None:
    """Check that a document is valid, and that it is not after a change."""
    validate(valid)
    broken = copy.deepcopy(valid)
    change(broken)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATORS[valid["format"]].validate(broken)


@pytest.mark.parametrize("change", BROKEN_MANIFESTS.values(), ids=BROKEN_MANIFESTS)
def test_broken_manifests_are_refused(change: Callable[[Any], None]) -> None:
    """One field of a manifest is broken."""
    refuse(golden(min((GOLDEN / "dedup").rglob("step*.json"))), change)


@pytest.mark.parametrize("change", BROKEN_CATALOGS.values(), ids=BROKEN_CATALOGS)
def test_broken_catalogs_are_refused(change: Callable[[Any], None]) -> None:
    """One field of a catalog is broken."""
    refuse(golden(GOLDEN / "labels" / "catalog.json"), change)


def test_unknown_fields_are_allowed() -> None:
    """Fields of later releases are valid at every level."""
    manifest = golden(min((GOLDEN / "dedup").rglob("step*.json")))
    for part in (manifest, *(manifest[name] for name in ("run", "shards", "tensors", "chunks", "pieces", "objects"))):
        part["a field of the future"] = {"x": 1}
    manifest["tensors"]["kinds"][0]["a field of the future"] = 1
    validate(manifest)
    catalog = golden(GOLDEN / "labels" / "catalog.json")
    catalog["a field of the future"] = catalog["checkpoints"][0]["a field of the future"] = 1
    validate(catalog)
