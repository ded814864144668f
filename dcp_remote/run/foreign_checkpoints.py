"""Other checkpoints than ours at a URL where no checkpoint was found: recognized by their keys, for messages.

A URL that is one folder off, or that of another tool's checkpoint, looks like a run that has not begun; a job would
train from nothing. So the first page of a listing is looked at, once, and the message says what lies there.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import escape_unprintable
from dcp_remote.errors import BucketNotFoundError, DcpRemoteError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.keys import SHARDS_PREFIX, is_written_key, revision_of
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

# One page of a listing of S3: a look costs one request, however many objects lie below the URL.
_KEYS_MAX = 1_000

# Short, because a job waits for the listing, which only completes a message.
_RETRY_SECONDS = 10.0

# A message shows so many keys, each cut to so many characters.
_SHOWN_MAX = 3
_CHARACTERS_MAX = 100

# Function from the keys of the first page to those of one kind.
_Pick: TypeAlias = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of checkpoint, as a message names it."""

    what: str  # what lies at the URL; the keys found follow in brackets
    advice: str  # what to do; "{below}" is the URL of the folder of the first key found
    pick: _Pick


def describe_foreign(store: ObjectStore, *, retry_seconds: float = _RETRY_SECONDS) -> str | None:
    """Describe what lies at a URL without catalog and manifest, and what to do; None if nothing was recognized.

    Costs a LIST of one page, retried for so many seconds. Without permission to list, and after a failure, the result
    is None. A bucket that does not exist is raised.
    """
    try:
        listing = RetryingStore(store, Deadline(retry_seconds)).list()
        return describe_keys([info.key for info in itertools.islice(listing, _KEYS_MAX)], store.url)
    except BucketNotFoundError:
        raise
    except DcpRemoteError as error:
        logger.debug("%s: no look at what lies there: %s", store.url, error)
        return None


def describe_keys(keys: Sequence[str], url: str) -> str | None:
    """Say which kind of checkpoint has these keys, and what to do; None if there are none. Pure.

    None also for a checkpoint by itself, which the caller has found.
    """
    if MANIFEST_KEY in keys:
        return None
    for kind in _KINDS:
        if found := kind.pick(keys):
            below = escape_unprintable(f"{url.rstrip('/')}/{found[0].rpartition('/')[0]}")  # folder of the first key
            return f"{kind.what} ({_show(found)}): {kind.advice.format(below=below)}"
    return f"Other objects lie there ({_show(keys)}): check the URL." if keys else None


def _files(name: str) -> _Pick:
    """Return a function that picks the files with such a name, in any folder; shards of ours are never picked."""
    expression = re.compile(rf"(?!(?:.*/)?{SHARDS_PREFIX})(?:.*/)?(?:{name})")

    def pick(keys: Sequence[str]) -> list[str]:
        return [key for key in keys if expression.fullmatch(key)]

    return pick


def _pick_checkpoints(keys: Sequence[str]) -> list[str]:
    """Pick the manifests of checkpoints by themselves, one or more levels down, with shards beside them."""
    folders = {key[: match.start() + 1] for key in keys for match in re.finditer(f"/{SHARDS_PREFIX}", key)}
    return [key for key in keys if key.endswith(f"/{MANIFEST_KEY}") and key.removesuffix(MANIFEST_KEY) in folders]


def _pick_orphans(keys: Sequence[str]) -> list[str]:
    return [key for key in keys if is_written_key(key) or revision_of(key) is not None]


# The first kind that has a key counts: Hugging Face's trainer writes files of torch.save, too.
_KINDS = (
    _Kind(
        "A run of dcp_remote lies there",
        "try again, since the store did not find its catalog.json a moment ago.",
        lambda keys: [key for key in keys if key == CATALOG_KEY],
    ),
    # No shards are asked for: a run of large checkpoints has them on later pages.
    _Kind(
        "A run of dcp_remote lies below this URL",
        "pass {below}.",
        lambda keys: [key for key in keys if key.endswith(f"/{CATALOG_KEY}")],
    ),
    _Kind(
        "A checkpoint of dcp_remote by itself lies below this URL",
        "pass {below} to load or RemoteReader.",
        _pick_checkpoints,
    ),
    _Kind(
        "A checkpoint of torch's own writer lies there",
        "load it with torch.distributed.checkpoint.FileSystemReader (FsspecReader for a URL) into a dict of"
        " ModelState(model) and OptimizerState(model, optimizer), then save it once, or run `dcp-remote import`.",
        _files(r"\.metadata|__\d+_\d+\.distcp"),
    ),
    _Kind(
        "Weights in files of safetensors or Hugging Face lie there",
        "run `dcp-remote import`, or load them with from_pretrained and save them once.",
        _files(r".*\.safetensors|(?:pytorch|adapter)_model.*\.bin"),
    ),
    _Kind(
        "Files of torch.save lie there",
        "load them with what wrote them, then save once, or run `dcp-remote import` with one of them.",
        _files(r".*\.(?:pt|pth|ckpt)"),
    ),
    _Kind(
        "Manifests and shards of a save that was interrupted lie there, and no checkpoint",
        "`dcp-remote gc` removes them.",
        _pick_orphans,
    ),
)


def _show(keys: Sequence[str]) -> str:
    shown = [escape_unprintable(key[:_CHARACTERS_MAX]) for key in keys[:_SHOWN_MAX]]
    return ", ".join([*shown, *(["…"] if len(keys) > _SHOWN_MAX else [])])
