"""The packages of dcp_remote: which may import which, which know torch, and which know the clients of the clouds."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dcp_remote"

# By package or module of `dcp_remote`: the others that it may import, beside itself. The table of ARCHITECTURE.md.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "common": {"errors"},
    "storage": {"errors", "common"},
    "format": {"errors", "common"},
    "run": {"errors", "common", "format", "storage"},
    "cli": {"errors", "common", "format", "storage", "run"},
    "launch": {"errors", "common", "storage"},
    "serialization": {"errors", "common", "format"},
    "coordination": {"errors", "common"},
    "saving": {"errors", "common", "format", "storage", "serialization"},
    "loading": {"errors", "common", "format", "storage", "serialization", "run"},
    "writer": {"errors", "common", "format", "storage", "run", "serialization", "coordination", "saving", "loading"},
    "reader": {"errors", "common", "format", "storage", "run", "serialization", "coordination", "saving", "loading"},
    "manager": {
        *("errors", "common", "format", "storage", "run", "serialization", "coordination", "saving", "loading"),
        *("writer", "reader"),
    },
    "transfer": {
        *("errors", "common", "format", "storage", "run", "serialization", "coordination", "saving", "loading"),
        "manager",
    },
    "testing": {"errors", "common", "storage"},
    # The public API, as its users import it: `from dcp_remote import …`, `from dcp_remote.errors import …`.
    "integrations": {"errors", "__init__", "common"},
}

# Imports below the line, when a command runs and not before: those that move checkpoints, read their values, or meet
# other ranks under torchrun.
IMPORTED_IN_A_FUNCTION = {
    ("cli.transfer", "transfer.__init__"),
    ("cli.doctor", "manager.rank_checks"),
    ("cli.diff", "loading.value_differences"),
}

# These import no torch, not even for types: the command line starts without it.
WITHOUT_TORCH = {"errors", "common", "storage", "format", "run", "cli", "launch"}

# Who may know these: everybody else speaks to `ObjectStore`, and a run on a local folder loads none of them.
CLIENTS = {"obstore", "boto3", "botocore"}
KNOW_CLIENTS = ("storage.cloud.", "storage.fsspec", "testing.servers")

ENTRIES_MAX = 18

# Every module of the package, by its name below `dcp_remote`.
MODULES = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in sorted(PACKAGE.rglob("*.py"))]
PLACED = [module for module in MODULES if module != "__init__"]


def imports(module: str) -> set[str]:
    """Modules of dcp_remote, and full names of others, that a module imports: at its top, in functions, for types."""
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_bytes())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(resolved(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {module}, line {node.lineno}"
            # `from dcp_remote.format import manifest` imports a file, and so does `... .manifest import Manifest`.
            found.update(resolved(f"{node.module}.{alias.name}") for alias in node.names)
    return found


def resolved(name: str) -> str:
    """The module of dcp_remote that holds a full name; the name itself if it is of another library."""
    package, *parts = name.split(".")
    if package != PACKAGE.name:
        return name
    for known in (".".join(parts), ".".join([*parts, "__init__"])):
        if known in MODULES:
            return known
    return resolved(".".join([package, *parts[:-1]]))  # the last part is a name in a module


def test_every_module_has_a_package() -> None:
    """A module or package that the table does not name is a module that nobody will find."""
    entries = {module.split(".", 1)[0] for module in MODULES} - {"__init__"}
    assert entries == set(MAY_IMPORT)
    assert len(entries) < ENTRIES_MAX  # and `__init__`


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", PLACED)
def test_imports_are_those_of_the_table(module: str) -> None:
    """Read from the syntax tree, so that an import inside a function counts as well."""
    package = module.split(".", 1)[0]
    names = {name for name in imports(module) if name in MODULES and (module, name) not in IMPORTED_IN_A_FUNCTION}
    packages = {name.split(".")[0] for name in names}
    assert packages - MAY_IMPORT[package] - {package} == set()


@pytest.mark.parametrize(("module", "name"), sorted(IMPORTED_IN_A_FUNCTION))
def test_exceptions_are_imported_in_functions(module: str, name: str) -> None:
    """The module imports the name, and not at its top."""
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_bytes())
    top = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.col_offset == 0]
    assert name in imports(module)
    assert not [node for node in top if resolved(str(node.module)) == name]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """The graph of all imports has an order."""
    graph = {module: {name for name in imports(module) if name in MODULES} for module in MODULES}
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", [module for module in PLACED if module.split(".")[0] in WITHOUT_TORCH])
def test_no_import_of_torch_above_the_line(module: str) -> None:
    """Read from the syntax tree: not even for types, or inside a function."""
    assert not {name for name in imports(module) if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("module", [module for module in PLACED if not module.startswith(KNOW_CLIENTS)])
def test_only_the_clouds_know_their_clients(module: str) -> None:
    """Read from the syntax tree."""
    assert not {name for name in imports(module) if name.split(".")[0] in CLIENTS}


def test_torch_is_not_loaded_above_the_line() -> None:
    """All of it imported into a fresh interpreter, since a library of others might bring torch along."""
    modules = [f"dcp_remote.{name}".removesuffix(".__init__") for name in PLACED if name.split(".")[0] in WITHOUT_TORCH]
    assert run(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)") == "False"


def test_local_storage_loads_no_cloud_client() -> None:
    """A store of a folder, opened in a fresh interpreter: obstore and boto3 cost half a second, and may be broken."""
    code = "import sys; from dcp_remote.storage import open_store; open_store('/nowhere')"
    assert run(f"{code}; print(sorted({CLIENTS!r} & set(sys.modules)))") == "[]"
