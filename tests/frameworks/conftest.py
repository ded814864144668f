"""Fixtures of the tests with real frameworks: run by `make test-frameworks`, which installs them.

The programs in `programs/` are users' scripts. Ranks run in a folder of their own, and no test may leave a folder named
as a URL in it: `s3:` is where frameworks write that take a URL for a path.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks, run_ranks

PROGRAMS = Path(__file__).parent / "programs"

# Without its framework a file cannot be imported: `make test` installs none, and no environment has all.
_FRAMEWORKS = {"test_axolotl.py": "axolotl", "test_llamafactory.py": "llamafactory"}
_FILES = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))
collect_ignore = [name for name in _FILES if find_spec(_FRAMEWORKS.get(name, "deepspeed")) is None]


@pytest.fixture
def bucket_url(s3_server: S3Server) -> str:
    """Return the URL of a bucket of this test."""
    name = f"frameworks-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def program_environment(s3_server: S3Server) -> dict[str, str]:
    """Return the variables by which programs find the server, so that they pass a URL alone."""
    environment = {
        "AWS_ENDPOINT_URL": s3_server.endpoint_url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    # DeepSpeed compiles an extension in its first run, for a minute or two: kept, where the caller names a folder.
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    return environment | ({"TORCH_EXTENSIONS_DIR": extensions} if extensions else {})


@pytest.fixture(scope="session")
def run_program_in(program_environment: dict[str, str]) -> Callable[..., Ranks]:
    """Return a function that runs a program of `programs/`: `run_program_in(folder, "x.py", 2, *arguments)`.

    Keyword arguments are those of `run_ranks`. No folder that is named as a URL may lie in `folder` afterwards.
    """

    def run(folder: Path, program: str, world_size: int, *arguments: object, **options: Any) -> Ranks:
        options["environment"] = program_environment | dict(options.get("environment") or {})
        ranks = run_ranks(PROGRAMS / program, world_size, *arguments, folder=folder, **options)
        named_as_urls = [path for path in folder.rglob("*:") if path.is_dir()]
        assert not named_as_urls, "A framework took a URL for a path of a folder."
        return ranks

    return run


@pytest.fixture
def run_program(run_program_in: Callable[..., Ranks], tmp_path: Path) -> Callable[..., Ranks]:
    """Return a function that runs a program in the test's folder: `run_program("x.py", 2, *arguments)`."""
    return functools.partial(run_program_in, tmp_path)
