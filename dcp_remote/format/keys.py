"""Keys of the objects of a run. Pure.

    <run>/catalog.json
    <run>/manifests/step-000000001000-<revision>-<random>.json
    <run>/shards/<hh>/<revision>-step-000000001000-rank-00003-<random>-0000.safetensors

Every name has the revision of the catalog that its writer read. Objects with a revision below the floor of the catalog
can no longer be committed, which is why gc may remove them. No name is ever written twice.
"""

from __future__ import annotations

import re
import secrets

SHARDS_PREFIX = "shards/"
MANIFESTS_PREFIX = "manifests/"

_WRITTEN_KEY = re.compile(rf"{SHARDS_PREFIX}[0-9a-f]{{2}}/rank-\d{{5,}}-[0-9a-f]{{16}}-\d{{4,}}\.safetensors", re.ASCII)

_MANIFEST = re.compile(rf"{MANIFESTS_PREFIX}step-(?P<step>\d{{12,}})-(?P<revision>\d+)-[0-9a-f]{{16}}\.json", re.ASCII)
_SHARD = re.compile(
    rf"{SHARDS_PREFIX}[0-9a-f]{{2}}/(?P<revision>\d+)-step-(?P<step>\d{{12,}})-rank-\d{{5,}}-[0-9a-f]{{16}}-\d{{4,}}"
    rf"\.safetensors",
    re.ASCII,
)


def origin(*, revision: int, step: int) -> str:
    """Return the prefix of the names of the shards of a save."""
    return f"{revision}-step-{step:012d}-"


def manifest_key(*, revision: int, step: int) -> str:
    """Return a fresh key for a manifest, relative to the run; keys sort by step."""
    return f"{MANIFESTS_PREFIX}step-{step:012d}-{revision}-{secrets.token_hex(8)}.json"


def revision_of(key: str) -> int | None:
    """Return the revision in the key of a manifest or shard of a run; None for other keys."""
    return _number_of(key, "revision")


def step_of(key: str) -> int | None:
    """Return the step in the key of a manifest or shard of a run; None for other keys."""
    return _number_of(key, "step")


def _number_of(key: str, name: str) -> int | None:
    match = _MANIFEST.fullmatch(key) or _SHARD.fullmatch(key)
    return int(match[name]) if match is not None else None


def is_written_key(key: str) -> bool:
    """Return whether a key, relative to the checkpoint, has the form of a shard of a checkpoint outside a run."""
    return _WRITTEN_KEY.fullmatch(key) is not None
