"""Small files beside the tensors, as one entry of the state: a tokenizer, a configuration."""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import unicodedata
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dcp_remote.common.text import human_bytes
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, InvalidArgumentError, StateMismatchError
from dcp_remote.serialization.opaque import FILES_MARK, is_imitation, mark_of

# The bytes are held in memory on every rank. The tokenizers of large vocabularies have 40 MiB.
FILES_BYTES_MAX = 256 * MiB
FILES_MAX = 1024

# Bytes that most file systems allow in one part of a path, and in a whole one that a folder of the user precedes.
_PART_BYTES_MAX = 255
_NAME_BYTES_MAX = 1024

# Names that Windows keeps for devices, with any extension, and characters that it allows in no name beside `\` and `:`.
_WINDOWS_DEVICES = frozenset(
    {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"}
    | {f"{port}{n}" for port in ("COM", "LPT") for n in "0123456789¹²³"}
)
_WINDOWS_REFUSES = frozenset('<>"|?*')
_SEPARATORS = frozenset("\\:")

_NAMED_MAX = 5

_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list})


class Files:
    """Small files that are saved as one entry and given back as files, as a tokenizer's or a configuration's.

        state["tokenizer"] = Files.read("tokenizer")
        checkpoints.save(step, state)

        state["tokenizer"] = Files()                 # a restore fills this; its names need not be known
        checkpoints.restore(state)
        state["tokenizer"].write("tokenizer")

        load(url, keys="tokenizer")["tokenizer"].write("tokenizer")

    Names are relative paths with `/`, and must be possible on every system, since a checkpoint may be loaded on another
    one: Windows has no `aux.json`, no `a?` and no name that ends in a dot or space, and takes `a.txt` and `A.txt` for
    one file, as macOS does. Such names are refused before they are saved, rather than when they are written, where the
    name can no longer be changed.

    At most 1,024 files of 256 MiB together; larger files belong into the bucket themselves. Files that did not change
    since the newest checkpoint are not sent again. All ranks give equal files, as of any value that is no tensor: those
    of one rank are stored for all. Modes, times and links are not kept.

    Args:
        contents: Bytes of the files by name.

    Raises:
        InvalidArgumentError: A name would leave the folder, is no path, or is not possible on every system; a content
            is not bytes; or a limit is exceeded. Lists up to five wrong names.
    """

    def __init__(self, contents: Mapping[str, bytes] | None = None) -> None:
        """Check and keep the contents."""
        self._contents = _checked(contents or {}, InvalidArgumentError)

    @classmethod
    def read(
        cls,
        source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        patterns: str | Sequence[str] = "*",
    ) -> Self:
        """Read a folder with its subfolders, a file, or several files.

        Args:
            source: Folder, whose files get their names relative to the folder; or path or paths of files, which get
                their last part as name. Links to files are followed, links to folders are not.
            patterns: Glob or globs, as of `fnmatch`, of the names to read: `("*.json", "tokenizer*")`.

        Raises:
            InvalidArgumentError: There is no such file or folder, no file matches, two files have one name, or a limit
                is exceeded; nothing was read then. Or a name is not possible on every system.
        """
        paths = _find_files(source)
        globs = [patterns] if isinstance(patterns, str) else list(patterns)
        paths = {name: path for name, path in paths.items() if any(fnmatch.fnmatchcase(name, glob) for glob in globs)}
        if not paths:
            raise InvalidArgumentError("No file was found.", source=source, patterns=", ".join(globs))
        _require_size({name: path.stat().st_size for name, path in paths.items()}, InvalidArgumentError)
        return cls({name: path.read_bytes() for name, path in paths.items()})

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write all files below a folder, which is made if it does not exist; return their paths.

        A file is replaced as a whole: after a crash it is the old one or the new one. Other files stay. The folder may
        be a link, and a link at the path of a file is replaced, not followed.

        Raises:
            InvalidArgumentError: There are no files: nothing was restored into this object. Or a subfolder is a link
                that leads out of the folder; nothing was written then.
            OSError: The folder cannot be written.
        """
        if not self._contents:
            raise InvalidArgumentError("There are no files to write: restore them first.", folder=folder)
        leading_out = [name for name in self._contents if not _is_below(Path(folder, name).parent, Path(folder))]
        if leading_out:
            raise InvalidArgumentError(
                "A subfolder is a link that leads out of the folder; nothing was written. Remove the link, or write "
                "into another folder.",
                folder=folder,
                names=", ".join(leading_out[:_NAMED_MAX]),
            )
        written: list[Path] = []
        for name, content in self._contents.items():
            path = Path(folder, *name.split("/"))
            path.parent.mkdir(parents=True, exist_ok=True)
            # Ranks of one host may write the same files at the same time.
            temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
            try:
                temporary.write_bytes(content)
                temporary.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            written.append(path)
        return written

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files, sorted."""
        return tuple(self._contents)

    def __getitem__(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return self._contents[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._contents)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._contents)

    def __eq__(self, other: object) -> bool:
        """Return whether names and bytes are equal."""
        return isinstance(other, Files) and self._contents == other._contents

    __hash__ = None  # type: ignore[assignment]  # a restore replaces the files

    def __repr__(self) -> str:
        size_bytes = sum(map(len, self._contents.values()))
        return f"Files({len(self)} of {human_bytes(size_bytes)}: {', '.join(self.names[:_NAMED_MAX])})"

    def state_dict(self) -> tuple[str, dict[str, bytes]]:
        """Return the entry: torch takes this object for a `Stateful`."""
        return FILES_MARK, dict(self._contents)

    def load_state_dict(self, state_dict: Any) -> None:
        """Replace the files by those of an entry.

        Raises:
            CorruptCheckpointError: A stored name is not allowed.
            StateMismatchError: The entry is none of files.
        """
        value = unwrap_marked(state_dict)
        if not isinstance(value, Files):
            raise files_mismatch(value)
        self._contents = value._contents


