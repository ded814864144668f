"""JSON Schemas of the documents that commands print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

_FOLDER = Path(__file__).parent.parent / "cli" / "schemas"


def require_valid(command: str, document: Any) -> None:
    """Check a document against the schema of its command."""
    schema = json.loads((_FOLDER / f"{command}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
