"""`Files`: small files as one entry of a state, from folders and back; names of a checkpoint are not trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, Files, Opaque, PerRank, RemoteReader, RemoteWriter, load, plain_errors
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, StateMismatchError
from dcp_remote.serialization import files as module
from dcp_remote.serialization.files import unwrap_marked
from dcp_remote.serialization.opaque import FILES_MARK
from dcp_remote.storage import MemoryStore

CONTENTS = {"config.json": b"{}", "vocab/merges.txt": bytes(range(256)) * 100, "empty": b""}


def a_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    for name, content in CONTENTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_saved_and_given_back(tmp_path: Path) -> None:
    """Save a folder, one entry; restore into an empty `Files` and write over other files; `load` gives the same."""
    store = MemoryStore()
    files = Files.read(a_folder(tmp_path))
    assert (files.names, len(files), files["config.json"]) == (tuple(sorted(CONTENTS)), 3, b"{}")
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2), "beside": {"tokenizer": files}, "own": PerRank(files)})
        state: dict[str, Any] = {"w": torch.zeros(2), "beside": {"tokenizer": Files()}, "own": PerRank(Files())}
        checkpoints.restore(state)
    target = tmp_path / "new" / "folder"
    target.mkdir(parents=True)
    (target / "config.json").write_bytes(b"old")
    (target / "other").write_bytes(b"stays")
    written = state["beside"]["tokenizer"].write(target)
    assert [path.relative_to(target).as_posix() for path in written] == sorted(CONTENTS)
    assert content_of(target) == CONTENTS | {"other": b"stays"}
    assert state["own"].value == files
    loaded = load(store, keys="beside.tokenizer")["beside"]["tokenizer"]
    assert loaded == files
    assert load(store)["per_rank"]["0"]["own"] == files


def test_by_torchs_own_functions(tmp_path: Path) -> None:
    """Save and load at the top level of a state for plain `dcp.save`."""
    url, files = tmp_path.as_uri(), Files(CONTENTS)
    dcp.save({"tokenizer": files}, storage_writer=RemoteWriter(url), no_dist=True)
    state = {"tokenizer": Files({"another": b"1"})}
    dcp.load(state, storage_reader=RemoteReader(url), no_dist=True)
    assert state["tokenizer"] == files == load(url)["tokenizer"]


def test_what_is_read(tmp_path: Path) -> None:
    """Read by patterns, single files, links to files; errors name what is missing, and nothing to read is an error."""
    folder = a_folder(tmp_path)
    assert Files.read(folder, patterns=("*.json", "vocab/*")).names == ("config.json", "vocab/merges.txt")
    assert Files.read(folder / "config.json").names == ("config.json",)
    assert Files.read([folder / "config.json", folder / "vocab" / "merges.txt"]).names == ("config.json", "merges.txt")
    (folder / "link").symlink_to(folder / "config.json")
    assert Files.read(str(folder), patterns="link")["link"] == b"{}"
    for source, patterns, what in (
        (folder, "*.bin", "No file was found"),
        ([folder / "none", folder / "config.json"], "*", "no such files"),
        ([folder / "config.json", folder / "vocab" / ".." / "config.json"], "*", "same name"),
    ):
        with pytest.raises(InvalidArgumentError, match=what):
            Files.read(source, patterns=patterns)


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../up", "a/../../up", "a//b", "./a", "a/", "C:/x", "a\\b", "a\nb", "\ud800", "x" * 300, 5],
)
def test_names_that_leave_the_folder(name: Any) -> None:
    """Refuse a name by the caller, and one of a checkpoint, which nobody has to trust."""
    with pytest.raises(InvalidArgumentError, match="relative paths"):
        Files({name: b""})
    with pytest.raises(CorruptCheckpointError, match="relative paths"):
        unwrap_marked((FILES_MARK, {name: b""}))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("con", "a device"),
        ("vocab/NUL.txt", "a device"),
        ("aux.tar.gz", "a device"),
        ("Com1", "a device"),
        ("lpt9 .json", "a device"),
        ("prn/a", "a device"),
        ("conout$", "a device"),
        ("com\u00b9", "a device"),
        ("a.", "at the end"),
        ("a ", "at the end"),
        ("folder /a", "at the end"),
        ("what?", "allows none"),
        ('a"b', "allows none"),
        ("a*", "allows none"),
    ],
)
def test_names_that_another_system_does_not_have(name: str, why: str) -> None:
    """Refuse a name by the caller and one of a checkpoint: a device, an end that is dropped, a character."""
    with pytest.raises(InvalidArgumentError, match=f"every system.*{why}"):
        Files({name: b"", "good": b""})
    with pytest.raises(CorruptCheckpointError, match=f"every system.*{why}"):
        unwrap_marked((FILES_MARK, {name: b""}))


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (["a.txt", "A.txt", "b"], "'A.txt' (the same as 'a.txt'"),
        (["v/a", "V/b"], "'V/b' (the same as 'v'"),
        (["a", "A/b"], "'A/b' (the same as 'a'"),
        (["stra\u00dfe", "STRASSE"], "'STRASSE' (the same as"),
        (["\u00e9", "e\u0301"], "'e\u0301' (the same as"),
    ],
)
def test_names_that_another_system_takes_for_one(names: list[str], wrong: str) -> None:
    """Refuse names that differ only in case or in how an accent is written, also of folders; the error names both."""
    with pytest.raises(InvalidArgumentError) as caught:
        Files(dict.fromkeys(names, b""))
    assert wrong in str(caught.value.details["names"])
    assert caught.value.details["found"] == 1


@pytest.mark.parametrize(
    "name", ["console", "a.con", "com10", "null", "auxiliary/config", ".hidden", "..a", "a b", "a.b.c", "~$x", "\u4e2d"]
)
def test_names_that_are_like_those_are_saved(name: str) -> None:
    """Save names that begin with a device's, have it as extension, or hold dots and spaces elsewhere."""
    assert Files({name: b"1", "b/Con1": b""}).names == tuple(sorted((name, "b/Con1")))


