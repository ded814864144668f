"""`python -m dcp_remote.launch`: the command, its environment, signals and exit status. No framework is needed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from dcp_remote.launch import _STARTUP, _run

URL = "s3://bucket/run"
NOTHING = f"nothing was saved to {URL}."

# A framework whose import enables an integration that says how it was called.
FRAMEWORK = """
    import sys, types
    fake = types.ModuleType("dcp_remote.integrations.{name}")
    fake.enable = lambda *args, **settings: print("{name}", args, settings, flush=True)
    sys.modules[fake.__name__] = fake
    print("imported", flush=True)
"""


def run(
    *arguments: str, code: int = 0, path: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Run the command, and return what it wrote to both outputs."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("DCP_REMOTE_")}
    if path is not None:
        known["PYTHONPATH"] = os.pathsep.join([str(path), known.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "dcp_remote.launch", *arguments]
    done = subprocess.run(command, env=known | dict(environment or {}), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def write(folder: Path, module: str, source: str) -> None:
    """Write a module, and the packages above it."""
    *packages, name = module.split(".")
    for package in packages:
        folder /= package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / f"{name}.py").write_text(textwrap.dedent(source))


@pytest.mark.parametrize(
    ("module", "name", "called"),
    [
        ("transformers.trainer", "transformers", f"('{URL}',) {{'resume': True, 'storage_options': None}}"),
        ("accelerate", "accelerate", f"('{URL}',) {{'storage_options': None}}"),
        ("deepspeed", "deepspeed", f"('{URL}',) {{'storage_options': None}}"),
        ("llamafactory.train.tuner", "llamafactory", "() {}"),
    ],
)
def test_an_import_enables_the_integration(module: str, name: str, called: str, tmp_path: Path) -> None:
    """Also in processes that the command starts; once, when the framework's own module is complete."""
    write(tmp_path, module, FRAMEWORK.format(name=name))
    program = f"import {module} as m; import {module}; print(m.__spec__.name)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}], check=True)"
    out, err = run(sys.executable, "-c", outer, path=tmp_path, environment={"DCP_REMOTE_URL": URL})
    assert out.splitlines() == ["imported", f"{name} {called}", module]
    assert err == ""


def test_options_of_the_store_and_of_resuming(tmp_path: Path) -> None:
    write(tmp_path, "transformers.trainer", FRAMEWORK.format(name="transformers"))
    options = '{"endpoint_url": "http://localhost:9000"}'
    program = "import transformers.trainer"
    expected = "{'resume': False, 'storage_options': {'endpoint_url': 'http://localhost:9000'}}"
    given = ["--url", URL, "--storage-options", options, "--no-resume"]
    out, _ = run(*given, sys.executable, "-c", program, path=tmp_path, environment={"DCP_REMOTE_URL": "s3://other/run"})
    assert out.splitlines()[-1] == f"transformers ('{URL}',) {expected}"
    environment = {"DCP_REMOTE_URL": URL, "DCP_REMOTE_STORAGE_OPTIONS": options, "DCP_REMOTE_RESUME": "never"}
    out, _ = run(sys.executable, "-c", program, path=tmp_path, environment=environment)
    assert out.splitlines()[-1] == f"transformers ('{URL}',) {expected}"


def test_an_integration_that_fails_is_said_three_times(tmp_path: Path) -> None:
    """By the process when the framework is imported and when the process ends, and by the launcher."""
    write(tmp_path, "accelerate", "")  # has no Accelerator
    program = "import sys, accelerate; print('training', file=sys.stderr, flush=True); raise SystemExit(3)"
    _, err = run(sys.executable, "-c", program, code=3, path=tmp_path, environment={"DCP_REMOTE_URL": URL})
    first, training, *later = err.splitlines()
    assert training == "training"
    assert later == [first, first]
    assert f"saves nothing of accelerate to {URL}, since the integration could not be enabled. ImportError: " in first


def hook(program: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the environment of the launcher, without the launcher."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("DCP_REMOTE_")}
    known["PYTHONPATH"] = os.pathsep.join(map(str, [_STARTUP, path]))
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=known | environment, capture_output=True, text=True, check=False)


