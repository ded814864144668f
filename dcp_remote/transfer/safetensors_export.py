"""SafetensorsExport: the weights of a checkpoint as files of safetensors, as Transformers writes them."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dcp_remote.common.digests import digest
from dcp_remote.common.text import is_unicode, join_some
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.format.shard import METADATA_NAME, encode_header
from dcp_remote.loading.load_options import LoadOptions, Rename
from dcp_remote.serialization.files import Files
from dcp_remote.serialization.tensors import byte_view, dtype_name
from dcp_remote.transfer.checkpoint import SavedCheckpoint
from dcp_remote.transfer.piece_planner import Together
from dcp_remote.transfer.safetensors_source import DTYPES, INDEX_SUFFIX, WEIGHTS_FILE

logger = logging.getLogger(__name__)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Entry of the small files beside the weights.
_FILES = "files"

# Names of small files and of their folders that readers would take for the weights, or for a checkpoint of torch.
_OTHER_WEIGHTS = re.compile(
    r"\.metadata|model(-\d{5}-of-\d{5})?\.safetensors|[^/]*\.safetensors\.index\.json", re.IGNORECASE
)


class SafetensorsExport:
    """Export of the tensors below a key."""

    def __init__(self, saved: SavedCheckpoint, *, key: str, rename: Rename | None, file_bytes_max: int) -> None:
        """Choose the tensors, and divide them into files; no request is sent."""
        self._saved = saved
        titles = _choose(saved, key=key, rename=rename)
        self._sizes = {name: sum(saved.pieces(name).values()) for name in titles}
        # By the name of each file, the names of its tensors in the checkpoint and in the file.
        self._files = _divide(titles, self._sizes, file_bytes_max)
        self.total_bytes = sum(self._sizes.values())
        # Without this file, `from_pretrained` finds no weights.
        self.last_file = WEIGHTS_FILE if WEIGHTS_FILE in self._files else f"model{INDEX_SUFFIX}"

    def write(self, folder: Path, add: Callable[[int], None]) -> None:
        """Write the files into a folder, and read them back; `add` is told the bytes of both."""
        small = self._read_side_files()
        if small:
            Files(small).write(folder)
        for file, titles in self._files.items():
            digests = self._write_file(folder / file, titles, add)
            _verify(folder / file, digests, add)
        if WEIGHTS_FILE not in self._files:
            weight_map = {title: file for file, titles in self._files.items() for title in titles.values()}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            small[self.last_file] = json.dumps(index, indent=2).encode()
            (folder / self.last_file).write_bytes(small[self.last_file])
        for file, data in small.items():
            _verify(folder / file, [("all of the file", len(data), digest(data))], add)

    def _write_file(
        self, path: Path, titles: Mapping[str, str], add: Callable[[int], None]
    ) -> list[tuple[str, int, bytes]]:
        """Write a file; return the name, the length and the digest of each part of it, in order."""
        saved, limit = self._saved, self._saved.piece_bytes_max
        header = encode_header(
            (title, _NAMES[saved.dtype(name)], list(saved.shape(name)), self._sizes[name])
            for name, title in titles.items()
        )
        parts = [("the header", len(header), digest(header))]
        boxes = {(name, box): size_bytes for name in titles for box, size_bytes in saved.pieces(name).items()}
        reads = Together(saved, boxes, bytes_max=limit, small_bytes_max=limit)
        with path.open("xb") as opened:
            opened.write(header)
            for name, box in boxes:
                data = byte_view(reads.take((name, box)))
                opened.write(data)
                parts.append((titles[name], len(data), digest(data)))
                add(len(data))
            opened.flush()
            os.fsync(opened.fileno())
        return parts

    def _read_side_files(self) -> dict[str, bytes]:
        """Return the small files, without those that would stand for the weights of this export."""
        manifest = self._saved.manifest
        if _FILES not in manifest.inline and _FILES not in manifest.stored_index:
            return {}
        files = self._saved.objects([_FILES])[_FILES]
        names = files.names if isinstance(files, Files) else ()
        left = [name for name in names if _OTHER_WEIGHTS.fullmatch(name.partition("/")[0])]
        if left:
            logger.warning("left out of the export, since the names are those of weights: %s", ", ".join(left))
        return {name: files[name] for name in names if name not in left}


def _choose(saved: SavedCheckpoint, *, key: str, rename: Rename | None) -> dict[str, str]:
    """Return the names of the tensors to write, in the checkpoint and in its order, and in the files."""
    prefix = f"{key}." if key else ""
    names = [name for name in saved.manifest.names() if name.startswith(prefix)]
    tensors = [name for name in names if name in saved.manifest.tensors.index]
    if not tensors:
        tops = dict.fromkeys(name.partition(".")[0] for name in saved.manifest.tensors.names)
        raise InvalidArgumentError(
            'The checkpoint has no tensors below this key. Name another one, or "" for all tensors.',
            url=saved.store.url,
            key=key,
            has=", ".join(tops),
        )
    left = [name for name in names if name not in saved.manifest.tensors.index and name != _FILES]
    if left:
        logger.warning(
            "left out of the export, since safetensors hold no objects: %d entries, such as %s",
            len(left),
            join_some(left),
        )
    titles = {name.removeprefix(prefix): name for name in tensors}
    renamed = LoadOptions(rename=rename).rename_entries(titles)[0]
    if not renamed:
        raise InvalidArgumentError("rename leaves out all tensors. Leave out some alone.", url=saved.store.url)
    for title, new in renamed.items():
        name = titles[title]
        if new == METADATA_NAME or not is_unicode(new):
            raise InvalidArgumentError(
                "safetensors cannot hold a tensor of this name. Rename it, or leave it out.",
                tensor=name,
                name=ascii(new),
            ).advise(rename="rename={name: None} leaves it out")
        if not saved.is_plain(name) or saved.dtype(name) not in _NAMES:
            raise InvalidArgumentError(
                "safetensors cannot hold a tensor. Leave it out, or write a folder of torch.",
                tensor=name,
                dtype=dtype_name(saved.dtype(name)),
            ).advise(rename="rename={name: None} leaves it out", kind='kind="torch" exports it')
    return {titles[title]: new for title, new in renamed.items()}


def _divide(titles: Mapping[str, str], sizes: Mapping[str, int], bytes_max: int) -> dict[str, dict[str, str]]:
    """Return the tensors by the name of their file, in order; `sizes` has the bytes of each."""
    groups: list[dict[str, str]] = [{}]
    used_bytes = 0
    for name, title in titles.items():
        if groups[-1] and used_bytes + sizes[name] > bytes_max:
            groups.append({})
            used_bytes = 0
        groups[-1][name] = title
        used_bytes += sizes[name]
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)}


def _verify(path: Path, parts: Sequence[tuple[str, int, bytes]], add: Callable[[int], None]) -> None:
    """Read a file, and compare the lengths and digests of its parts."""
    with path.open("rb") as opened:
        if hasattr(os, "posix_fadvise"):  # so that the disk is read, and not the copy in memory
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for number, (title, length, expected) in enumerate(parts):
            data = opened.read(length)
            if len(data) < length or digest(data) != expected:
                raise CorruptCheckpointError(
                    "Bytes read back differ from those that were written. Check the disk.", file=str(path), tensor=title
                )
            add(length if number else 0)
