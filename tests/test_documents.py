"""Pages about the package: what they link and name is there, and their code runs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import dcp_remote
from dcp_remote import CheckpointManager, training_state
from dcp_remote.cli import main as dcp_remote_command

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dcp_remote"
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, PACKAGE / "ARCHITECTURE.md", PACKAGE / "run" / "PROTOCOL.md", PACKAGE / "format" / "FORMAT.md"]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "examples" / "README.md", *DOCS]
README_LINES_MAX = 150

# Whole pages whose blocks run elsewhere, or cannot run.
_FRAMEWORK = "needs the framework, which .venv lacks; tests/frameworks runs the same calls"
NOT_RUN_PAGES = {
    **dict.fromkeys(
        ("accelerate.md", "axolotl.md", "deepspeed.md", "lightning.md", "llamafactory.md", "torchtitan.md"), _FRAMEWORK
    ),
    **dict.fromkeys(("transformers.md", "frameworks.md", "other-frameworks.md"), _FRAMEWORK),
    "import-export.md": "tests/transfer/test_page.py runs it",
    "monitoring.md": "needs an exporter, which .venv lacks; tests/manager/test_monitoring.py checks the page",
}

# Lines of shell blocks, by their beginning, that are not run here.
NOT_RUN_LINES = {
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "a variable of torchrun",
    "torchrun ": "needs several hosts; tests/hosts runs jobs under it",
    "make ": "a target of the Makefile, which CI runs itself, or which takes minutes",
    "pip install": "installs",
    "python examples/first_hour.py": "tests/test_examples.py runs it",
    'eval "$(dcp-remote completion': "a line of a shell's file; tests/cli/test_main.py runs it",
    "dcp-remote completion": "writes a file of the shell; tests/cli/test_main.py runs it",
    "dcp-remote recover": "refuses a run whose catalog can be read; tests/cli/test_recover.py runs it",
}


def name_of(page: Path) -> str:
    """Return the path of a page from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """Fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order; `line` is that of the first line of code."""
    text = page.read_text()
    fenced = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: one.start(2)].count("\n") + 1, one[1], one[2]) for one in fenced]


# ---- links, and names of files


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and mkdocs make them."""
    without_code = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_lead_to_files(page: Path) -> None:
    """Targets are files of this repository, named from the page; an anchor is a heading of the target."""
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_references_are_defined_and_used(page: Path) -> None:
    """The numbers of sources, such as [4], each with its line `[4]: https://…`."""
    text = page.read_text()
    defined = re.findall(r"^\[(\d+)\]: https://\S+$", text, re.MULTILINE)
    assert len(set(defined)) == len(defined)
    if defined:
        assert set(defined) == set(re.findall(r"\[(\d+)\](?!:)", text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """From the root, below the package, or somewhere in it where only the file's name is given."""
    known = {path.name for path in PACKAGE.rglob("*.py")} | {path.name for path in (ROOT / "tests").rglob("*.py")}
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
        places = [ROOT / name, PACKAGE / name, ROOT / "tests" / name]
        assert any(place.exists() for place in places) or ("/" not in name and name in known), name


def test_functions_on_the_ways_exist() -> None:
    """Each row of the two ways names functions that one of its files defines."""
    ways = (
        (PACKAGE / "ARCHITECTURE.md").read_text().partition("## The way of a tensor")[2].partition("## Which file")[0]
    )
    rows = re.findall(r"^\| (`[^|]*\.py`[^|]*) \| ([^|]*) \|", ways, re.MULTILINE)
    assert len(rows) > 20
    for files, functions in rows:
        folder, text = PACKAGE, ""
        for name in re.findall(r"`([\w/]+\.py)`", files):
            path = PACKAGE / name if (PACKAGE / name).exists() else folder / name
            folder = path.parent
            text += path.read_text()
        for function in re.findall(r"`([\w.]+)`", functions):
            assert re.search(rf"(def|class) {function.rpartition('.')[2]}\b", text), (files, function)


