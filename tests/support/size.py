"""Size of the package and of its tests, and how much of the package a save and a restore execute: `make size`.

A line is code if any token but a comment or a docstring lies on it. Tokens of code are those of the tokenizer without
comments, docstrings, line ends and indentation.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import dcp_remote
from dcp_remote import CheckpointManager

ROOT = Path(__file__).parents[2]
PACKAGE = Path(dcp_remote.__file__).parent

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Size:
    """Size of some files."""

    files: int  # number of files
    lines: int  # all lines
    code_lines: int  # lines with code
    tokens: int  # tokens of code


@dataclass(frozen=True, slots=True)
class Executed:
    """Files and functions of the package that a call has executed."""

    files: int
    functions: int


def size_of(paths: Iterable[Path]) -> Size:
    """Return the size of Python files."""
    files = lines = code_lines = tokens = 0
    for path in paths:
        source = path.read_text()
        documentation = _docstring_lines(source)
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in _NO_CODE and token.start[0] not in documentation:
                tokens += 1
                code.update(range(token.start[0], token.end[0] + 1))
        files, lines, code_lines = files + 1, lines + len(source.splitlines()), code_lines + len(code)
    return Size(files, lines, code_lines, tokens)


def executed_by(call: Callable[[], object]) -> Executed:
    """Run a call, and return what it has executed of the package, in all threads that it starts."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before, before_in_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(before_in_threads)
    # Without comprehensions, lambdas and modules, whose names begin so.
    own = [one for one in codes if Path(one.co_filename).is_relative_to(PACKAGE) and not one.co_name.startswith("<")]
    return Executed(len({one.co_filename for one in own}), len(own))


def save_and_restore() -> tuple[Executed, Executed]:
    """Return what a save into a folder executes, and what a restore does, each with the manager that is made for it."""
    state = {"model": torch.nn.Linear(4, 4)}

    def save() -> None:
        with CheckpointManager(folder) as checkpoints:
            checkpoints.save(1, state, wait=True)

    def restore() -> None:
        with CheckpointManager(folder) as checkpoints:
            checkpoints.restore(state)

    with tempfile.TemporaryDirectory() as folder:
        return executed_by(save), executed_by(restore)


def main() -> None:
    """Print the table."""
    package, tests = size_of(sorted(PACKAGE.rglob("*.py"))), size_of(sorted((ROOT / "tests").rglob("*.py")))
    save, restore = save_and_restore()
    parameters = len(inspect.signature(CheckpointManager).parameters)
    rows = [
        ("package: files", f"{package.files:,}"),
        ("package: lines; of code", f"{package.lines:,}; {package.code_lines:,}"),
        ("package: tokens of code", f"{package.tokens:,}"),
        ("a save into a folder executes: files; functions", f"{save.files}; {save.functions}"),
        ("a restore executes: files; functions", f"{restore.files}; {restore.functions}"),
        ("parameters of CheckpointManager", f"{parameters}"),
        ("tests: files", f"{tests.files:,}"),
        ("tests: lines; of code", f"{tests.lines:,}; {tests.code_lines:,}"),
    ]
    for name, value in rows:
        sys.stdout.write(f"{name:50} {value:>20}\n")


def _docstring_lines(source: str) -> set[int]:
    """Return the numbers of the lines on which docstrings lie."""
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            numbers.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return numbers


if __name__ == "__main__":
    main()
