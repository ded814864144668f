"""The names of what a run holds. Pure.

    <run>/catalog.json
    <run>/manifests/step-000000001000-<revision>-<random>.json
    <run>/shards/<hh>/<revision>-step-000000001000-rank-00003-<random>-0000.safetensors

Every name carries the revision that the catalog had when its writer looked: what was written below the catalog's floor
can no longer be committed, and removing orphans rests on that. Nobody ever writes a name twice.
"""

from __future__ import annotations

import re
import secrets

from dcp_remote.shard import SHARDS_PREFIX

MANIFESTS_PREFIX = "manifests/"

_MANIFEST = re.compile(rf"{MANIFESTS_PREFIX}step-\d{{12,}}-(\d+)-[0-9a-f]{{16}}\.json", re.ASCII)
_SHARD = re.compile(
    rf"{SHARDS_PREFIX}[0-9a-f]{{2}}/(\d+)-step-\d{{12,}}-rank-\d{{5,}}-[0-9a-f]{{16}}-\d{{4,}}\.safetensors", re.ASCII
)


def origin(*, revision: int, step: int) -> str:
    """What the names of the shards of a save begin with."""
    return f"{revision}-step-{step:012d}-"


def manifest_key(*, revision: int, step: int) -> str:
    """A fresh name for a manifest, relative to the run; sorted by step."""
    return f"{MANIFESTS_PREFIX}step-{step:012d}-{revision}-{secrets.token_hex(8)}.json"


def revision_of(key: str) -> int | None:
    """The revision that a manifest's or shard's name carries; None if it is no name of ours."""
    match = _MANIFEST.fullmatch(key) or _SHARD.fullmatch(key)
    return int(match[1]) if match is not None else None