# ---- README, the site


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= README_LINES_MAX


def test_every_page_of_docs_is_in_the_nav_and_linked_from_the_readme_or_another_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    assert {page.name for page in DOCS} <= listed
    for path in listed - {"index.md"}:
        assert (ROOT / path).is_file() or (ROOT / "docs" / path).is_file(), path


def test_api_page_has_every_public_name() -> None:
    """Each name of `__all__` once, and no other."""
    shown = re.findall(r"^::: dcp_remote\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(set(dcp_remote.__all__) - {"__version__"})


def test_table_of_errors_names_what_is_there() -> None:
    """Every class that a caller handles; no class that is not there."""
    named = set(re.findall(r"`(\w+Error)`", (ROOT / "docs" / "errors.md").read_text().partition("## By symptom")[0]))
    public = {name for name in dir(dcp_remote.errors) if name.endswith("Error") and not name.startswith("_")}
    # Of stores, never of a call of the public API; the base of all.
    assert named == public - {"DcpRemoteError", "ObjectNotFoundError", "ConditionFailedError"}


def test_settings_name_every_argument_of_the_manager() -> None:
    """The table of `CheckpointManager` has its arguments, and no other."""
    table = (ROOT / "docs" / "settings.md").read_text().partition("## RemoteWriter")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `") and "(url" not in line]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    arguments = set(CheckpointManager.__init__.__annotations__) - {"url", "return"}
    assert sorted(named) == sorted(arguments)


# ---- code


class Training:
    """Stand-ins for the training around an example: a model of one layer, in a process of its own without ranks."""

    def __init__(self) -> None:
        """Make model, optimizer and scheduler."""
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.steps = 0

    def train_one_step(self) -> int:
        """Take a step of the optimizer, and return the number of steps so far; the first hour takes it for a loss."""
        loss = self.model(torch.ones(2, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return self.steps

    def names(self) -> dict[str, Any]:
        """Return the names that examples use and do not define."""
        state = training_state(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        return {
            "torch": torch,
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "state": state,
            "loader": {"position": 0},
            "last": 3,
            "train_one_step": self.train_one_step,
            "evaluate": lambda weights: None,
        }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """A run with checkpoints of steps 5 and 10 in a folder, which stands for s3://my-bucket; and the stand-ins."""
    monkeypatch.chdir(tmp_path)
    training = Training()
    names, bucket = training.names(), tmp_path / "my-bucket"
    with CheckpointManager(str(bucket / "run")) as checkpoints:
        for step in (5, 10):
            training.train_one_step()
            checkpoints.save(step, names["state"], wait=True)
    return bucket.as_uri(), names


def execute(block: Block, bucket: str, names: dict[str, Any]) -> None:
    """Run a block of Python as a program; its lines in a traceback are those of the page."""
    text = "\n" * (block.line - 1) + block.text.replace("timeout_seconds=3600", "timeout_seconds=0.1")
    if "endpoint_url" not in text:  # an option of S3, which a folder refuses; nothing connects
        text = text.replace("s3://my-bucket", bucket)
    exec(compile(text, str(block.page), "exec"), names)


RUN_PAGES = [page for page in (README, *DOCS) if page.name not in NOT_RUN_PAGES]
WITH_CODE = [page for page in RUN_PAGES if any(block.language == "python" for block in blocks_of(page))]

# Where an example begins a training of its own, the run is empty.
BEGINS = {"README.md", "first-hour.md"}


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_python_of_the_page_runs(
    page: Path, run: tuple[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its blocks follow each other in one program; what a comment behind `print` quotes is printed."""
    bucket, names = run
    if page.name in BEGINS:
        bucket = (tmp_path / "new").as_uri()
    for block in blocks_of(page):
        if block.language != "python":
            continue
        if page.name == "restore.md" and "checkpoints.restore" in block.text:
            restore_each_way(block, bucket)
            continue
        execute(block, bucket, names)
        for name in [name for name in names if name.startswith("test_")]:
            names.pop(name)()
        printed = capsys.readouterr().out.replace(bucket, "s3://my-bucket")
        for quoted in re.findall(r"print\(.*\)  # (.*?)(?: …)?$", block.text, re.MULTILINE):
            assert quoted in printed


def restore_each_way(block: Block, bucket: str) -> None:
    """Run each line into a model that differs from the saved one as the line says; the body is loaded each time."""
    linear, names = torch.nn.Linear, dict[str, Any]()
    layers: dict[str, tuple[dict[str, torch.nn.Module], dict[str, torch.nn.Module]]] = {
        # By words of the line: layers beside the body that were saved, and those of the state.
        'exclude="*head.*"': ({"head": linear(2, 1)}, {"head": linear(2, 3)}),
        'missing="keep"': ({}, {"adapter": linear(2, 1)}),
        'include="model.*")': ({}, {}),
        'unexpected="ignore"': ({"old": linear(2, 1)}, {}),
        'rename={"model.lm_head"': ({"lm_head": linear(2, 1)}, {"head": linear(2, 1)}),
        'dtype="convert"': ({}, {}),
        "rename=ema": ({}, {}),
    }
    for number, line in enumerate(block.text.splitlines()):
        one_line = Block(block.page, block.line + number, "python", line)
        if "restore(" not in line:
            execute(one_line, bucket, names)
            continue
        (words,) = (words for words in layers if words in line)
        saved_layers, present_layers = layers.pop(words)
        saved_body, body = linear(4, 2), linear(4, 2)
        saved = torch.nn.ModuleDict({"body": saved_body} | saved_layers)
        model = torch.nn.ModuleDict({"body": body} | present_layers)
        expected = saved_body.weight.detach().clone()
        averaged = AveragedModel(saved) if "ema" in words else None
        if averaged is not None:
            torch.nn.init.zeros_(saved_body.weight)  # so that it differs from the average
        if "dtype" in words:
            model.double()
        with CheckpointManager(f"{bucket}/way-{number}") as checkpoints:
            checkpoints.save(1, training_state(model=saved, ema=averaged), wait=True)
            names |= {"model": model, "state": training_state(model=model), "checkpoints": checkpoints}
            execute(one_line, bucket, names)
        assert torch.equal(body.weight, expected.to(body.weight.dtype)), line
    assert not layers  # each way was shown


SHELL_PAGES = [page for page in RUN_PAGES if any(block.language == "sh" for block in blocks_of(page))]


@pytest.mark.parametrize("page", SHELL_PAGES, ids=name_of)
def test_commands_of_the_page_run(
    page: Path, run: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line of `dcp-remote` ends with exit code 0 and says something; any other line is known."""
    bucket, _ = run
    for block in blocks_of(page):
        for line in block.text.splitlines() if block.language == "sh" else ():
            if any(line.startswith(beginning) for beginning in NOT_RUN_LINES):
                continue
            program, *arguments = shlex.split(line.replace("s3://my-bucket", bucket), comments=True)
            assert program == "dcp-remote", line
            assert dcp_remote_command(arguments) == 0, line
            printed = capsys.readouterr().out
            assert printed, line
            if "--json" in arguments:
                json.loads(printed)


def test_every_block_is_run_or_has_a_reason() -> None:
    """A page has no block of a language that no test here runs; reasons name pages and lines that are there."""
    found = [block for page in RUN_PAGES for block in blocks_of(page)]
    assert {block.language for block in found} == {"python", "sh", "text"}
    assert not [page.name for page in RUN_PAGES if re.search(r"^    \S", _without_blocks(page), re.MULTILINE)]
    names = {page.name for page in DOCS}
    assert set(NOT_RUN_PAGES) <= names
    lines = [line for block in found if block.language == "sh" for line in block.text.splitlines()]
    for beginning in NOT_RUN_LINES:
        assert any(line.startswith(beginning) for line in lines), beginning


def _without_blocks(page: Path) -> str:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(!!! .*\n|::: .*)\n(    .*\n)+", "", text, flags=re.MULTILINE)
