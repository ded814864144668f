"""Power of the tests: small faults that are put into the package, one at a time, and the tests that find them.

    make mutants                                         # at first: which tests execute what; then 400 faults
    python -m tests.support.mutants --compare OLD NEW

The faults are drawn from all places in functions of the package, by a seed: an operator, a constant or a condition is
another one, or a statement is missing. Of each fault, the tests run that execute its function, in this process or in
one that they start, the fast ones first, until one fails. Results are lines of JSON in `mutants-output`; a run that was
ended goes on with the faults that have no result. Takes about two hours on two cores, and is no part of CI.

After a change of the tests: the faults that were found before must be found again. A fault keeps its name as long as
its function and its source do, so that two versions of the package can be compared, too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.support.executed import FOLDER_NAME, NUMBER_NAME, Numbers, note

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "mutants-output"

_OTHER_COMPARISON: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OTHER_OPERATOR: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}

# Time of the tests of one fault, in seconds, and how much longer than usual a test may take before it counts as failed.
_BUDGET_SECONDS = 90.0
_SLOWER_FACTOR, _MORE_SECONDS = 4, 60.0

# As in `make test`; in one process, and without what is written for the next run.
_OPTIONS = ["--smoke", "--quiet", "-p", "no:cacheprovider", "--ignore", "tests/hosts"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """Fault at one place of the package.

    Attributes:
        name: Path, function, kind and source of the place, and the number among equal ones in the function.
        path: Path of the file, relative to the root.
        function: Qualified name of the function.
        begin: Line, from 1, and byte of the line at which the source is replaced.
        end: Line and byte at which the replaced source ends.
        replacement: What stands there instead.
    """

    name: str
    path: str
    function: str
    begin: tuple[int, int]
    end: tuple[int, int]
    replacement: str

    def apply(self, source: str) -> str:
        """Return the source of the file with the fault."""
        lines = source.encode().splitlines(keepends=True)
        (first, first_byte), (last, last_byte) = self.begin, self.end
        before, after = lines[first - 1][:first_byte], lines[last - 1][last_byte:]
        changed = before + self.replacement.encode() + after
        return b"".join([*lines[: first - 1], changed, *lines[last:]]).decode()


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one fault.

    Attributes:
        name: Name of the fault.
        killer: Test that has found the fault; "timeout" if the tests did not end; None if no test has found it.
        tests: Number of tests that were chosen.
        seconds: Duration.
    """

    name: str
    killer: str | None
    tests: int
    seconds: float


