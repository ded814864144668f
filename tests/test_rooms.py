"""The rooms of the house: a file imports only from files above it, and what stands above the line knows no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dcp_remote"
LINE = "--- no torch above this line ---"

# One line per file, top to bottom. A new file gets a line here, or the tests fail.
ROOMS = [
    "errors",
    "terminal",
    "url",
    "ranges",
    "storage.base",
    "storage.landing",
    "storage.memory",
    "storage.mounts",
    "storage.files",
    "storage.local",
    "storage.wrapper",
    "storage.rereads",
    "storage.counting",
    "storage.time_left",
    "storage.retrying",
    "storage.conditional_writes",
    "storage.timeouts",
    "storage.cloud_options",
    "storage.s3_place",
    "storage.cloud_configs",
    "storage.budget",
    "storage.pace",
    "storage.connecting",
    "storage.streams",
    "storage.direct_reads",
    "storage.circuit_breaker",
    "storage.redaction",
    "storage.cloud_errors",
    "storage.diagnosis",
    "storage.cloud_credentials",
    "storage.cloud_clients",
    "storage.cloud_failures",
    "storage.cloud",
    "storage.fsspec_client",
    "storage.fsspec",
    "storage.__init__",
    "dtypes",
    "digests",
    "columns",
    "tiling",
    "shard",
    "envelope",
    "manifest",
    "manifest_check",
    "manifest_json",
    "report",
    "empty_dicts",
    "assembly",
    "plan_table",
    "dedup",
    "packing",
    "turns",
    "transfer",
    "pending",
    "uploads",
    "downloads",
    "read_plan",
    "sharing",
    "peer_sockets",
    "peers",
    "exchange",
    "commit",
    "catalog",
    "catalog_json",
    "catalog_store",
    "run_names",
    "checkpoint",
    "gc",
    "retention",
    "names",
    "thinning",
    "named",
    "leftovers",
    "upkeep",
    "tidying",
    "run_gc",
    "recover",
    "run",
    "run_save",
    "run_checkpoints",
    "reading",
    "object_raw",
    "object_tree",
    "object_text",
    "reports",
    "progress",
    "telemetry",
    # The benchmark's server.
    "bench.__init__",
    "bench.shape",
    "bench.counts",
    "bench.space",
    "bench.request",
    "bench.checksums",
    "bench.objects",
    "bench.reply",
    "bench.wire",
    "bench.body",
    "bench.operations",
    "bench.service",
    "bench.connection",
    "bench.certificates",
    "bench.server",
    "bench.raw",
    # And what is made of its figures.
    "bench.plan",
    "bench.rows",
    "bench.goals",
    "bench.tables",
    "bench.chart",
    "bench.publish",
    # What a user's bucket gives.
    "bench.findings",
    "bench.probe",
    "cli.bench",
    "cli.show",
    "cli.gc",
    "cli.ls",
    "cli.rm",
    "cli.pin",
    "cli.recover",
    "cli.main",
    "cli.__init__",
    LINE,
    "object_tags",
    "object_classes",
    "object_numpy",
    "object_torch",
    "object_program",
    "object_streams",
    "objects",
    "serialization",
    "devices",
    "chunk_list",
    "dcp_metadata",
    "crossing",
    "location",
    "text_keys",
    "plans",
    "save_items",
    "shard_writer",
    "saving",
    "writer",
    "targets",
    "aliases",
    "per_rank",
    "loading",
    "reader",
    "random_states",
    "staging",
    "helper_thread",
    "key_value",
    "pulse",
    "party",
    "joint_keys",
    "ending",
    "roll_call",
    "joint",
    "ranks",
    "preemption",
    "desk",
    "save_rank",
    "load_rank",
    "flight",
    "flights",
    "at_exit",
    "manager",
    "__init__",
    # The benchmark.
    "bench.state",
    "bench.clients",
    "bench.training",
    "bench.worker",
    "bench.processes",
    # Shipped for whoever writes a store: nothing above imports it.
    "testing.wrappers",
    "testing.servers",
    "testing.ceph",
    "testing.store_suite",
    "testing.ranks",
    "testing.rank_pool",
    "testing.__init__",
    # Of many ranks in one process; and what runs Ceph.
    "bench.scale",
    "bench.ceph",
    "bench.run",
]

# Who may know these: everybody else speaks to `ObjectStore`, and a run on a local folder loads none of them.
CLIENTS = {"obstore", "boto3", "botocore"}
ROOMS_WITH_CLIENTS = {
    "bench.clients",
    "storage.cloud",
    "storage.cloud_credentials",
    "storage.cloud_clients",
    "storage.cloud_configs",
    "storage.redaction",
    "storage.cloud_errors",
    "storage.cloud_failures",
    "storage.diagnosis",
    "storage.fsspec",
    "storage.fsspec_client",
    "storage.s3_place",
    "testing.servers",
    "testing.ceph",
}


# Every file of the package, by its name above.
FILES = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in sorted(PACKAGE.rglob("*.py"))]


def imports(room: str) -> set[str]:
    """What a file imports, at its top, in functions and for types alone: rooms, and full names of other modules."""
    tree = ast.parse((PACKAGE / (room.replace(".", "/") + ".py")).read_bytes())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(_room(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {room}, line {node.lineno}"
            # `from dcp_remote import manifest` imports a file, `from dcp_remote.manifest import Manifest` does, too.
            found.update(_room(f"{node.module}.{alias.name}") for alias in node.names)
    return found


def _room(module: str) -> str:
    package, *parts = module.split(".")
    if package != PACKAGE.name:
        return f"Python's {module}" if module in FILES else module  # `gc` is theirs and ours
    for name in (".".join(parts), ".".join([*parts, "__init__"])):
        if name in FILES or name in ROOMS:
            return name
    return _room(".".join([package, *parts[:-1]]))  # the last part is a name in a file


def above_the_line() -> list[str]:
    return ROOMS[: ROOMS.index(LINE)]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_table_and_package_hold_the_same_files() -> None:
    """A file without a line, and a line without a file, are named."""
    assert set(FILES) - set(ROOMS) == set(), "files without a line in ROOMS"
    assert set(ROOMS) - {LINE} - set(FILES) == set(), "lines of ROOMS without a file"
    assert len(ROOMS) == len(set(ROOMS))


@pytest.mark.parametrize("room", sorted(set(FILES) & set(ROOMS)))
def test_file_imports_only_from_rooms_above_it(room: str) -> None:
    """Read from the syntax tree, so that an import inside a function counts as well."""
    above = set(ROOMS[: ROOMS.index(room)])
    assert (imports(room) & set(FILES)) - above == set()


@pytest.mark.parametrize("room", sorted(set(FILES) & set(above_the_line())))
def test_no_import_of_torch_above_the_line(room: str) -> None:
    """Read from the syntax tree: not even for types, or inside a function."""
    assert not {name for name in imports(room) if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("room", sorted(set(FILES) - ROOMS_WITH_CLIENTS))
def test_only_the_cloud_rooms_know_the_cloud(room: str) -> None:
    """Read from the syntax tree."""
    assert not {name for name in imports(room) if name.split(".")[0] in CLIENTS}


def test_torch_is_not_loaded_by_what_stands_above_the_line() -> None:
    """All of it imported into a fresh interpreter, since a library of others might bring torch along."""
    modules = [f"dcp_remote.{room}".removesuffix(".__init__") for room in above_the_line() if room in set(FILES)]
    assert run(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)") == "False"


def test_local_storage_loads_no_cloud_client() -> None:
    """A store of a folder, opened in a fresh interpreter: obstore and boto3 cost half a second, and may be broken."""
    code = "import sys; from dcp_remote.storage import open_store; open_store('/nowhere')"
    assert run(f"{code}; print(sorted({CLIENTS!r} & set(sys.modules)))") == "[]"


def test_imports_are_resolved_to_files() -> None:
    """The reader of imports, on each form: a package, a file, a name in either, another library."""
    assert _room("dcp_remote") == "__init__"
    assert _room("dcp_remote.storage") == "storage.__init__"
    assert _room("dcp_remote.storage.base") == "storage.base"
    assert _room("dcp_remote.storage.base.ObjectStore") == "storage.base"
    assert _room("dcp_remote.storage.open_store") == "storage.__init__"
    assert _room("dcp_remote.errors") == "errors"
    assert _room("torch.distributed.checkpoint") == "torch.distributed.checkpoint"
