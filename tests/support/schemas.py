"""JSON Schemas of the documents that commands print with `--json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

_FOLDER = Path(__file__).parent.parent / "cli" / "schemas"


def require_schema(command: str, document: Any) -> None:
    """Check a document against the schema of its command, which is a contract with scripts."""
    schema = json.loads((_FOLDER / f"{command}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)
