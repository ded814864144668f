"""What is shipped, and how it is installed: the wheel, its metadata, and the Makefile on poor machines."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

import dcp_remote

ROOT = Path(__file__).parent.parent

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not on PATH")

# Stands for python3.11 and for the python of .venv: notes what it is asked, makes .venv from itself, and knows no torch
# but from PyTorch's own index.
FAKE_PYTHON = """#!/bin/sh
echo "$*" >> asked.txt
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"install --no-deps --index-url"*) ;;
    *"install --no-deps"*) exit 1 ;;
esac
"""

OLD_PYTHON = "#!/bin/sh\nexit 1\n"

# Debian's python3 without python3-venv.
PYTHON_WITHOUT_VENV = """#!/bin/sh
case "$*" in *ensurepip*) exit 1 ;; esac
"""


def project() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return settings


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, as setuptools leaves a build folder, and with the setuptools that is here: no network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "dcp_remote", source / "dcp_remote", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=60)
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Its list of files against the folder's."""
    package = ROOT / "dcp_remote"
    sources = {
        f"dcp_remote/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert {"dcp_remote/py.typed", "dcp_remote/format/FORMAT.md", "dcp_remote/__init__.py"} <= sources
    information = f"dcp_remote-{project()['version']}.dist-info/"
    assert {name for name in wheel.namelist() if not name.startswith(information)} == sources
    assert f"{information}licenses/LICENSE" in wheel.namelist()
    assert not [name for name in sources if "bench" in name and not name.startswith("dcp_remote/cli/")]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what git holds")
def test_sdist_holds_the_repository(tmp_path: Path) -> None:
    """Its list of files against git's; built from a copy of those."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    (path,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert names - held == set()


def test_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    """Its metadata, and the command that it installs, which must be there to be called."""
    information = f"dcp_remote-{project()['version']}.dist-info"
    metadata = HeaderParser().parsestr(wheel.read(f"{information}/METADATA").decode())
    assert metadata["Name"] == "dcp-remote"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"s3fs", "demo", "bench", "otel", "dev"}

    commands = configparser.ConfigParser()
    commands.read_string(wheel.read(f"{information}/entry_points.txt").decode())
    module, _, function = commands["console_scripts"]["dcp-remote"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_installed_version_is_the_project_s() -> None:
    """What `pip show` and a manifest say, against pyproject.toml: an editable install goes stale when one forgets."""
    assert importlib.metadata.version("dcp-remote") == project()["version"]


def test_version_is_the_installation_s() -> None:
    """Read the version, and import every public name on first use."""
    assert dcp_remote.__version__ == project()["version"]
    assert dir(dcp_remote) == sorted(dcp_remote.__all__)
    assert all(getattr(dcp_remote, name) is not None for name in dcp_remote.__all__)
    assert {name.__name__ for name in (dcp_remote.SaveReport, dcp_remote.LoadReport, dcp_remote.CheckpointInfo)} == {
        "SaveReport",
        "LoadReport",
        "CheckpointInfo",
    }


def test_import_loads_no_torch() -> None:
    """In a fresh interpreter: `import dcp_remote` takes milliseconds, and the first use of the writer loads torch."""
    code = "import sys, dcp_remote; print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"


def test_development_tools_are_pinned_and_the_rest_is_not() -> None:
    """Requirements of users have lower bounds alone, so that they install beside a framework's own pins."""
    extras: dict[str, list[str]] = project()["optional-dependencies"]
    pinned = extras.pop("dev") + extras.pop("docs")
    tools = [requirement for requirement in pinned if not requirement.startswith("dcp-remote[")]
    assert all("==" in requirement for requirement in tools)
    for requirement in [*project()["dependencies"], *(r for extra in extras.values() for r in extra)]:
        assert ">=" in requirement or requirement.startswith("dcp-remote["), requirement
        assert not {"==", "<", "~"} & {requirement[i : i + width] for i in range(len(requirement)) for width in (1, 2)}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what `make install` reads."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(clone: Path, python: str, *, target: str = "install") -> subprocess.CompletedProcess[str]:
    """`make` with a Python that is this script."""
    script = clone / "python3.11"
    script.write_text(python)
    script.chmod(0o755)
    # Of a make that may have started these tests nothing is handed on.
    environment = {
        name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    }
    return subprocess.run(
        ["make", f"BASE_PYTHONS={script}", target],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_make
@pytest.mark.parametrize(
    ("python", "advice"),
    [(OLD_PYTHON, "needs Python 3.11 or newer"), (PYTHON_WITHOUT_VENV, "apt install python3-venv")],
)
def test_make_says_what_the_machine_lacks(clone: Path, python: str, advice: str) -> None:
    """An old Python, and one without ensurepip, which Debian ships apart: nothing is made, and the way out is named."""
    result = make(clone, python)
    assert result.returncode != 0
    assert advice in result.stderr
    assert not (clone / ".venv").exists()


@needs_make
@pytest.mark.skipif(platform.system() == "Darwin", reason="macOS takes the plain torch, from anywhere")
def test_make_takes_torch_s_cpu_build_and_installs_once(clone: Path) -> None:
    """A Python that notes what it is asked: the CPU build from two places, one resolve, again after a change alone."""
    result = make(clone, FAKE_PYTHON)
    assert result.returncode == 0, result.stderr
    asked = (clone / "asked.txt").read_text().splitlines()
    first, second, everything = [line for line in asked if " install " in line]
    assert first.endswith("install --no-deps torch==2.13.0+cpu")
    assert second.endswith("install --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu")
    assert everything.endswith("install torch==2.13.0+cpu --editable .[dev]")

    assert make(clone, FAKE_PYTHON).returncode == 0
    assert (clone / "asked.txt").read_text().splitlines() == asked, "installed again without need"

    stamp = (clone / ".venv" / ".installed").stat()
    os.utime(clone / "pyproject.toml", ns=(stamp.st_mtime_ns + 10**9, stamp.st_mtime_ns + 10**9))
    assert make(clone, FAKE_PYTHON).returncode == 0
    assert len((clone / "asked.txt").read_text().splitlines()) > len(asked)


@needs_make
def test_make_alone_shows_the_targets(clone: Path) -> None:
    """And makes nothing."""
    result = make(clone, OLD_PYTHON, target="help")
    assert result.returncode == 0
    assert {line.split()[1] for line in result.stdout.splitlines()} >= {"install", "lint", "typecheck", "test", "demo"}
    assert not (clone / ".venv").exists()
