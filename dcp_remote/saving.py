"""What a save consists of, whoever drives it: one rank's shards, and a manifest made of all ranks' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain

import torch
from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote import manifest_json
from dcp_remote.assembly import Planned, SaveInfo, to_manifest
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, SaveFailedError, UnsupportedFormatError
from dcp_remote.manifest import Manifest, RunInfo
from dcp_remote.ranges import MiB
from dcp_remote.report import RankReport
from dcp_remote.shard import SHARD_BYTES_MAX

try:
    _WRITER = {"dcp_remote": version("dcp-remote"), "torch": str(torch.__version__)}
except PackageNotFoundError:  # copied into somebody's tree
    _WRITER = {"dcp_remote": "unknown", "torch": str(torch.__version__)}

# Shards are no larger than the budget, as one that is copied takes all of its size; but a budget below this would make
# more requests than it saves memory.
_BUDGET_BYTES_MIN = 1 * MiB


def shard_bytes_max(memory_budget_bytes: int, limit: int = SHARD_BYTES_MAX) -> int:
    """Bytes of data in a shard, under a memory budget."""
    return min(limit, max(memory_budget_bytes, _BUDGET_BYTES_MIN))


def require_unicode(plan: SavePlan) -> None:
    """Refuse names that JSON cannot say; told before anything is uploaded.

    Raises:
        InvalidArgumentError: A name has half of a surrogate pair.
    """
    flattened = plan.planner_data if isinstance(plan.planner_data, Mapping) else ()
    for name in chain((item.index.fqn for item in plan.items), flattened):
        if isinstance(name, str) and not name.isascii() and not _is_unicode(name):
            raise InvalidArgumentError(
                "A name in the state dict is not Unicode: it has half of a surrogate pair.", name=ascii(name)[:200]
            )


def assembled(
    planned: Planned,
    reports: Sequence[object],
    *,
    url: str,
    save_id: str,
    replaces: tuple[str, ...] = (),
    run: RunInfo | None = None,
    user: Mapping[str, object] | None = None,
) -> tuple[Manifest, bytes]:
    """The manifest of what all ranks wrote, and the document to be put. Called by the coordinator.

    Args:
        planned: What the checkpoint is to hold.
        reports: `RankReport`s, in the order of the ranks.
        url: Of the checkpoint, or the run, as the coordinator knows it.
        save_id: Of this save.
        replaces: Saves whose manifests this one replaces.
        run: Of a checkpoint in a run.
        user: What the user noted.

    Raises:
        InvalidArgumentError: Ranks wrote to different URLs, or with another writer; or the user's notes are no JSON.
        SaveFailedError: The reports leave a gap, or a dtype is not the planned one.
    """
    known = [report for report in reports if isinstance(report, RankReport)]
    if len(known) != len(reports):
        raise InvalidArgumentError("The results are not those of dcp_remote: ranks use different writers.")
    for report in known:
        if report.url != url:
            raise InvalidArgumentError(
                "Ranks save to different URLs at a time, so that no manifest can name what all of them wrote; "
                "nothing was committed. A name that is made of the time or of random numbers must be made on one "
                "rank; and saves that overlap need a process group each.",
                url=url,
                rank=report.rank,
                url_of_rank=report.url,
            )
    info = SaveInfo(
        save_id=save_id, replaces=replaces, created=datetime.now(UTC).isoformat(timespec="seconds"), writer=_WRITER
    )
    manifest = replace(to_manifest(planned, known, info), run=run, user=dict(user or {}))
    try:
        body = manifest_json.encode(manifest)
        # Nothing is committed that no reader takes.
        manifest_json.decode(body)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        raise SaveFailedError(
            "What the ranks wrote does not fit together; nothing was committed.", cause=error
        ) from error
    return manifest, body


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
