"""The reference reader opens no object whose key leads elsewhere, and raises one error for every damaged document."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_remote.format.document import seal, unseal
from read_without_torch import Checkpoint, UnreadableError, open_source
from tests.format.test_schema import setting
from tests.format.write_golden import GOLDEN

# Documents that take seconds each to read, and say nothing that smaller ones do not.
LARGE = {"million", "catalog", "compressed", "rare_run"}
DOCUMENTS = sorted(path for path in GOLDEN.rglob("*.json") if path.relative_to(GOLDEN).parts[0] not in LARGE)

# Values of other types; each field gets every second of them.
OTHER_VALUES: tuple[Any, ...] = (None, True, -1, 0.5, "x", "1:AA", [], [0], {}, {"$x": 1})

# Items of a list, and names of an object, that are changed: the first of them.
CHANGED_MAX = 4


def steps_of(document: Any) -> list[int | None]:
    """Return the steps that are read from a document; None for a checkpoint outside a run."""
    if "checkpoints" in document:
        return [entry["step"] for entry in document["checkpoints"]]
    return [document["run"]["step"] if document.get("run") else None]


def read_all(folder: Path, steps: list[int | None]) -> None:
    """Read every entry of some checkpoints of a folder."""
    for step in steps:
        Checkpoint(folder, step).read_state()


def changed_folder(source: Path, temporary: Path) -> tuple[Path, Any]:
    """Return a copy of the document of a golden folder, in a copy of the folder, and its content."""
    name = source.relative_to(GOLDEN)
    shutil.copytree(GOLDEN / name.parts[0], temporary / name.parts[0])
    return temporary / name, json.loads(unseal(source.read_bytes()))


def write(path: Path, document: Any) -> None:
    """Write a document with the digest of its text."""
    path.write_bytes(seal(json.dumps(document).encode()))


@pytest.mark.parametrize("key", ["/etc/passwd", "../x", "shards/outside/x"])
def test_no_path_leads_out_of_the_folder(key: str, tmp_path: Path) -> None:
    """Neither the text of a key nor a link leads out."""
    (tmp_path / "run" / "shards").mkdir(parents=True)
    (tmp_path / "x").write_text("secret")
    (tmp_path / "run" / "shards" / "outside").symlink_to(tmp_path)
    with pytest.raises(UnreadableError, match="leads out"):
        open_source(tmp_path / "run")(key, 0, None)


def test_a_manifest_of_another_save_is_refused(tmp_path: Path) -> None:
    """The manifest has to have the save_id that the catalog names."""
    path, document = changed_folder(next((GOLDEN / "nested").rglob("step*.json")), tmp_path)
    setting("save_id", to="0" * 32)(document)
    write(path, document)
    with pytest.raises(UnreadableError, match="another save"):
        read_all(tmp_path / "nested", [1])


def changes(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a container and a key or index of it, at every depth; of long containers the first ones."""
    stack = [document]
    while stack:
        node = stack.pop()
        keys = list(range(len(node))) if isinstance(node, list) else list(node)
        limit = CHANGED_MAX if len(keys) > 20 and node is not document else len(keys)
        for key in keys[:limit]:
            yield node, key
            if isinstance(node[key], (list, dict)):
                stack.append(node[key])


@pytest.mark.torture
@pytest.mark.parametrize("source", DOCUMENTS, ids=lambda path: path.relative_to(GOLDEN).as_posix())
def test_small_changes_of_golden_documents_raise_one_error(source: Path, tmp_path: Path) -> None:
    """A field that is missing, or has another type, is read or refused: nothing else is raised."""
    path, document = changed_folder(source, tmp_path)
    folder, steps = tmp_path / source.relative_to(GOLDEN).parts[0], steps_of(document)
    for number, (node, key) in enumerate(changes(document)):
        before = copy.copy(node)
        for value in ("deleted", *OTHER_VALUES[number % 2 :: 2]):
            if value == "deleted":
                del node[key]
            else:
                node[key] = value
            write(path, document)
            with contextlib.suppress(UnreadableError):
                read_all(folder, steps)
            node.clear()
            node.extend(before) if isinstance(node, list) else node.update(before)
