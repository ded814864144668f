"""Names of entries as attacks: terminal commands, megabytes, invalid characters, patterns, paths."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dcp_remote import cli, load
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, InvalidArgumentError
from tests.attacks.attacker import LOOKS, Bucket, bucket, column, outcomes, show_text, with_number
from tests.support.figures import count

pytestmark = pytest.mark.torture

NAMES = {
    "nothing": "",
    "NUL": "a\x00b",
    "clear the screen": "\x1b[2J\x1b[H",
    "one-byte command": "\x9b31m\x90q\x9c",
    "a line of its own": "a\nsave_id  00000000000000000000000000000000",
    "from right to left": "\u202egnp.exe",
    "invisible": "\u200b\u2060\ufeff",
    "other separators of lines": "a\x85b\u2028c\u2029d",
    "a pattern": "*[a-z]?",
    "a path": "../../etc/passwd",
    "formatting": "%s%n{0.__class__}",
    "a megabyte": "x" * 1_000_000,
    "a megabyte of combining marks": "e" + "\u0301" * 500_000,
    "the name of the table": "__dcp_remote_blocks__",
}


def with_names(name: str) -> Bucket:
    """Return a checkpoint with the name in all places that hold one."""
    attacked = bucket()
    document = attacked.document()
    tensors, stored = document["tensors"]["names"], document["objects"]["stored"]
    document["flatten"][name] = [name, name]
    del document["flatten"][tensors[0]]
    tensors[0] = name
    document["flatten"][f"{name}2"] = [f"{name}2"]
    del document["flatten"][stored[0]["name"]]
    stored[0]["name"] = f"{name}2"
    document["created"] = document["writer"][name] = name
    document["user"] = {name[:1000]: name[:1000]}
    attacked.commit(document)
    return attacked


@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_shows_letters(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each form of `show` prints only graphic characters, one line per entry, whatever the names."""
    attacked = with_names(NAMES[name])
    lines = {}
    for way, arguments in {"all": ["--key", "*"], "top": [], "json": ["--json"]}.items():
        count("attacks")
        assert cli.main(["show", attacked.store.url, *arguments]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        lines[way] = shown.out.splitlines()
        assert shown.out == "\n".join(lines[way]) + "\n", "no other line breaks"
        assert all(line.isprintable() for line in lines[way])
    assert len(lines["all"]) == 11 + 6
    entries: dict[str, Any] = json.loads("\n".join(lines["json"]))["entries"]
    assert {NAMES[name], f"{NAMES[name]}2"} <= set(entries)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_name_all_the_same(name: str) -> None:
    """An entry with such a name is loaded under that name, also when it is asked for alone."""
    count("attacks")
    attacked = with_names(NAMES[name])
    found = load(attacked.store)
    assert found[NAMES[name]][NAMES[name]].shape == (400, 230)
    [alone] = load(attacked.store, keys=[f"{NAMES[name]}2"]).values()
    assert alone == found[f"{NAMES[name]}2"]


@pytest.mark.parametrize("name", NAMES)
def test_an_error_names_it_in_a_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors about damaged shards, a wrong shape or an unmatched pattern name it in printable, short text."""
    attacked = with_names(NAMES[name])
    document = attacked.document()
    for key in document["shards"]["keys"]:
        attacked.put(key, bytes(len(attacked.objects[key])))
    complaints: list[DcpRemoteError] = []
    with pytest.raises(CorruptCheckpointError) as damaged:
        load(attacked.store)
    complaints.append(damaged.value)
    with pytest.raises(InvalidArgumentError) as unknown:
        load(attacked.store, keys="nothing like this")
    complaints.append(unknown.value)
    attacked.commit(with_number(document, "tensors.shape", 0, lambda n: n + 1))
    with pytest.raises(CorruptCheckpointError) as refused:
        load(attacked.store)
    complaints.append(refused.value)
    for error in complaints:
        count("attacks")
        assert str(error).isprintable()
        assert len(str(error)) < 4_000
    assert cli.main(["show", attacked.store.url]) == 1
    complaint = capsys.readouterr().err
    assert complaint.removesuffix("\n").isprintable()
    assert len(complaint) < 4_000


def test_very_many_names() -> None:
    """With 30,000 names a summary counts them, and an error names a few."""
    attacked = bucket()
    document = attacked.document()
    names = {f"\x1b{n}": n for n in range(30_000)}
    document["objects"]["inline"] |= names
    document["flatten"] = None
    # The three objects there are so far follow the three tensors.
    document["objects"]["positions"] = column(range(3, 30_006))
    attacked.commit(document)
    found = outcomes(attacked, LOOKS)
    assert set(found.values()) == {None}
    assert len(show_text(attacked, patterns=()).splitlines()) < 20
    with pytest.raises(InvalidArgumentError) as unknown:
        load(attacked.store, keys="nothing like this")
    assert len(str(unknown.value)) < 4_000
