"""JSON Schemas of the documents that commands print with `--json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

_FOLDER = Path(__file__).parent.parent / "cli" / "schemas"


def require_schema(command: str, document: Any) -> None:
    """Check a document against the schema of its command, which is a contract with scripts."""
    schemas = {path.name: json.loads(path.read_text()) for path in _FOLDER.glob("*.json")}
    registry: Registry[Any] = Registry().with_resources(
        (name, Resource.from_contents(schema)) for name, schema in schemas.items()
    )
    schema = schemas[f"{command}.json"]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema, registry=registry).validate(document)
