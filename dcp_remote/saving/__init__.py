"""Save a state: plan, stage, pack, deduplicate, upload, report, and assemble the manifest.

plan_cache and plan_table decide which rank writes what; rank_differences refuses tensors, and reports objects, that
differ between ranks; staging copies the state for a background save; write_items, dedup and packing turn a rank's plan
into shards; shard_content makes their bytes and digests (device_copy copies tensors to the host); shard_writer and
uploads send the shards; rank_report describes what was sent; manifest_assembly and dcp_metadata build the manifest from
the plan and the reports.
"""

from __future__ import annotations

__all__ = [
    "dcp_metadata",
    "dedup",
    "device_copy",
    "manifest_assembly",
    "packing",
    "plan_cache",
    "plan_table",
    "rank_differences",
    "rank_report",
    "shard_content",
    "shard_writer",
    "staging",
    "uploads",
    "write_items",
]