def test_a_process_that_outlives_the_launcher(tmp_path: Path) -> None:
    """The folder of marks is gone, as on another host, too: the integration is enabled."""
    write(tmp_path, "accelerate", FRAMEWORK.format(name="accelerate"))
    done = hook("import accelerate", tmp_path, DCP_REMOTE_URL=URL, DCP_REMOTE_MARKS=str(tmp_path / "gone"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["imported", f"accelerate ('{URL}',) {{'storage_options': None}}"]


def test_a_process_that_has_pythonpath_alone_says_so(tmp_path: Path) -> None:
    write(tmp_path, "accelerate", FRAMEWORK.format(name="accelerate"))
    done = hook("import accelerate", tmp_path)
    assert (done.returncode, done.stdout) == (0, "imported\n")
    first, last = done.stderr.splitlines()
    assert first == last
    assert "DCP_REMOTE_URL is not set in this process" in first
    assert hook("import json", tmp_path).stderr == ""


def test_a_python_without_dcp_remote(tmp_path: Path) -> None:
    """As of a tool with an environment of its own, which the command starts."""
    write(tmp_path, "accelerate", "")
    program = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
    program += "sys.path[:] = [p for p in sys.path if 'site-packages' not in p and p]; import accelerate"
    done = hook(program, tmp_path, DCP_REMOTE_URL=URL)
    assert done.returncode == 0
    assert done.stderr.count("ModuleNotFoundError: No module named 'dcp_remote'") == 2


# Finds a framework that is installed editable, as setuptools does; and asks other finders again, as hooks of tools do.
EDITABLE = """
    import importlib.util, sys
    class Editable:
        def find_spec(name, path=None, target=None):
            assert name != "accelerate" or sys.meta_path[0].find_spec(name, path) is None
            return importlib.util.spec_from_file_location(name, {source!r}) if name == "accelerate" else None
    class Legacy:
        pass
    sys.meta_path += [Legacy, Editable]
"""


def test_a_framework_that_is_installed_editable(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source", "accelerate", FRAMEWORK.format(name="accelerate"))
    write(tmp_path, "sitecustomize", EDITABLE.format(source=str(tmp_path / "source" / "accelerate.py")))
    done = hook("import accelerate", tmp_path, DCP_REMOTE_URL=URL)
    assert done.stdout.splitlines() == ["imported", f"accelerate ('{URL}',) {{'storage_options': None}}"]
    assert done.stderr == ""


def test_the_loader_of_a_framework_is_its_own(tmp_path: Path) -> None:
    """Copies, pickles and those who ask it for a source find what they would without dcp_remote."""
    write(tmp_path, "accelerate", FRAMEWORK.format(name="accelerate"))
    program = """
        import copy, importlib.machinery, importlib.util, inspect, pickle, accelerate
        loader = accelerate.__spec__.loader
        for other in (loader, copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            assert type(other) is importlib.machinery.SourceFileLoader
            assert other.get_source("accelerate") == inspect.getsource(accelerate)
        importlib.reload(accelerate)
    """
    done = hook(textwrap.dedent(program), tmp_path, DCP_REMOTE_URL=URL, DCP_REMOTE_MARKS=str(tmp_path))
    assert done.stderr == ""
    assert done.stdout.splitlines().count("imported") == 2


def test_a_command_that_cleans_the_folder_of_temporary_files(tmp_path: Path) -> None:
    program = "import os, shutil; shutil.rmtree(os.environ['DCP_REMOTE_MARKS'])"
    _, err = run(sys.executable, "-c", program, environment={"DCP_REMOTE_URL": URL, "TMPDIR": str(tmp_path)})
    assert err == ""


def test_a_trainer_that_saves_by_other_means_is_refused(tmp_path: Path) -> None:
    """USE_V1 of LLaMA-Factory, whose checkpoints would stay in a local folder."""
    write(tmp_path, "llamafactory.v1.core.utils.checkpoint", "")
    program = "import llamafactory.v1.core.utils.checkpoint"
    _, err = run(sys.executable, "-c", program, code=1, path=tmp_path, environment={"DCP_REMOTE_URL": URL})
    assert "unset USE_V1" in err


def test_a_program_without_a_framework_is_told() -> None:
    """Its output and exit status are its own."""
    out, err = run(
        sys.executable, "-c", "print('trained'); raise SystemExit(3)", code=3, environment={"DCP_REMOTE_URL": URL}
    )
    assert out == "trained\n"
    assert NOTHING in err
    _, err = run(sys.executable, "-I", "-c", "", environment={"DCP_REMOTE_URL": URL})  # reads no PYTHONPATH
    assert NOTHING in err


def test_another_installation_of_dcp_remote(tmp_path: Path) -> None:
    """Its `sitecustomize` runs as well, once, whichever comes first."""
    shutil.copytree(_STARTUP, tmp_path / "other")
    done = hook("import sys; print(*[type(f).__name__ for f in sys.meta_path[:3]])", tmp_path / "other")
    assert done.stderr == ""
    assert done.stdout.split()[:2] == ["_Finder", "_Finder"]
    assert done.stdout.split()[2] != "_Finder"


def test_a_sitecustomize_of_the_environment_runs(tmp_path: Path) -> None:
    write(tmp_path, "sitecustomize", "print('site')")
    out, _ = run(sys.executable, "-c", "import dcp_remote", path=tmp_path, environment={"DCP_REMOTE_URL": URL})
    assert out == "site\nsite\n"  # in the process of dcp_remote.launch, and in the command's


def test_the_modules_of_a_program_are_its_own(tmp_path: Path) -> None:
    """Also those that the standard library has under the same names: the hook leaves nothing imported behind."""
    program = "import sys; print(*sys.modules)"
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    added = set(hook(program, tmp_path, DCP_REMOTE_URL=URL).stdout.split()) - set(plain)
    assert added - set(sys.builtin_module_names) == {"sitecustomize", "dcp_remote_startup"}


def test_sitecustomize_is_that_of_the_environment(tmp_path: Path) -> None:
    write(tmp_path, "sitecustomize", "import sys; MARK = sys.modules[__name__].__file__")
    done = hook("import sitecustomize; print(sitecustomize.MARK)", tmp_path, DCP_REMOTE_URL=URL)
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'sitecustomize.py'}\n", "")


def test_two_hyphens_before_the_command() -> None:
    """Take them for the end of the options; those behind the command are its own."""
    program = "import sys; print(sys.argv[1:])"
    out, _ = run("--url", URL, "--", sys.executable, "-c", program, "--", "x")
    assert out == "['--', 'x']\n"


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {}, "there is no run: set DCP_REMOTE_URL"),
        (["--"], {"DCP_REMOTE_URL": URL}, "there is no command: write it behind the options"),
        (["true"], {"DCP_REMOTE_URL": URL, "DCP_REMOTE_RESUME": "Never"}, "must be auto or never, not 'Never'"),
        (["true"], {"DCP_REMOTE_URL": "s3:/bucket/run"}, "s3://bucket/run"),
        (["true"], {"DCP_REMOTE_URL": "bucket/run"}, "must be a URL, such as s3://bucket/run"),
        (["true"], {"DCP_REMOTE_URL": URL, "DCP_REMOTE_STORAGE_OPTIONS": "{endpoint"}, "is no JSON"),
        (["true"], {"DCP_REMOTE_URL": URL, "DCP_REMOTE_STORAGE_OPTIONS": "[]"}, "must be a JSON object"),
        (["true"], {"DCP_REMOTE_URL": URL, "DCP_REMOTE_STORAGE_OPTIONS": '{"endpont_url": 1}'}, "is 'endpoint_url'"),
    ],
)
def test_wrong_arguments(arguments: list[str], environment: dict[str, str], said: str) -> None:
    _, err = run(*arguments, code=2, environment=environment)
    assert said in err


def test_a_command_that_is_not_there() -> None:
    _, err = run("llamafactory-cIi", "train", code=127, environment={"DCP_REMOTE_URL": URL})
    assert "there is no command 'llamafactory-cIi'" in err


def test_no_wait_outlasts_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for the command ends by itself: a signal that comes just before the wait is handled only then."""
    turns: list[float | None] = []
    wait = subprocess.Popen.wait

    def record(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        turns.append(timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", record)
    assert _run([sys.executable, "-c", "import time; time.sleep(1)"], dict(os.environ)) == 0
    assert len(turns) > 1
    assert all(turn is not None and turn <= 1.0 for turn in turns)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_go_to_the_command(number: signal.Signals) -> None:
    """A notice that the job will be killed reaches the training; its exit status is that of the whole."""
    program = f"""
        import signal, sys, time
        signal.signal({int(number)}, lambda *_: sys.exit(7))
        print("ready", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-m", "dcp_remote.launch", "--url", URL, sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(30) == 7


def test_a_command_that_a_signal_ends() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    run(sys.executable, "-c", program, code=128 + signal.SIGKILL, environment={"DCP_REMOTE_URL": URL})
