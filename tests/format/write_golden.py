"""Write golden files: a checkpoint or run for each new feature of the format, written once and kept for ever.

    python -m tests.format.write_golden

Each release reads the folders of all earlier ones; `test_golden.py` has the digest of each, and `golden_states.py` the
states that they hold. Folders that exist are never written again, so that `CASES` has only those of features that are
new; the writers of older folders are in the history of this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcp_remote import RemoteWriter
from dcp_remote.format.document import seal, unseal
from tests.support.simulated_ranks import save_as_ranks

GOLDEN = Path(__file__).parent / "golden"


def save(folder: Path, state: dict[str, Any], **options: Any) -> None:
    save_as_ranks([state], lambda: RemoteWriter(folder, **options))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the fields of a document, to what this release does not write."""
    document = json.loads(unseal(path.read_bytes()))
    change(document)
    path.write_bytes(seal(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()))


# By folder: function that writes the folder, such as `lambda folder: save(folder, golden_states.blocks())`.
CASES: dict[str, Callable[[Path], None]] = {}


def main() -> None:
    """Write the folders that are missing."""
    for name, write in CASES.items():
        if not (GOLDEN / name).exists():
            write(GOLDEN / name)
            sys.stdout.write(f"{name}: written. Add its digest to test_golden.py.\n")


if __name__ == "__main__":
    main()
