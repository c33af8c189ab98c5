"""The launcher's decisions: which environments it keeps, which steps it runs and repeats."""

import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.kit.processes import PATIENCE_SECONDS, is_alive, until

ROOT = Path(__file__).parent.parent
LAUNCHER = ROOT / "yard"
CONSTRAINTS = """# Every version.
click==8 \\
    --hash=sha256:01
    # via taskyard
uv==1 \\
    --hash=sha256:02 \\
    --hash=sha256:03
    # via taskyard
"""


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the launcher as a module, in an empty checkout with inputs and no environment."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("yard", str(LAUNCHER))
    spec = importlib.util.spec_from_loader("yard", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    venv = tmp_path / ".venv"
    places = {
        "ROOT": tmp_path,
        "VENV": venv,
        "BIN": venv / "bin",
        "PYTHON": venv / "bin" / "python",
        "STAMP": venv / "yard-stamp",
        "PYPROJECT": tmp_path / "pyproject.toml",
        "CONSTRAINTS": tmp_path / "constraints.txt",
    }
    for name, path in places.items():
        monkeypatch.setattr(module, name, path)
    module.PYPROJECT.write_text("[project]\n")
    module.CONSTRAINTS.write_text(CONSTRAINTS)
    return module


@pytest.fixture
def commands(yard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Note the commands of the setup instead of running them. All succeed."""
    noted: list[list[str]] = []

    def note(command: list[str | Path], *_: object) -> bool:
        noted.append([Path(part).name if isinstance(part, Path) else part for part in command])
        if "venv" in command:
            yard.PYTHON.parent.mkdir(parents=True, exist_ok=True)
            yard.PYTHON.touch()
        return True

    monkeypatch.setattr(yard, "must", note)
    monkeypatch.setattr(yard, "attempt", note)
    monkeypatch.setattr(yard, "index_for_uv", dict)
    return noted


def makes_venv(commands: list[list[str]]) -> bool:
    return any("venv" in command for command in commands)


def installers(commands: list[list[str]]) -> list[str]:
    """Return the programs that installed the dependencies, in the order of their attempts."""
    return [
        "uv" if command[0] == "uv" else "pip"
        for command in commands
        if command[-1] == "constraints.txt"
    ]


def test_first_setup_makes_an_environment_and_installs_by_uv(
    yard: ModuleType, commands: list[list[str]]
) -> None:
    yard.prepare()
    assert makes_venv(commands)
    assert installers(commands) == ["uv"]
    package, archive = commands[-2:]
    assert package[-1] == yard.ROOT.name
    assert archive == ["python", "-m", "taskyard.pipeline.class_archive"]
    assert yard.is_current()


def test_every_package_is_installed_with_its_hash(
    yard: ModuleType, commands: list[list[str]]
) -> None:
    yard.prepare()
    fetched = [command for command in commands if "install" in command and "-r" in command]
    assert [command[-1] for command in fetched] == ["uv.txt", "constraints.txt"]
    assert all("--require-hashes" in command for command in fetched)
    assert {"--no-deps", "--no-build-isolation"} <= set(commands[-2])
    uv = "uv==1 \\\n    --hash=sha256:02 \\\n    --hash=sha256:03\n"
    assert (yard.VENV / "uv.txt").read_text() == uv


def test_every_requirement_is_among_the_constraints() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    wanted = [
        *settings["build-system"]["requires"],
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    names = [re.split(r"[\[<>=]", requirement)[0] for requirement in wanted]
    assert [name for name in names if name not in pinned] == []


def test_second_setup_does_nothing(yard: ModuleType, commands: list[list[str]]) -> None:
    yard.prepare()
    commands.clear()
    yard.prepare()
    assert commands == []


@pytest.mark.parametrize("name", ["PYPROJECT", "CONSTRAINTS"])
def test_changed_input_updates_the_existing_environment(
    yard: ModuleType, commands: list[list[str]], name: str
) -> None:
    yard.prepare()
    commands.clear()
    with getattr(yard, name).open("a") as changed:
        changed.write("# changed\n")
    yard.prepare()
    assert installers(commands) == ["uv"]
    assert not makes_venv(commands)


@pytest.mark.parametrize("change", ["other Python", "other place", "no Python"])
def test_changed_foundation_makes_a_new_environment(
    yard: ModuleType, commands: list[list[str]], change: str
) -> None:
    yard.prepare()
    commands.clear()
    if change == "no Python":
        yard.PYTHON.unlink()
    else:
        version, place, inputs = yard.STAMP.read_text().split()
        version, place = ("3.99.0", place) if change == "other Python" else (version, "elsewhere")
        yard.STAMP.write_text(f"{version} {place}\n{inputs}\n")
    yard.prepare()
    assert makes_venv(commands)


def test_interrupted_setup_begins_again_from_nothing(
    yard: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    yard.prepare()
    yard.CONSTRAINTS.write_text(CONSTRAINTS.replace("==8", "==9"))
    install = yard.install
    monkeypatch.setattr(yard, "install", interrupt)
    with pytest.raises(KeyboardInterrupt):
        yard.prepare()
    monkeypatch.setattr(yard, "install", install)
    assert not yard.is_current()
    commands.clear()
    yard.prepare()
    assert makes_venv(commands)


@pytest.mark.parametrize("failing", ["uv can't be had", "uv can't reach the index"])
def test_pip_installs_where_uv_cannot(
    yard: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    had = failing == "uv can't reach the index"
    note = yard.attempt

    def fail(command: list[str | Path], *settings: object) -> bool:
        note(command, *settings)
        return had and "uv.txt" in str(command[-1])

    monkeypatch.setattr(yard, "attempt", fail)
    yard.prepare()
    assert installers(commands) == (["uv", "pip"] if had else ["pip"])
    assert "--editable" in commands[-2]
    assert yard.is_current()


def test_failed_setup_is_reported_and_leaves_no_stamp(
    yard: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_install(command: list[str | Path], otherwise: str) -> None:
        if "pip" in command:
            raise yard.SetupError(otherwise)
        yard.VENV.mkdir()

    del commands
    monkeypatch.setattr(yard, "attempt", lambda *_: False)
    monkeypatch.setattr(yard, "must", fail_to_install)
    with pytest.raises(yard.SetupError, match="Is there a network"):
        yard.prepare()
    assert not yard.STAMP.exists()


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("PYTHONPATH", True),
        ("PYTHONDONTWRITEBYTECODE", True),
        ("PYTHONHOME", True),
        ("VIRTUAL_ENV", True),
        ("PIP_TARGET", True),
        ("PIP_USER", True),
        ("PIP_REQUIRE_VIRTUALENV", True),
        ("UV_SYSTEM_PYTHON", True),
        ("UV_PYTHON", True),
        ("PIP_INDEX_URL", False),
        ("PIP_EXTRA_INDEX_URL", False),
        ("PIP_FIND_LINKS", False),
        ("PIP_CERT", False),
        ("PIP_CONFIG_FILE", False),
        ("UV_INDEX_URL", False),
        ("UV_DEFAULT_INDEX", False),
        ("UV_CACHE_DIR", False),
        ("PYTHONHASHSEED", False),
        ("HTTPS_PROXY", False),
        ("PATH", False),
    ],
)
def test_variables_for_other_environments_are_foreign_and_those_for_indexes_are_not(
    yard: ModuleType,
    name: str,
    foreign: bool,  # noqa: FBT001  # a row of the table above
) -> None:
    assert yard.is_foreign(name) is foreign


@pytest.mark.parametrize(
    ("config", "index"),
    [
        ("", ""),
        ("global.cert='c.pem'\nglobal.extra-index-url='file:///extra'", ""),
        ("global.index-url='https://mirror/simple?a=b'", "https://mirror/simple?a=b"),
        ("global.index-url='https://all'\ninstall.index-url='https://install'", "https://install"),
        (":env:.index-url='https://shell'\nglobal.index-url='https://all'", "https://shell"),
    ],
)
def test_index_set_for_pip_is_found_by_its_precedence(
    yard: ModuleType, config: str, index: str
) -> None:
    assert yard.index_of_pip(config) == index


def test_index_set_for_uv_is_left_alone(yard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "https://mirror/simple")
    assert yard.index_for_uv() == {}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["test", "-k", "lease"], ["pytest", "-k", "lease"]),
        (["bench", "core"], ["python", "-m", "bench", "core"]),
        (["docs"], ["python", "-m", "docs.pages", "ROOT/docs"]),
        (["sim", "7", "-q"], ["python", "-m", "simulator", "7", "-q"]),
        (["demo", "--pair", "-q"], ["python", "-m", "pair_demo", "--pair", "-q"]),
        (["demo", "--tasks", "300"], ["taskyard", "demo", "--tasks", "300"]),
        (["journal", "check"], ["taskyard", "journal", "check"]),
        (["--version"], ["taskyard", "--version"]),
    ],
)
def test_verb_becomes_its_command(
    yard: ModuleType, arguments: list[str], command: list[str]
) -> None:
    made = yard.command_of(arguments[0], arguments[1:])
    assert [word.replace(str(yard.ROOT), "ROOT") for word in made] == command


def test_python_it_becomes_is_that_of_the_environment(tmp_path: Path) -> None:
    launch = f"""
import pathlib, runpy
yard = runpy.run_path({str(LAUNCHER)!r})
become = yard["become"]
become.__globals__["BIN"] = pathlib.Path({sys.executable!r}).parent
become(["python", "-c", "import sys; print(sys.prefix)"])
"""
    # Another Python first on the path must not be used.
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    command = [sys.executable, "-c", launch]
    assert subprocess.check_output(command, env=environment, text=True).strip() == sys.prefix


@pytest.fixture
def steps(yard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run steps that are shell scripts with these exit codes."""

    def run(**exit_codes: int) -> int:
        yard.BIN.mkdir(parents=True)
        for name, code in exit_codes.items():
            script = yard.BIN / name
            script.write_text(f"#!/bin/sh\necho output of {name}\nexit {code}\n")
            script.chmod(0o755)
        monkeypatch.setattr(yard, "QUIET", tuple(exit_codes))
        return int(yard.run_steps({name: [name] for name in exit_codes}))

    return run


def test_all_steps_run_after_one_that_failed(
    steps: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert steps(first=0, second=3, third=0) == 1
    printed = capfd.readouterr().out
    assert "output of second" in printed
    assert "output of third" not in printed
    assert "third     good" in printed
    assert printed.endswith("yard: FAILED: second\n")


def test_steps_that_are_good_exit_0(
    steps: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert steps(first=0, second=0) == 0
    assert capfd.readouterr().out.endswith("yard: all good\n")


def test_step_beside_the_others_runs_at_the_same_time(
    yard: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    yard.BIN.mkdir(parents=True)
    # Each waits for the other's file, so both must run at once.
    wait = "for _ in $(seq 3000); do [ -e $2 ] && exit 0; sleep 0.02; done; exit 1"
    script = yard.BIN / "meet"
    script.write_text(f"#!/bin/sh\necho the $1\ntouch $1\n{wait}\n")
    script.chmod(0o755)
    monkeypatch.setattr(yard, "BESIDE", ("guest",))
    steps = {"host": ["meet", "host", "guest"], "guest": ["meet", "guest", "host"]}
    assert yard.run_steps(steps) == 0
    printed = capfd.readouterr().out
    assert "host the host\n" in printed
    assert "guest the guest\n" in printed


def test_interrupt_ends_the_steps_that_run_and_begins_no_other(tmp_path: Path) -> None:
    launch = f"""
import pathlib, runpy
yard = runpy.run_path({str(LAUNCHER)!r})
run_steps = yard["run_steps"]
run_steps.__globals__.update(BIN=pathlib.Path("/bin"), ROOT=pathlib.Path({str(tmp_path)!r}))
run_steps({{"spark": ["sh", "-c", "echo here; exec sleep 600"], "first": ["sleep", "600"],
    "second": ["touch", "second"]}})
"""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", launch],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "spark here\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert err.endswith("KeyboardInterrupt\n")
    assert not (tmp_path / "second").exists()


@pytest.fixture
def test_step(yard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Run one step of real tests: a file with this text, in the launcher's own checkout. Plugins
    are left out, because their imports take longer than the tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(text: str) -> int:
        yard.VENV.mkdir()
        yard.BIN.symlink_to(Path(sys.executable).parent)
        (yard.ROOT / "test_it.py").write_text(text)
        return int(yard.run_steps({"tests": ["pytest", "-q"]}))

    return run


FAILS_ONCE = """
import pathlib

def test_first_time_fails():
    been = pathlib.Path("been")
    known = been.exists()
    been.touch()
    assert known

def test_steady():
    runs = pathlib.Path("runs")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
"""


def test_test_that_fails_once_is_run_again_alone_and_named(
    yard: ModuleType, test_step: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert test_step(FAILS_ONCE) == 0
    printed = capfd.readouterr().out
    assert "yard: UNSTEADY: 1 tests failed beside others and passed alone:" in printed
    assert "yard:   test_it.py::test_first_time_fails\n" in printed
    assert (yard.ROOT / "runs").read_text() == "."


def test_test_that_fails_twice_fails_the_step(
    test_step: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert test_step("def test_bad():\n    assert False\n") == 1
    printed = capfd.readouterr().out
    assert "UNSTEADY" not in printed
    assert printed.endswith("yard: FAILED: tests\n")


def test_many_failures_are_not_run_again(
    yard: ModuleType, test_step: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    many = yard.RETRIED_TESTS_MAX + 1
    text = f"import pytest\n\n@pytest.mark.parametrize('n', range({many}))\n"
    assert test_step(f"{text}def test_bad(n):\n    assert False\n") == 1
    assert "running them again" not in capfd.readouterr().out


def test_file_with_a_syntax_error_is_not_run_again(
    test_step: Callable[[str], int],
) -> None:
    assert test_step("def test_(:\n") == 1


def test_counts_of_tests_are_in_the_report_for_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_it.py").write_text(
        "def test_it(record_property):\n    record_property('simulated schedules', 7)\n"
    )
    report = tmp_path / "report.xml"
    settings = ("-c", str(LAUNCHER.with_name("pyproject.toml")), "-p", "no:cacheprovider")
    plugin = ("-p", "pytest_timeout")  # the settings name an option of it
    command = [
        sys.executable,
        "-m",
        "pytest",
        *settings,
        *plugin,
        f"--junitxml={report}",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert '<property name="simulated schedules" value="7" />' in report.read_text()


def note_steps(yard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Note steps in place of running them."""
    noted: dict[str, list[str]] = {}

    def note(steps: dict[str, list[str]]) -> int:
        noted.update(steps)
        return 0

    monkeypatch.setattr(yard, "run_steps", note)
    return noted


@pytest.mark.parametrize(("words", "tests"), [([], "TESTS"), (["--quick"], "QUICK_TESTS")])
def test_test_runs_the_checks_and_one_tier_of_tests(
    yard: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str], tests: str
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(yard, "prepare", lambda: None)
    noted = note_steps(yard, monkeypatch)
    monkeypatch.setattr(yard, "CHANGED_FILES_MAX", -1)
    assert yard.main(["test", *words]) == 0
    assert noted == yard.CHECKS | getattr(yard, tests)


def test_tests_are_collected_first_if_many_are_not_compiled(
    yard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yard, "CHANGED_FILES_MAX", 1)
    folder = yard.ROOT / "tests" / "some"
    (folder / "__pycache__").mkdir(parents=True)
    for name in ("test_a", "test_b"):
        (folder / f"{name}.py").touch()
    assert yard.needed_tests() == yard.TESTS
    (folder / "__pycache__" / "test_a.cpython-311-pytest-8.3.pyc").touch()
    assert list(yard.needed_tests()) == ["tests", "spark"]
    os.utime(folder / "test_a.py", (2**32, 2**32))  # changed after it was compiled
    assert yard.needed_tests() == yard.TESTS


def test_places_of_tests_are_there(yard: ModuleType) -> None:
    places = [yard.SPARK_TESTS, *yard.SWEPT_TESTS, *yard.COVERED_TESTS, *yard.QUICK_PLACES]
    assert [one for one in places if not (LAUNCHER.parent / one).exists()] == []


def test_cases_for_whole_runs_are_run_by_the_long_check(yard: ModuleType) -> None:
    places = [ROOT / one for one in (yard.SPARK_TESTS, *yard.SWEPT_TESTS)]
    marked = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"mark\.whole", path.read_text())
    ]
    assert [path for path in marked if not any(map(path.is_relative_to, places))] == []


def test_check_runs_the_checks_alone(yard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = note_steps(yard, monkeypatch)
    assert yard.check([]) == 0
    assert noted == yard.CHECKS


def test_long_check_runs_the_checks_and_every_long_program_with_its_counts(
    yard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = note_steps(yard, monkeypatch)
    assert yard.check(["--long", "--schedules", "5", "--seed", "7", "--minutes", "1"]) == 0
    assert list(noted) == [*yard.CHECKS, *yard.LONG]
    assert noted["schedules"] == [
        *("python", "-m", "simulator", "7", "--schedules", "5", "--hours", "0"),
    ]
    assert noted["pairs"] == ["python", "-m", "simulator", "7", "--pair", "--schedules", "20000"]
    assert noted["bugs"] == ["python", "-m", "simulator", "--bugs"]
    assert noted["sweeps"][-2:] == ["--whole", "--timeout=3600"]
    assert "tests/journal" in noted["sweeps"]
    assert noted["coverage"][-2:] == ["tests/wire", "--cov"]
    assert noted["soak"] == ["python", "tools/soak.py", "--minutes", "1"]
    assert noted["takeovers"] == ["python", "tools/takeover_soak.py", "1000"]


def test_long_step_that_fails_fails_the_check_and_shows_its_counts(
    yard: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    yard.BIN.mkdir(parents=True)
    (yard.BIN / "count").write_text("#!/bin/sh\necho $1 schedules, $2 bad\nexit $2\n")
    (yard.BIN / "count").chmod(0o755)
    monkeypatch.setattr(yard, "CHECKS", {})
    long = {"good": ["count", "{schedules}", "0"], "bad": ["count", "{schedules}", "1"]}
    monkeypatch.setattr(yard, "LONG", long)
    assert yard.check(["--long", "--schedules", "3"]) == 1
    printed = capfd.readouterr().out
    assert "3 schedules, 0 bad" in printed
    assert printed.endswith("yard: FAILED: bad\n")


def test_unknown_option_of_check_is_refused(
    yard: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        yard.check(["--lang"])
    assert "unrecognized arguments: --lang" in capsys.readouterr().err


def test_verbs_are_listed_without_setting_anything_up(
    yard: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert yard.main([]) == 0
    printed = capsys.readouterr().out
    assert [verb for verb in yard.OWN_VERBS if f"  {verb} " not in printed] == []
    assert not yard.VENV.exists()


def test_old_python_is_refused_in_one_line() -> None:
    pretend = f"""
import runpy, sys
sys.version_info, sys.version = (3, 8, 1), "3.8.1 (default)"
runpy.run_path({str(LAUNCHER)!r}, run_name="__main__")
"""
    command = [sys.executable, "-c", pretend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr == "yard: Taskyard needs Python 3.11 or later, not 3.8.1.\n"


#: Checks that end at once, and a pytest with two processes of one test each, which wait.
WAITING_TESTS = """
import os, pathlib, threading
import pytest

@pytest.mark.parametrize("number", [0, 1])
def test_waits(number):
    file = pathlib.Path(f"process-{number}")
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    threading.Event().wait()
"""


@pytest.fixture
def checkout(yard: ModuleType) -> Path:
    """Return a checkout with the launcher, whose environment has programs that end at once."""
    shutil.copy(LAUNCHER, yard.ROOT)
    yard.BIN.mkdir(parents=True)
    yard.PYTHON.symlink_to(sys.executable)
    for name in ("ruff", "mypy", "lint-imports"):
        (yard.BIN / name).symlink_to("/bin/true")
    yard.STAMP.write_text(yard.stamp())
    return Path(yard.ROOT)


def write_program(checkout: Path, name: str, script: str) -> None:
    program = checkout / ".venv" / "bin" / name
    program.unlink(missing_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(("verb", "program"), [("check", "mypy"), ("--version", "taskyard")])
def test_programs_of_a_launcher_in_the_background_can_be_interrupted(
    checkout: Path, verb: str, program: str
) -> None:
    """A shell without job control ignores SIGINT in what it starts in the background."""
    write_program(checkout, program, "echo begins; kill -INT $$; echo goes on; exit 1")
    in_background = f"{sys.executable} {checkout}/yard {verb} & wait $!"
    done = subprocess.run(
        ["/bin/sh", "-c", in_background], capture_output=True, text=True, check=False
    )
    assert "begins" in done.stdout, done.stderr
    assert "goes on" not in done.stdout


def test_end_by_sigterm_ends_pytest_and_its_processes_first(checkout: Path) -> None:
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_it.py").write_text(WAITING_TESTS)
    script = (
        f'PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 exec {sys.executable} -m pytest -p xdist.plugin "$@"'
    )
    write_program(checkout, "pytest", script)
    files = [checkout / f"process-{number}" for number in range(2)]
    with subprocess.Popen(
        [sys.executable, checkout / "yard", "test"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        until(lambda: running.poll() or all(map(Path.exists, files)), "both tests wait")
        running.terminate()
        _, errors = running.communicate(timeout=PATIENCE_SECONDS)
    assert (running.returncode, errors) == (128 + signal.SIGTERM, "")
    assert [file for file in files if is_alive(int(file.read_text()))] == []


def test_what_tests_were_skipped_for_is_listed_at_the_end(
    yard: ModuleType, steps: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    for step, skipped in {
        "first": {"a: missing": 1, "b: missing": 2},
        "second": {"a: missing": 3},
    }.items():
        listed = yard.ROOT / yard.cache_of(step) / "v" / "taskyard" / "skipped"
        listed.parent.mkdir(parents=True)
        listed.write_text(json.dumps(skipped))
    assert steps(first=0, second=0) == 0
    assert capfd.readouterr().out.endswith(
        "yard: skipped 4 tests: a: missing\nyard: skipped 2 tests: b: missing\nyard: all good\n"
    )
