"""Package as it is shipped and installed: the wheel, its metadata, and the Makefile on poor machines."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dcp_remote
from tests.support import release
from tests.support.release import ROOT, copy_for_release, tracked_files, with_absolute_links

# Of a host that cannot exist (RFC 2606).
REPOSITORY = "https://host.invalid/owner/name"

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
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what `make dist` builds, `source`, and what came of it: the sdist, unpacked, and in it the wheel.

    Built with the setuptools that is here: no network.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("a release is built from what git tracks")
    folder = tmp_path_factory.mktemp("release")
    copy_for_release(folder / "source", REPOSITORY)
    for kind, place in (("sdist", folder / "source"), ("wheel", folder / "unpacked")):
        build = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
        subprocess.run([sys.executable, "-c", build], cwd=place, check=True, capture_output=True, timeout=60)
        if kind == "sdist":
            (path,) = (place / "dist").glob("*.tar.gz")
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
            (folder / path.name.removesuffix(".tar.gz")).rename(folder / "unpacked")
    return folder


@pytest.fixture(scope="module")
def wheel(released: Path) -> zipfile.ZipFile:
    """Built from the sdist."""
    (path,) = (released / "unpacked" / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
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
    assert not [name for name in sources if "bench" in name and name != "dcp_remote/cli/bench.py"]


def test_sdist_holds_the_repository(released: Path) -> None:
    """Its files against git's, byte by byte: what the tests need; README and pyproject.toml as they are released."""
    tracked, unpacked = tracked_files(), released / "unpacked"
    assert [name for name in tracked if not (unpacked / name).is_file()] == []
    held = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    made = {"PKG-INFO", "setup.cfg", "dcp_remote.egg-info"} | {"build", "dist"}  # of setuptools; of the wheel's build
    assert {name.partition("/")[0] for name in held - {*tracked}} <= made
    changed = {name for name in tracked if (unpacked / name).read_bytes() != (ROOT / name).read_bytes()}
    assert changed == {"README.md", "pyproject.toml"}


# Imports every module that needs no framework and no pytest; then saves and loads.
IN_A_CLEAN_ENVIRONMENT = """
import importlib, pkgutil, sys, torch, dcp_remote
assert dcp_remote.__file__.startswith(sys.prefix), dcp_remote.__file__
modules = [module.name for module in pkgutil.walk_packages(dcp_remote.__path__, "dcp_remote.")]
for name in modules:
    if not name.startswith(("dcp_remote.integrations.", "dcp_remote.testing.")):
        importlib.import_module(name)
state = {"weight": torch.arange(6.0)}
with dcp_remote.CheckpointManager("run") as checkpoints:
    checkpoints.save(1, state)
    state["weight"].zero_()
    assert checkpoints.restore(state) == 1
assert state["weight"].tolist() == [0, 1, 2, 3, 4, 5]
"""


def requirements_of(name: str) -> set[str]:
    """Return the names of the distributions that a distribution needs, itself among them; none of its extras."""
    found, names = set(), [name]
    while names:
        try:
            distribution = importlib.metadata.distribution(names.pop())
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        if distribution.name not in found:
            found.add(distribution.name)
            needed = [line for line in distribution.requires or [] if "extra ==" not in line]
            names += [re.split(r"[^\w.-]", line)[0] for line in needed]
    return found


def test_wheel_works_in_a_clean_environment(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """It is installed by pip beside its requirements alone, which are links to those that are here: no network."""
    environment, python = tmp_path / "environment", tmp_path / "environment" / "bin" / "python"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    for name in requirements_of("dcp-remote") - {"dcp-remote"}:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}

    def run(*command: str | Path) -> str:
        result = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    run(*pip, str(wheel.filename))
    run(python, "-c", IN_A_CLEAN_ENVIRONMENT)
    assert "1 checkpoint" in run(environment / "bin" / "dcp-remote", "ls", "run")


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


def test_links_of_the_package_s_page_lead_to_the_repository(wheel: zipfile.ZipFile) -> None:
    """Project URLs, and the description: no link or picture is relative, and each leads to a file that git tracks."""
    metadata = HeaderParser().parsestr(wheel.read(f"dcp_remote-{project()['version']}.dist-info/METADATA").decode())
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert (urls["Homepage"], urls["Issues"]) == (REPOSITORY, f"{REPOSITORY}/issues")
    assert "\n## Documentation\n" in (ROOT / "README.md").read_text()

    assert metadata["Description-Content-Type"] == "text/markdown"
    tracked = tracked_files()
    text = re.sub(r"^```.*?^```$", "", str(metadata.get_payload()), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]: (.*)$|(?:href|src)=\"([^\"]*)\"", text, re.MULTILINE)
    links = ["".join(groups) for groups in targets]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert len(links) > 30
    place = re.compile(rf"{re.escape(REPOSITORY)}/(blob|raw)/v{re.escape(project()['version'])}/([^#]+)(?:#\S+)?")
    for link in [urls["Documentation"], urls["Changelog"], *(link for link in links if link.startswith(REPOSITORY))]:
        found = place.fullmatch(link)
        assert found, link
        assert found[2] in tracked
        assert (found[1] == "raw") == found[2].endswith((".png", ".svg"))