class _Places(ast.NodeVisitor):
    """All places of a file at which a fault can be."""

    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._path, self._source = path, source
        self._names: list[str] = []
        self._is_function: list[bool] = []
        self._counts: Counter[str] = Counter()
        self.visit(ast.parse(source))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node.name, node.body, is_function=False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node.name, node.body, is_function=True)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave out what only says what is true anyway."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            other = ast.Compare(node.left, [_OTHER_COMPARISON[type(node.ops[0])]()], node.comparators)
            self._add("comparison", node, other)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._add("and/or", node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("not", node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        # A text that is joined from two parts is most likely a message.
        if type(node.op) in _OTHER_OPERATOR and not any(isinstance(one, ast.JoinedStr) for one in ast.walk(node)):
            self._add("operator", node, ast.BinOp(node.left, _OTHER_OPERATOR[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, ast.Constant(not node.value))
        elif isinstance(node.value, int):
            self._add("constant", node, ast.Constant(node.value + 1))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add("choice", node, ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out texts."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("raise", node, ast.Pass())

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement", node, ast.Pass())
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not ast.unparse(node.value.func).startswith("logger"):
            self._add("statement", node, ast.Pass())
            self.generic_visit(node)

    def _enter(self, name: str, body: Sequence[ast.stmt], *, is_function: bool) -> None:
        """Visit the body alone: decorators, annotations and defaults are no places."""
        self._names.append(name)
        self._is_function.append(is_function)
        for statement in body:
            self.visit(statement)
        self._names.pop()
        self._is_function.pop()

    def _add(self, kind: str, node: ast.expr | ast.stmt, other: ast.AST) -> None:
        if not any(self._is_function):
            return
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        function = ".".join(self._names)
        source = ast.unparse(node)
        key = f"{self._path}:{function}:{kind}:{source}"
        self._counts[key] += 1
        text = ast.unparse(ast.fix_missing_locations(other))
        self.found.append(
            Mutant(
                name=f"{key}:{self._counts[key]}",
                path=self._path,
                function=function,
                begin=(node.lineno, node.col_offset),
                end=(node.end_lineno, node.end_col_offset),
                replacement=text if isinstance(node, ast.stmt) else f"({text})",
            )
        )


def all_mutants() -> list[Mutant]:
    """Return the faults of all places in functions of the package."""
    paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "dcp_remote").rglob("*.py"))
    return [mutant for path in paths for mutant in _Places(path, (ROOT / path).read_text()).found]


# ---- which tests execute what


class _Durations:
    """Plugin of pytest that numbers the tests, and notes how long each takes."""

    def __init__(self, numbers: Numbers) -> None:
        self.tests = [""]  # number 0 is no test's
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._numbers = numbers
        self._profile = note()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests.append(nodeid)
        self._numbers.set(len(self.tests) - 1)
        sys.setprofile(self._profile)  # again: an error in it, such as an injected interrupt, has ended it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration


@dataclass(frozen=True, slots=True)
class Executed:
    """Tests that execute each function, the fast ones first, and the durations of tests in seconds."""

    tests: Mapping[str, Sequence[str]]
    seconds: Mapping[str, float]

    @classmethod
    def record(cls, arguments: Sequence[str]) -> Executed:
        """Run all tests, one after another, in this process, and note which functions each process executes."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            numbers = Numbers(folder / "number")
            (folder / "sitecustomize.py").write_text("from tests.support.executed import note\nnote()\n")
            os.environ |= {NUMBER_NAME: str(folder / "number"), FOLDER_NAME: name}
            os.environ["PYTHONPATH"] = os.pathsep.join([name, str(ROOT)])
            sys.path.insert(0, name)  # of which the rank processes make their own PYTHONPATH
            durations = _Durations(numbers)
            pytest.main([*_OPTIONS, *arguments], [durations])
            sys.setprofile(None)
            threading.setprofile(None)
            found: defaultdict[str, set[str]] = defaultdict(set)
            for path in folder.glob("*.executed"):
                for line in path.read_text().splitlines():
                    number, _, function = line.partition("\t")
                    found[function].add(durations.tests[int(number)])
        seconds = dict(durations.seconds)
        return cls(
            {
                function: sorted(tests - {""}, key=lambda test: (seconds.get(test, 0.0), test))
                for function, tests in found.items()
            },
            seconds,
        )

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute the function of a fault, as many as the budget has time for."""
        chosen: list[str] = []
        left_seconds = _BUDGET_SECONDS
        for test in self.tests.get(f"{mutant.path}:{mutant.function}", ()):
            left_seconds -= self.seconds.get(test, 0.0)
            if chosen and left_seconds < 0:
                break
            chosen.append(test)
        return chosen


# ---- runs


class Checkout:
    """Copy of the package and of the tests, in which one fault at a time is put."""

    def __init__(self, folder: Path) -> None:
        """Copy what git tracks, with the changes of the working tree."""
        self._folder = folder
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in names.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        self.mutant: Mutant | None = None
        self._pid = 0
        self._tests: list[str] = []
        self._began = self._limit_seconds = 0.0

    def start(self, mutant: Mutant, executed: Executed, first: str | None) -> None:
        """Put a fault into the package, and start its tests; one of them first, if it is known to find the fault."""
        tests = executed.tests_of(mutant)
        if first in executed.seconds:
            tests = [str(first), *(test for test in tests if test != first)]
        self.mutant, self._tests = mutant, tests
        path = self._folder / mutant.path
        path.write_text(mutant.apply((ROOT / mutant.path).read_text()))
        usual_seconds = sum(executed.seconds.get(test, 0.0) for test in tests)
        self._began = time.monotonic()
        self._limit_seconds = usual_seconds * _SLOWER_FACTOR + _MORE_SECONDS
        self._pid = os.fork()  # this process has imported torch, and has one thread
        if self._pid == 0:
            self._run()

    def poll(self) -> Result | None:
        """Return the result of the fault, and take it out again; None while its tests run."""
        assert self.mutant is not None, "a fault was put into the package"
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        seconds = time.monotonic() - self._began
        if not pid and seconds < self._limit_seconds:
            return None
        killer: str | None = None
        if not pid:
            killer = "timeout"
        elif status:
            killer = self._failed_test() or f"exit {os.waitstatus_to_exitcode(status)}"
        with suppress(ProcessLookupError):  # also what the tests have left behind
            os.killpg(self._pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self._pid, 0)
        shutil.copy(ROOT / self.mutant.path, self._folder / self.mutant.path)
        return Result(self.mutant.name, killer, len(self._tests), round(seconds, 1))

    def _run(self) -> None:
        """Run the tests in this process, and end the process."""
        code = 1
        try:
            os.setsid()
            os.chdir(self._folder)
            descriptor = os.open(self._folder / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.path.insert(0, str(self._folder))
            os.environ["PYTHONPATH"] = str(self._folder)
            code = pytest.main([*_OPTIONS, "--exitfirst", *self._tests], [_Failure(self._folder / "failed")])
        finally:
            os._exit(code)

    def _failed_test(self) -> str | None:
        path = self._folder / "failed"
        if not path.exists():
            return None
        test = path.read_text()
        path.unlink()
        return test


class _Failure:
    """Plugin of pytest that writes the name of the first test that fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid)


def run(mutants: Sequence[Mutant], executed: Executed, results: Path, known: Mapping[str, Result]) -> None:
    """Run the tests of faults, as many at a time as there are processors, and append the results to a file."""
    done = read_results(results)
    left = [mutant for mutant in mutants if mutant.name not in done]
    with tempfile.TemporaryDirectory() as name:
        idle = [Checkout(Path(name) / str(number)) for number in range(os.cpu_count() or 1)]
        busy: list[Checkout] = []
        while left or busy:
            while left and idle:
                mutant = left.pop(0)
                before = known.get(mutant.name)
                if not executed.tests_of(mutant):
                    _append(results, Result(mutant.name, None, 0, 0.0))
                    continue
                busy.append(idle.pop())
                busy[-1].start(mutant, executed, before.killer if before is not None else None)
            for checkout in list(busy):
                result = checkout.poll()
                if result is not None:
                    busy.remove(checkout)
                    idle.append(checkout)
                    _append(results, result)
            time.sleep(0.1)


def read_results(path: Path) -> dict[str, Result]:
    """Return the results in a file, by the name of the fault; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}


def _append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
    sys.stdout.write(f"{result.killer or 'NOT FOUND'}: {result.name} ({result.tests} tests, {result.seconds:g} s)\n")
    sys.stdout.flush()


def main() -> None:
    """Draw the faults, and run the tests of each; or compare two files of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="seed by which the faults are drawn")
    parser.add_argument("--known", type=Path, help="earlier results: what has found a fault runs first")
    parser.add_argument("--results", type=Path, default=OUTPUT / "results.jsonl", help="file of the results")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="list what is found no more")
    parser.add_argument("tests", nargs="*", default=["tests"], help="tests that count")
    options = parser.parse_args()
    if options.compare is not None:
        sys.exit(_compare(*map(read_results, options.compare)))
    OUTPUT.mkdir(exist_ok=True)
    mutants = all_mutants()
    chosen = random.Random(options.seed).sample(mutants, options.count)
    file = OUTPUT / "executed.json"
    if not file.exists():
        # In a process of its own: this one shall neither import the package nor have a thread.
        code = "import sys; from tests.support.mutants import *; record(sys.argv[1], sys.argv[2:])"
        subprocess.run([sys.executable, "-c", code, file, *options.tests], cwd=ROOT, check=True)
    executed = Executed(**json.loads(file.read_text()))
    run(chosen, executed, options.results, read_results(options.known) if options.known else {})
    results = read_results(options.results)
    found = sum(results[mutant.name].killer is not None for mutant in chosen)
    sys.stdout.write(f"{found} of {len(chosen)} faults were found, of {len(mutants)} places\n")


def record(path: str, arguments: Sequence[str]) -> None:
    """Write to a file which tests execute what."""
    Path(path).write_text(json.dumps(asdict(Executed.record(arguments))))


def _compare(old: Mapping[str, Result], new: Mapping[str, Result]) -> int:
    """Print the faults that were found before, and are not any more; return how many there are."""
    lost = [name for name, result in old.items() if result.killer and name in new and new[name].killer is None]
    gone = [name for name in old if name not in new]
    sys.stdout.write("".join(f"found no more: {name}, before by {old[name].killer}\n" for name in lost))
    sys.stdout.write(f"{len(lost)} are found no more; {len(gone)} of the old faults are not among the new\n")
    return len(lost)


if __name__ == "__main__":
    main()
