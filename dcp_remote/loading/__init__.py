"""Reads of checkpoints: which ranges are fetched, how they are verified, and where their bytes go.

- load: `dcp_remote.load`, without a template; run_handle: `dcp_remote.open_run`, the run as one process sees it.
- engine: fetches by downloads what read_plan asks for, verifies it, and hands it to targets.
- read_items: makes targets of the items of torch's load plan.
- shared_read_plan, peers, peer_sockets, read_rates: ranks of a group read once what several of them want.
- load_options, planner, state_check: which entries are loaded, under which names, and one error for what does not fit.
- overlapping_templates, dcp_metadata: what torch's planner and readers need.
"""

from __future__ import annotations

__all__ = [
    "dcp_metadata",
    "downloads",
    "engine",
    "load",
    "load_options",
    "overlapping_templates",
    "peer_sockets",
    "peers",
    "planner",
    "read_items",
    "read_plan",
    "run_handle",
    "shared_read_plan",
    "state_check",
    "targets",
]