def test_links_are_made_absolute() -> None:
    """Relative links, pictures and references; not addresses, anchors of the page, and code."""
    before = (
        "[a](docs/a.md#b) [`c`](d.py) ![e](f.png) [![g](h.svg)](i.md) [j](#k) [l](https://m.invalid/n) `[o](p.md)`\n"
        "[q]: r.md\n[s]: https://t.invalid\n```python\n[u](v.md)\n```\n[w](x.md 'y')\n"
    )
    at = "https://host.invalid/owner/name/{}/v1/"
    blob, raw = at.format("blob"), at.format("raw")
    after = (
        f"[a]({blob}docs/a.md#b) [`c`]({blob}d.py) ![e]({raw}f.png) [![g]({raw}h.svg)]({blob}i.md) [j](#k) "
        "[l](https://m.invalid/n) `[o](p.md)`\n"
        f"[q]: {blob}r.md\n[s]: https://t.invalid\n```python\n[u](v.md)\n```\n[w]({blob}x.md 'y')\n"
    )
    assert with_absolute_links(before, REPOSITORY, "v1") == after


@pytest.mark.parametrize("address", ["", "http://host.invalid/owner/name", "https://host.invalid"])
def test_release_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(SystemExit, match="https://host/owner/name"):
        release.main(address)


def test_classifiers_name_what_was_run() -> None:
    """The first paragraph of docs/tested.md names the versions of Python that classifiers name; only Linux was run."""
    run = (ROOT / "docs" / "tested.md").read_text().partition("**Run**")[2].partition("\n\n")[0]
    classifiers = project()["classifiers"]
    assert [name for name in classifiers if "Operating System" in name] == ["Operating System :: POSIX :: Linux"]
    versions = {name.rpartition(" ")[2] for name in classifiers if re.fullmatch(r".*:: \d\.\d+", name)}
    assert versions == set(re.findall(r"Python (\d\.\d+)", run))


def test_version_is_the_project_s() -> None:
    """An editable install goes stale when one forgets; and every public name is imported on first use."""
    assert importlib.metadata.version("dcp-remote") == dcp_remote.__version__ == project()["version"]
    assert dir(dcp_remote) == sorted(dcp_remote.__all__)
    assert all(getattr(dcp_remote, name) is not None for name in dcp_remote.__all__)
    assert dcp_remote.SaveReport.__name__ == "SaveReport"


def test_an_old_torch_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence at the first use of a name that needs torch, imported or not; the minimum is the project's."""
    (minimum,) = filter(None, (re.match(r"torch>=(\d+)\.(\d+)", needed) for needed in project()["dependencies"]))
    assert tuple(map(int, minimum.groups())) == dcp_remote._TORCH_MIN
    needed = ".".join(minimum.groups())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.4.1+cu121"))
    with pytest.raises(ImportError, match=rf"needs torch {needed} or newer, and torch 2\.4\.1\+cu121 is installed\."):
        _ = dcp_remote.CheckpointManager
    assert callable(dcp_remote.latest)  # needs no torch
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.13.0")
    with pytest.raises(ImportError, match=r"torch 1\.13\.0 is installed"):
        _ = dcp_remote.CheckpointManager
    for known in ("2.9.0a0+git1234", "2.13.1", "3.0"):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=known))
        assert callable(dcp_remote.CheckpointManager)


def test_development_tools_are_pinned_and_the_rest_is_not() -> None:
    """Requirements of users have lower bounds alone, so that they install beside a framework's own pins."""
    extras: dict[str, list[str]] = project()["optional-dependencies"]
    pinned = extras.pop("dev") + extras.pop("dist") + extras.pop("docs")
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
    kept_back = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "REPOSITORY"}
    environment = {name: value for name, value in os.environ.items() if name not in kept_back}
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
def test_make_dist_asks_for_the_repository(clone: Path) -> None:
    """In one line, before anything is installed."""
    result = make(clone, FAKE_PYTHON, target="dist")
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert "make dist REPOSITORY=https://host/owner/name" in line
    assert not (clone / ".venv").exists()


@needs_make
def test_make_alone_shows_the_targets(clone: Path) -> None:
    result = make(clone, OLD_PYTHON, target="help")
    assert result.returncode == 0
    assert {line.split()[1] for line in result.stdout.splitlines()} >= {"install", "lint", "typecheck", "test", "demo"}
    assert not (clone / ".venv").exists()
