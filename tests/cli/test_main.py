"""Tests of what all commands share: options, messages, and Ctrl-C."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote.cli import main
from dcp_remote.cli.arguments import name_options
from dcp_remote.cli.transfer import export
from dcp_remote.errors import StorageError
from dcp_remote.storage import MemoryStore
from tests.support.command_line import CommandLine

PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # this process may have been started with SIGINT ignored
from dcp_remote.cli import interrupts, main
interrupts._TOGETHER_SECONDS = 3.0  # a busy machine may pause between two signals of a test
sys.exit(main(sys.argv[1:]))
"""
# Less than the time limit of a request, after which a command would end as well.
AT_ONCE_SECONDS = 20


class Custom:
    """Object that only a pickle can hold."""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Save a tensor by torch."""
    torch.save({"w": torch.arange(8.0)}, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def test_storage_options_are_numbers_and_flags(cli: CommandLine, weights: Path, tmp_path: Path) -> None:
    """Only limits, times and flags become numbers and flags."""
    options = ["requests_in_flight=2", "upload_bytes_per_second=1e9", "allow_network_replace=true"]
    run = tmp_path / "run"
    cli.run("import", weights, run, "--step", "1", *(f"--option={option}" for option in options))
    for option, value in (
        ("requests_in_flight", "1.5"),
        ("requests_in_flight", "many"),
        ("allow_network_replace", "1"),
    ):
        cli.fail("ls", run, f"--option={option}={value}", code=2, says=f"--option {option} must be ")


def test_a_secret_of_digits_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only limits and times become numbers."""
    seen: dict[str, object] = {}

    def open_store(url: str, storage_options: Mapping[str, object]) -> MemoryStore:
        seen.update(storage_options)
        raise StorageError("Enough.")

    monkeypatch.setattr("dcp_remote.cli.ls.open_store", open_store)
    options = ["aws_secret_access_key=123", "connect_timeout_seconds=2.5", "verify=False", "key=a=b"]
    assert main(["ls", "s3://bucket/run", *(f"--option={option}" for option in options)]) == 3
    assert seen == {"aws_secret_access_key": "123", "connect_timeout_seconds": 2.5, "verify": False, "key": "a=b"}