def test_many_wrong_names_are_counted() -> None:
    """List five of many names that are not possible everywhere."""
    with pytest.raises(InvalidArgumentError) as caught:
        Files({f"a{n}.": b"" for n in range(20)})
    assert caught.value.details["found"] == 20
    assert str(caught.value.details["names"]).count("(") == 5


@pytest.mark.parametrize("target", ["outside", "dangling", "loop"])
def test_a_link_out_of_the_folder_is_not_followed(target: str, tmp_path: Path) -> None:
    """Refuse a subfolder that is a link out, before a file is written; follow links inside, replace links to files."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    (folder / "deep").mkdir()
    link = folder / "deep" / "vocab"
    link.symlink_to({"outside": outside, "dangling": tmp_path / "none", "loop": link}[target])
    files = Files({"a": b"1", "deep/vocab/x/merges.txt": b"2"})
    with pytest.raises(InvalidArgumentError, match=r"leads out of the folder.*deep/vocab/x/merges\.txt"):
        files.write(folder)
    assert not (folder / "a").exists()
    assert not any(outside.iterdir())
    link.unlink()
    (folder / "inner").mkdir()
    link.symlink_to(folder / "inner")
    (outside / "secret").write_bytes(b"stays")
    (folder / "a").symlink_to(outside / "secret")
    (tmp_path / "link").symlink_to(folder)
    files.write(tmp_path / "link")
    assert (folder / "inner" / "x" / "merges.txt").read_bytes() == b"2"
    assert (outside / "secret").read_bytes() == b"stays"
    assert (folder / "a").read_bytes() == b"1"


def test_wrong_contents() -> None:
    """Refuse a file at the path of a folder, text, entries that hold no files, and writing what was never restored."""
    with pytest.raises(InvalidArgumentError, match=r"'a/b' \('a' is a file and a folder"):
        Files({"a": b"", "a/b": b""})
    with pytest.raises(InvalidArgumentError, match="must be bytes"):
        Files({"a": "text"})  # type: ignore[dict-item]
    with pytest.raises(CorruptCheckpointError, match="must be bytes"):
        unwrap_marked((FILES_MARK, {"a": 5}))
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        unwrap_marked((FILES_MARK, [b""]))
    with pytest.raises(StateMismatchError, match=r"asks for Files.*saved='dict'"):
        Files().load_state_dict({"a": 1})
    with pytest.raises(InvalidArgumentError, match="restore them first"):
        Files().write("folder")


@pytest.mark.parametrize(
    "value", [5, Opaque(5), (5,), "x" * 100_000, None], ids=["int", "opaque", "tuple", "long", "no"]
)
def test_files_where_another_value_was_saved(value: Any, tmp_path: Path) -> None:
    """Restore into `Files`, of all ranks and of one, and by torch: the error names the entry."""
    url = tmp_path.as_uri()
    for saved, state, name in (
        ({"a": {"x": value}}, {"a": {"x": Files()}}, "a.x"),
        ({"x": PerRank(value)}, {"x": PerRank(Files())}, "per_rank.0.x"),
    ):
        with CheckpointManager(MemoryStore()) as checkpoints:
            checkpoints.save(1, {**saved, "w": torch.ones(2)}, wait=True)
            with pytest.raises(StateMismatchError, match=rf"asks for Files.*name='{name}'") as caught:
                checkpoints.restore({**state, "w": torch.zeros(2)})
        inner = value.value if isinstance(value, Opaque) else value
        assert caught.value.details["saved"] == type(inner).__name__
    dcp.save({"x": value}, storage_writer=RemoteWriter(url), no_dist=True)
    with pytest.raises(StateMismatchError, match="name='x'"), plain_errors():
        dcp.load({"x": Files()}, storage_reader=RemoteReader(url), no_dist=True)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceed the bytes or the count: refused before a file is read, with the largest file's name."""
    monkeypatch.setattr(module, "FILES_BYTES_MAX", 1000)
    folder = a_folder(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"small files.*largest='vocab/merges.txt'"):
        Files.read(folder)
    monkeypatch.setattr(module, "FILES_MAX", 2)
    with pytest.raises(InvalidArgumentError, match="at most 2"):
        Files({"a": b"", "b": b"", "c": b""})


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """Write over a folder: the error is the system's, and no temporary file stays."""
    (tmp_path / "config.json" / "x").mkdir(parents=True)
    with pytest.raises(OSError, match=r"config\.json"):
        Files({"config.json": b"new"}).write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
