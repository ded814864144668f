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

from dcp_remote import RemoteWriter, Retention
from dcp_remote.format.document import seal, unseal
from dcp_remote.storage.local import LocalStore
from tests.format import golden_states
from tests.support.rank_threads import manager_threads
from tests.support.segments import lower_segments, shard_state
from tests.support.simulated_ranks import save_as_ranks

GOLDEN = Path(__file__).parent / "golden"


def save(folder: Path, state: dict[str, Any], **options: Any) -> None:
    save_as_ranks([state], lambda: RemoteWriter(folder, **options))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the fields of a document, to what this release does not write."""
    document = json.loads(unseal(path.read_bytes()))
    change(document)
    path.write_bytes(seal(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()))


def write_segments(folder: Path) -> None:
    """Save two steps on two ranks, in segments of a few pieces that the second shares in part; then thin the first."""
    store, retention = LocalStore(folder), Retention(keep_optimizer_last=1)
    with lower_segments(3), manager_threads(2, store, retention=retention) as ranks:
        for step in (1, 2):
            states = shard_state(golden_states.in_segments(step), 2)
            ranks.values(lambda rank, manager, step=step, states=states: manager.save(step, states[rank], wait=True))  # type: ignore[misc]  # bound now


# By folder: function that writes the folder, such as `lambda folder: save(folder, golden_states.blocks())`.
CASES: dict[str, Callable[[Path], None]] = {"segments": write_segments}


def main() -> None:
    """Write the folders that are missing."""
    for name, write in CASES.items():
        if not (GOLDEN / name).exists():
            write(GOLDEN / name)
            sys.stdout.write(f"{name}: written. Add its digest to test_golden.py.\n")


if __name__ == "__main__":
    main()