def test_closed_outputs(weights: Path, tmp_path: Path) -> None:
    """Close an output, as a daemon does: the exit codes stay true, and errors never go to standard output."""
    run = tmp_path / "run"
    assert main(["import", str(weights), str(run), "--step", "1"]) == 0

    def start(redirect: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
        shell = ["sh", "-c", f'exec "$@" {redirect}', "sh", *command]
        return subprocess.run(shell, capture_output=True, text=True, check=False)

    assert start("2>&-", "verify", run).returncode == 0
    absent = start("2>&-", "ls", tmp_path / "absent", "--json")
    assert (absent.returncode, absent.stdout) == (1, "")
    closed = start(">&-", "ls", run)
    assert (closed.returncode, closed.stderr) == (3, "dcp-remote: standard output is closed\n")


def test_a_defect_is_no_finding(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raise in a command what nobody expects: the exit code is that of a failure, not of something found."""
    monkeypatch.setattr("dcp_remote.cli.ls.open_store", lambda *_: 1 / 0)
    assert main(["ls", str(weights)]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_messages_name_options_of_the_command_line(
    cli: CommandLine, capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    """The options that a message names are there, and do what it says."""
    run, source = str(tmp_path / "run"), tmp_path / "source"
    dcp.save({"w": torch.ones(2), "began": Custom()}, checkpoint_id=source, no_dist=True)
    cli.run("import", weights, run, "--step", "1")
    for arguments, option in (
        (["import", str(weights), run, "--step", "1"], "--overwrite"),
        (["import", str(source), run, "--step", "2"], "--allow-pickle"),
        (["export", run, str(tmp_path / "out"), "--kind", "torch"], "--allow-pickle"),
        (["rm", run, "--step", "2", "--yes"], "--force"),
    ):
        assert main(arguments) > 0
        message = capsys.readouterr().err
        assert option in message
        assert "=True" not in message
        cli.run(*arguments, option)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("set storage_options['region_name'] (or …) to", "set --region (or …) to"),
        ("Give storage_options['verify'].", "Give --option verify."),
        ("quotes (storage_options['etag_quotes'] = False).", "quotes (--option etag_quotes=false)."),
        (
            "Give storage_options['profile_name'], or storage_options['aws_access_key_id']",
            "Give --profile, or --option aws_access_key_id",
        ),
        ("For a public bucket give storage_options['anon'] = True.", "For a public bucket give --option anon=true."),
        ("file_bytes_max must be an integer.", "--file-bytes-max must be an integer."),
        ("url must be a text.", "url must be a text."),
        ("Unknown name in storage_options for s3 URLs.", "Unknown name in --option for s3 URLs."),
    ],
)
def test_wording(message: str, named: str) -> None:
    assert name_options(message, export) == named


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ls", "--enpoint-url", "http://x", "URL"], "unrecognized arguments: --enpoint-url"),
        (["rm", "URL", "--stp=5"], "unrecognized arguments: --stp"),
        (["rm", "URL", "--step=5", "--dry-run"], "unrecognized arguments: --dry-run"),
        (["bench", "URL", "--jsn"], "unrecognized arguments: --jsn"),
        (["show", "URL", "--option", "nonsense"], "argument --option: must have the form NAME=VALUE"),
        (["pin", "URL", "5", "--xyz"], "unrecognized arguments: --xyz"),
        (["pin", "URL", "5", "6"], "unrecognized arguments: 6"),
        (["pin", "--", "URL", "5", "--undo"], "unrecognized arguments: --undo"),
        (["pin", "URL", "5", "-x"], "unrecognized arguments: -x"),
        (["pin", "URL"], "required"),
        # An abbreviation of an option that changes something is none.
        (["pin", "URL", "1", "--und"], "--und"),
        (["gc", "URL", "--grace-hours", "0", "--ye"], "--ye"),
        (["recover", "URL", "--y"], "--y"),
        (["rm", "URL", "--step", "1", "--ye"], "--ye"),
        (["rm", "URL", "--ste", "1", "--yes"], "--ste"),
        (["rm", "URL", "--step"], "--step"),
    ],
)
def test_unknown_arguments(cli: CommandLine, arguments: list[str], says: str) -> None:
    """Nothing is done."""
    cli.refuse(*(argument.replace("URL", "s3://bucket/run") for argument in arguments), says=says)


def test_what_follows_an_unknown_option_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "s3://b/run", "--optoin", "aws_secret_access_key=HUSH", "--opton=key=HUSH"])
    shown = capsys.readouterr().err
    assert "--optoin --opton" in shown
    assert "HUSH" not in shown


def test_an_abbreviation_of_a_command_that_only_reads(tmp_path: Path) -> None:
    assert main(["ls", str(tmp_path), "--js"]) == 1  # there is no run


COMPLETIONS = {
    "bash": "COMP_WORDS=({line} ''); COMP_CWORD={words}; _shtab_dcp_remote dcp-remote ''; echo ${{COMPREPLY[@]}}",
    "fish": "complete -C '{line} ' | cut -f 1",
    "zsh": "print $_shtab_dcp_remote_export_options",  # a line of zsh is completed in a terminal alone
}


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completion(cli: CommandLine, tmp_path: Path, shell: str) -> None:
    """Complete a value in the shell itself, where the machine has this shell."""
    script = tmp_path / "script"
    script.write_text(cli.run("completion", shell).out)
    if (found := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    line = "dcp-remote export --kind"
    question = COMPLETIONS[shell].format(line=line, words=len(line.split()))
    (tmp_path / "dcp-remote").touch(mode=0o755)  # fish completes what it can run
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    compdef = "compdef() :; " if shell == "zsh" else ""
    answer = subprocess.run(
        [found, "-c", f'{compdef}eval "$(cat {script})"; {question}'],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert "safetensors" in answer.stdout.replace("(", " ").split()
    assert "torch" in answer.stdout.replace(")", " ").split()


def test_completion_without_its_package(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    cli.fail("completion", "bash", code=2, says="pip install 'dcp-remote[completion]'")


class Server:
    """Server that takes connections and never answers; it closes them at once, or holds them."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(60)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._held: list[socket.socket] = []

    def take(self, *, is_held: bool) -> None:
        connection, _ = self._socket.accept()
        if is_held:
            self._held.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in [*self._held, self._socket]:
            connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def command(server: Server, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Start a command whose server does not answer: `recover`, or the parameter."""
    keys = ["--option=aws_access_key_id=testing", "--option=aws_secret_access_key=testing"]
    name = getattr(request, "param", "recover")
    arguments = [name, "s3://bucket/run", "--endpoint-url", server.url, "--region=us-east-1", *keys]
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


LINE = "dcp-remote: interrupted; Ctrl-C again ends at once\n"


def test_ctrl_c_ends_a_command(server: Server, command: subprocess.Popen[str]) -> None:
    """Between two attempts of a request: one line, and no traceback."""
    server.take(is_held=False)
    command.send_signal(signal.SIGINT)
    server.close()
    assert command.communicate(timeout=60)[1] == LINE
    assert command.returncode == 130


def test_a_second_ctrl_c_ends_a_command_at_once(server: Server, command: subprocess.Popen[str]) -> None:
    """While a request is pending, from which the main thread does not return.

    Of two signals together the second is ignored: a launcher passes on what the terminal has sent to the command as
    well.
    """
    server.take(is_held=True)
    command.send_signal(signal.SIGINT)
    assert command.stderr is not None
    assert command.stderr.readline() == LINE
    command.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(4)
    command.send_signal(signal.SIGINT)
    assert command.wait(AT_ONCE_SECONDS) == 130


@pytest.mark.parametrize("command", ["ls", "show"], indirect=True)
@pytest.mark.parametrize("is_held", [False, True])
def test_ctrl_c_ends_at_once_what_only_reads(server: Server, command: subprocess.Popen[str], *, is_held: bool) -> None:
    """Between two attempts of a request, and while one is pending."""
    server.take(is_held=is_held)
    command.send_signal(signal.SIGINT)
    assert command.communicate(timeout=AT_ONCE_SECONDS)[1] == "dcp-remote: interrupted\n"
    assert command.returncode == 130
