"""Each target of `fuzz.py`, in a process of its own, for as long as the campaign is told to, from valid inputs.

On an unexpected exception, or an input that takes 20 s or 3 GiB, libFuzzer writes the input to a file, and the test
prints it with the command that runs it again. Earlier findings are test cases of the attack's own file.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from io import BytesIO

import numpy as np
import pytest
import torch
import zstandard

from dcp_remote.format.document import unseal
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.serialization.objects import encode_object
from dcp_remote.serialization.torch_streams import save
from tests.attacks.attacker import bucket, innocent_stream
from tests.support.figures import LONG_SECONDS, count

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(0),  # as long as the campaign is told to, which may be hours
    pytest.mark.skipif(
        importlib.util.find_spec("atheris") is None, reason="atheris has wheels for Linux on x86-64 alone"
    ),
]

FUZZ = pathlib.Path(__file__).parent / "fuzz.py"
ROOT = FUZZ.parent.parent.parent

INPUT_SECONDS_MAX = 20
MEMORY_MIB_MAX = 3072


def document() -> bytes:
    return bucket().objects[MANIFEST_KEY]


def objects() -> list[object]:
    return [
        {"a": [1, 2.5, None, "ä"], "b": (1, b"x"), 3: {4, 5}},
        np.float32(2),
        np.arange(3, dtype=">i2").reshape(3, 1),
        np.random.Generator(np.random.Philox(1)),
        torch.ones(2, 2),
        torch.Size([1, 2]),
        datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=UTC),
        2**70,
    ]


def streams() -> list[bytes]:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = [1]  # type: ignore[attr-defined]  # kept by torch.save
    return [innocent_stream(), save([torch.eye(2).to_sparse(), {1, 2}, b"ab", 1j]), save(parameter)]


def programs() -> list[bytes]:
    found = []
    for stream in streams():
        with zipfile.ZipFile(BytesIO(stream)) as archive:
            found.append(archive.read("archive/data.pkl")[2:-1])
    return found


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "manifest": lambda: [document(), zstandard.ZstdCompressor().compress(document())],
    "sealed": lambda: [unseal(document())[2:]],
    "columns": lambda: [b"1:AgABAQ==", b"8:AAAAAAAAAAA=", b"2:AAABAAEA", b"4:"],
    "envelope": lambda: [zstandard.ZstdCompressor().compress(document())[4:]],
    "json": lambda: [encode_object("k", value).data for value in objects()],
    "raw": lambda: [
        b'[{"$bytes":[0,3]},{"$torch.Tensor":{"dtype":"uint8","shape":[2],"requires_grad":false,"data":[3,2]}}]\nabcde',
        b'{"$numpy.ndarray":{"dtype":"<f4","shape":[2,1],"order":"F","data":[0,8]}}\n12345678',
    ],
    "program": programs,
    "zip": streams,
    "url": lambda: [
        b"s3://bucket/prefix",
        b"file:///tmp/a%20b",
        b"memory://name",
        b"./a/../b",
        b"gs:/x",
        b"az://a@b/c",
    ],
}

WORDS = {
    "sealed": [*json.loads(unseal(document())), "checkpoint", "tombstone", "torch", "pickle", "json", "raw", "1:AA=="],
    "json": ["$tuple", "$dict", "$set", "$int", "$float", "$numpy.ndarray", "$torch.Tensor", "$Enum", "$Decimal"],
    "program": ["ctorch\\x0aSize\\x0a", "c__builtin__\\x0aset\\x0a", "\\x85R", "q\\x00h\\x00"],
}


@pytest.mark.parametrize("target", SEEDS)
def test_fuzz(target: str, torture_seconds: float, tmp_path: pathlib.Path) -> None:
    corpus, found = tmp_path / "corpus", tmp_path / "found"
    corpus.mkdir()
    found.mkdir()
    for number, seed in enumerate(SEEDS[target]()):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = tmp_path / "words"
    words.write_text("".join(f'"{word}"\n' for word in WORDS.get(target, ["a"])))
    command = [sys.executable, str(FUZZ), target, str(corpus)]
    options = {
        "max_total_time": max(1, round(torture_seconds)),
        "timeout": INPUT_SECONDS_MAX,
        "rss_limit_mb": MEMORY_MIB_MAX,
        "artifact_prefix": f"{found}/",
        "dict": words,
        "max_len": 8192,
        "print_final_stats": 1,
        "seed": 1 if torture_seconds < LONG_SECONDS else 0,  # 0: libFuzzer chooses one
    }
    done = subprocess.run(
        [*command, *(f"-{name}={value}" for name, value in options.items())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=torture_seconds + 240,
        check=False,
    )
    told = "\n".join(
        f"{path.name}: base64 {base64.b64encode(path.read_bytes()).decode()}\n"
        f"again: write it to a file, then python tests/attacks/fuzz.py {target} THAT_FILE"
        for path in sorted(found.iterdir())
    )
    assert done.returncode == 0, f"{told}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    assert not told, told
    executions = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr + done.stdout)
    assert executions is not None, done.stderr[-2000:]
    assert int(executions[1]) > len(SEEDS[target]()), "it got further than its seeds"
    count("fuzz executions", int(executions[1]))