def files_mismatch(value: object, **details: object) -> StateMismatchError:
    """Return the error for a state that asks for `Files` where the checkpoint has another value."""
    return StateMismatchError(
        "The checkpoint does not fit the state, which asks for Files where the checkpoint has another value. Give the "
        "state such a value, or leave the Files out of the state.",
        **details,
        saved=type(value).__name__,
    )


def unwrap_marked(value: object) -> object:
    """Return the value of an `Opaque` entry, the `Files` of an entry of files, or any other value itself.

    In a list or dict, which torch stores as one entry if it holds no tensors, the elements are replaced in place. The
    value of an `Opaque` is returned as it was saved.

    Raises:
        CorruptCheckpointError: A stored name would leave the folder into which the files are written.
    """
    holder = [value]
    for container, key, inner in iterate_tuples(holder):
        container[key] = _unwrap(inner)
    return holder[0]


def holds_imitation(value: object) -> bool:
    """Return whether an object of a state is, or holds in its lists and dicts, an imitation of an entry with a mark."""
    return any(is_imitation(inner) for _, _, inner in iterate_tuples([value]))


def iterate_tuples(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the tuples in a list or dict at any depth, with container and key or index; none that is in a tuple."""
    stack, seen = [value], {id(value)}
    while stack:
        container = stack.pop()
        pairs = enumerate(container) if isinstance(container, list) else container.items()
        for key, inner in [(key, inner) for key, inner in pairs if type(inner) is tuple or type(inner) in _CONTAINERS]:
            if type(inner) is tuple:
                yield container, key, inner
            elif id(inner) not in seen:
                seen.add(id(inner))
                stack.append(inner)


def _unwrap(value: object) -> object:
    mark, inner = mark_of(value)
    if mark != FILES_MARK:
        return inner
    if not isinstance(inner, dict):
        raise CorruptCheckpointError("An entry of files is damaged.", type=type(inner).__name__)
    files = Files()
    files._contents = _checked(inner, CorruptCheckpointError)
    return files


def _find_files(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> dict[str, Path]:
    """Return the paths of files by name."""
    given = [Path(source)] if isinstance(source, (str, os.PathLike)) else [Path(path) for path in source]
    if len(given) == 1 and given[0].is_dir():
        folder = given[0]
        walked = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
        return {path.relative_to(folder).as_posix(): path for path in sorted(walked) if path.is_file()}
    missing = [str(path) for path in given if not path.is_file()]
    if missing:
        raise InvalidArgumentError("There are no such files.", files=", ".join(missing[:_NAMED_MAX]))
    paths = {path.name: path for path in given}
    if len(paths) < len(given):
        raise InvalidArgumentError(
            "Two files have the same name. Give Files a dict of names and bytes.", files=", ".join(map(str, given))
        )
    return paths


def _checked(contents: Mapping[Any, Any], kind: type[DcpRemoteError]) -> dict[str, bytes]:
    """Return contents sorted by name, after checks of names and sizes; a checkpoint's are not trusted."""
    wrong = _find_wrong_names(contents)
    if wrong:
        raise kind(
            "Names of files must be relative paths with '/', such as 'vocab/merges.txt', without '..', and possible on "
            "every system, so that files saved on one can be written on another. Rename the files, or leave them out.",
            names=", ".join(f"{name!r:.100} ({why})"[:200] for name, why in list(wrong.items())[:_NAMED_MAX]),
            found=len(wrong),
        )
    others = [name for name, content in contents.items() if not isinstance(content, (bytes, bytearray, memoryview))]
    if others:
        raise kind("Contents of files must be bytes.", names=", ".join(others[:_NAMED_MAX]))
    _require_size({name: memoryview(content).nbytes for name, content in contents.items()}, kind)
    return {name: bytes(contents[name]) for name in sorted(contents)}


def _find_wrong_names(names: Iterable[Any]) -> dict[Any, str]:
    """Return the names that are no relative paths, or cannot exist on every system beside the others, with reasons."""
    wrong: dict[Any, str] = {}
    # Paths, and whether they are files, by the form in which Windows and macOS compare them.
    folded: dict[str, tuple[str, bool]] = {}
    for name in names:
        why = _explain_wrong(name)
        if why is not None:
            wrong[name] = why
            continue
        for path in itertools.accumulate(name.split("/"), "{}/{}".format):  # of its folders, then its own
            first, is_file = folded.setdefault(unicodedata.normalize("NFC", path).casefold(), (path, path == name))
            if (first, is_file) != (path, path == name):
                same = f"the same as {first!r} on Windows or macOS"
                wrong.setdefault(name, same if first != path else f"{path!r} is a file and a folder")
    return wrong


def _explain_wrong(name: Any) -> str | None:
    """Return why a name is not possible on every system."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or not name.isprintable() or not _SEPARATORS.isdisjoint(name):
        return "no relative path"
    if len(name.encode()) > _NAME_BYTES_MAX or any(len(part.encode()) > _PART_BYTES_MAX for part in parts):
        return "too long"
    if any(part.partition(".")[0].rstrip(" ").upper() in _WINDOWS_DEVICES for part in parts):
        return "a device on Windows"
    if any(part.endswith((".", " ")) for part in parts):
        return "Windows drops a dot or space at the end"
    if not _WINDOWS_REFUSES.isdisjoint(name):
        return f"Windows allows none of {' '.join(sorted(_WINDOWS_REFUSES))}"
    return None


def _is_below(path: Path, folder: Path) -> bool:
    """Return whether a path, with its links followed, is a folder or below it."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # a cycle of links, in Python 3.11 and 3.12
        return False


def _require_size(sizes_bytes: Mapping[str, int], kind: type[DcpRemoteError]) -> None:
    total_bytes = sum(sizes_bytes.values())
    if len(sizes_bytes) > FILES_MAX or total_bytes > FILES_BYTES_MAX:
        raise kind(
            f"Files are for small files: at most {FILES_MAX} of together {human_bytes(FILES_BYTES_MAX)}. Choose some "
            "by patterns, or upload large files to the bucket themselves.",
            files=len(sizes_bytes),
            size=human_bytes(total_bytes),
            largest=max(sizes_bytes, key=lambda name: sizes_bytes[name]),
        )
