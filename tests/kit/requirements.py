"""Everything outside the checkout that a test may need: one table, and the skip of what is missing.

A probe does what the tests do: it runs each program, and loads each library and module. A test
without its requirement is skipped, and fails on CI unless it needs a right of the machine, which no
command installs. `python -m tests.kit.requirements` prints the commands that install what
`./yard test` needs and this machine lacks.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).parents[2]

#: A program that hangs is missing.
SECONDS_MAX: Final = 120

#: Debian's directory of the package `test`, of which another package has most modules. They are
#: for this Python.
CPYTHON_TESTS: Final = Path("/usr/lib/python3.11/test")
CPYTHON_VERSION: Final = (3, 11)

#: Packages that are kept outside of the checkout, because they are not Python's, or are older.
NODE_DIRECTORY: Final = Path.home() / ".cache" / "taskyard-peers"
SNAKEMAKE: Final = Path.home() / ".cache" / "taskyard-snakemake" / "bin" / "snakemake"
PLUGIN: Final = ROOT / "plugins" / "snakemake-executor-plugin-taskyard"


class Missing(Exception):
    """A requirement is not met. The message is the reason."""


class Requirement(NamedTuple):
    #: What is tested with it.
    tests: str
    #: Return the path of its program or directory, or "". Raises `Missing`.
    find: Callable[[], str]
    #: The packages of Debian that bring it.
    packages: str = ""
    #: Another command that installs it.
    command: str = ""
    #: No test of `./yard test` needs it, only tests that are run with `--whole`.
    is_for_whole: bool = False

    @property
    def install(self) -> str:
        """The command that installs it. "" for a right of the machine."""
        return self.command or (self.packages and f"apt-get install {self.packages}")


def program(*names: str, option: str = "--version") -> Callable[[], str]:
    """Return a probe that runs the first of these programs that is in PATH."""

    def find() -> str:
        found = next(filter(None, map(shutil.which, names)), None)
        if found is None:
            raise Missing("not in PATH")
        _run(found, option)
        return found

    return find


def _run(*words: str, text: str = "", status: int = 0, **variables: str) -> None:
    """Run a program to its end. Raise `Missing` if it ends with another status."""
    try:
        done = subprocess.run(
            words,
            input=text,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{words[0]}: {error}") from error
    if done.returncode != status:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        lines = [line for line in lines if "Error: " in line] or lines
        raise Missing(f"{words[0]}: {lines[-1] if lines else f'exit status {done.returncode}'}")


def _c_compiler(*options: str) -> str:
    """Compile and link a program."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise Missing("no cc in PATH")
    with tempfile.TemporaryDirectory() as directory:
        words = (compiler, "-x", "c", "-o", f"{directory}/probe", "-include", "dlfcn.h")
        _run(*words, *options[:-1], "-", *options[-1:], text="int main(void) { return 0; }")
    return compiler


def _zeromq_of_node() -> str:
    node, modules = program("node")(), str(NODE_DIRECTORY / "node_modules")
    _run(node, "-e", 'require("zeromq")', NODE_PATH=modules)
    return modules


def _prometheus() -> str:
    program("prometheus")()
    return program("promtool")()


def _cpython_tests() -> str:
    """Import CPython's tests of process pools, with Debian's package `test` first on the path."""
    if sys.version_info[:2] != CPYTHON_VERSION:
        raise Missing("the checkout has another Python than 3.11")
    if not CPYTHON_TESTS.is_dir():  # this Python may have tests of its own
        raise Missing("No module named 'test.test_concurrent_futures'")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "test").symlink_to(CPYTHON_TESTS)
        _run(sys.executable, "-c", "import test.test_concurrent_futures", PYTHONPATH=directory)
    return str(CPYTHON_TESTS)


def _postgresql() -> str:
    """Run each program that a test uses."""
    sys.path.append(str(ROOT / "tools"))  # pytest has it, `python -m` has not
    from pair_demo.postgresql import find_programs  # noqa: PLC0415  # most tests need none
    from taskyard.errors import NotInstalled  # noqa: PLC0415  # the same

    try:
        directory = find_programs()
    except NotInstalled as error:
        raise Missing("not found") from error
    for name in ("initdb", "postgres", "pg_basebackup"):
        _run(str(directory / name), "--version")
    return str(directory)


def _snakemake() -> str:
    """Import Snakemake with the plugin and the client that it uses."""
    path = os.pathsep.join([str(ROOT / "src"), str(PLUGIN / "src")])
    modules = "import snakemake.cli, snakemake_executor_plugin_taskyard"
    _run(str(SNAKEMAKE.with_name("python")), "-c", modules, PYTHONPATH=path)
    return str(SNAKEMAKE)


def _genome_programs() -> str:
    """Run the programs of the workflow. bwa has no option that succeeds without files."""
    _run("bwa", status=1)
    program("bcftools")()
    return program("samtools")()


def _python(version: str) -> Callable[[], str]:
    """Return a probe for a Python of this version: ours, that of PATH, pyenv's or uv's."""

    def find() -> str:
        named = f"python{version}"
        homes = (".pyenv/versions", ".local/share/uv/python")
        found = [
            *([sys.executable] if version == "{}.{}".format(*sys.version_info) else []),
            *filter(None, [shutil.which(named)]),
            *(
                str(path)
                for home in homes
                for path in sorted((Path.home() / home).glob(f"*{version}*/bin/{named}"))
            ),
        ]
        for one in found:
            # The PATH may have a script that knows of no such version.
            if subprocess.run([one, "-c", ""], check=False, capture_output=True).returncode == 0:
                return one
        raise Missing("not found")

    return find


def _git() -> str:
    """List the files of the checkout."""
    program("git")()
    _run("git", "-C", str(ROOT), "ls-files", "--error-unmatch", "yard")
    return str(ROOT)


def _linux() -> str:
    if sys.platform != "linux":
        raise Missing("it is another system")
    return ""


def _root() -> str:
    if os.geteuid() != 0:
        raise Missing("run as another user")
    return ""


def _mounts() -> str:
    """Mount a disk in memory."""
    _root()
    with tempfile.TemporaryDirectory() as directory:
        _run("mount", "-t", "tmpfs", "tmpfs", directory)
        _run("umount", "-l", directory)
    return ""


def _networks() -> str:
    """Make a network namespace."""
    _root()
    name = f"taskyard-probe-{os.getpid()}"
    _run("ip", "netns", "add", name)
    _run("ip", "netns", "del", name)
    return ""


def _own_network() -> str:
    """Run a program without the networks of the machine."""
    _run("unshare", "--map-root-user", "--net", "ip", "link")
    return ""


def _name_server() -> str:
    """Bind the port of a name server, and mount files for one program."""
    _run("unshare", "--mount", "mount", "--bind", "/etc/hosts", "/etc/resolv.conf")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return _bound(probe, "127.9.9.9", 53)


def _ipv6() -> str:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        return _bound(probe, "::1", 0)


def _bound(probe: socket.socket, address: str, port: int) -> str:
    try:
        probe.bind((address, port))
    except OSError as error:
        raise Missing(f"{address}: {error.strerror}") from error
    return address


def _found_by_the_test() -> str:
    return ""


_NODE: Final = "npm install --silent --no-save --prefix ~/.cache/taskyard-peers zeromq@6"
_SNAKEMAKE: Final = (
    "python3 -m venv ~/.cache/taskyard-snakemake && "
    "~/.cache/taskyard-snakemake/bin/pip install -q 'snakemake>=9,<10' . "
    f"./{PLUGIN.relative_to(ROOT)}"
)

TABLE: Final = {
    # Programs and libraries.
    "bash": Requirement("bash scripts", program("bash"), "bash"),
    "awk": Requirement("the example in sh", program("awk", option="BEGIN {}"), "mawk"),
    "git": Requirement("files of the checkout", _git, "git"),
    "cc": Requirement("a disk that fails", lambda: _c_compiler("-ldl"), "gcc libc6-dev"),
    "zmq.h": Requirement(
        "the example in C",
        lambda: _c_compiler("-include", "zmq.h", "-lzmq"),
        "gcc libc6-dev libzmq3-dev",
    ),
    "node": Requirement("the example in JavaScript", program("node"), "nodejs npm"),
    "zeromq of npm": Requirement("the example in JavaScript", _zeromq_of_node, command=_NODE),
    "chromium": Requirement(
        "pages in a browser",
        program("chromium", "chromium-browser", "google-chrome"),
        "chromium fonts-liberation",
    ),
    "PostgreSQL": Requirement("the store in PostgreSQL", _postgresql, "postgresql"),
    "setpriv": Requirement("throw-away databases", program("setpriv"), "util-linux"),
    "CPython's tests": Requirement(
        "`Executor` by CPython's tests", _cpython_tests, "libpython3.11-testsuite"
    ),
    "snakemake": Requirement("the plugin for Snakemake", _snakemake, command=_SNAKEMAKE),
    "prometheus": Requirement("metrics and alert rules", _prometheus, "prometheus"),
    "systemd-analyze": Requirement("units of systemd", program("systemd-analyze"), "systemd"),
    "ip": Requirement("several networks", program("ip", option="-V"), "iproute2"),
    "redis-server": Requirement("`bench peers`", program("redis-server"), "redis-server"),
    "beanstalkd": Requirement("`bench peers`", program("beanstalkd", option="-v"), "beanstalkd"),
    # Only with --whole.
    "gearmand": Requirement(
        "`bench peers`", program("gearmand"), "gearman-job-server", is_for_whole=True
    ),
    "parallel": Requirement("lists of `map`", program("parallel"), "parallel", is_for_whole=True),
    "java": Requirement(
        "the user's Java",
        program("java", option="-version"),
        "default-jre-headless",
        is_for_whole=True,
    ),
    "genome programs": Requirement(
        "the plugin for Snakemake", _genome_programs, "bwa samtools bcftools", is_for_whole=True
    ),
    **{
        f"Python {version}": Requirement(
            "the wheel",
            _python(version),
            command=f".venv/bin/uv python install {version}",
            is_for_whole=True,
        )
        for version in ("3.11", "3.12", "3.13", "3.14")
    },
    # Rights of the machine, and its networks.
    "Linux": Requirement("protection against floods", _linux),
    "root": Requirement("other users", _root),
    "mounts": Requirement("full and read-only disks", _mounts),
    "network namespaces": Requirement("several networks", _networks),
    "own network": Requirement("a remote broker", _own_network),
    "own name server": Requirement("a slow name server", _name_server),
    "IPv6": Requirement("IPv6", _ipv6),
    "package index": Requirement("the wheel in a fresh environment", _found_by_the_test),
}


@cache
def problem(name: str) -> str:
    """Return why a requirement is not met, or ""."""
    try:
        found(name)
    except Missing as error:
        return str(error)
    return ""


@cache
def found(name: str) -> str:
    """Return the path that the probe of a requirement finds. Raises `Missing`."""
    return TABLE[name].find()


def need(name: str) -> str:
    """Return the path of a requirement. Without it skip the test, or fail it on CI."""
    if why := problem(name):
        skip(name, why)
    return found(name)


def skip(name: str, why: str) -> NoReturn:
    """Skip a test for want of a requirement, or fail it on CI."""
    install = TABLE[name].install
    text = f"{name}: {why}" + (f" ({install})" if install else "")
    if install and os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


def skipped(reports: list[pytest.TestReport]) -> dict[str, int]:
    """Return the reasons of `skip` with how many tests each of them skipped."""
    counts: dict[str, int] = {}
    for report in reports:
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason.partition(": ")[0] in TABLE:
                counts[reason] = counts.get(reason, 0) + 1
    return counts


def commands() -> list[str]:
    """Return the commands that install what `./yard test` needs and this machine lacks."""
    lacking = [row for name, row in TABLE.items() if not row.is_for_whole and problem(name)]
    packages = sorted({one for row in lacking for one in row.packages.split()})
    install = f"apt-get install -y -qq --no-install-recommends {' '.join(packages)}"
    by_apt = ["apt-get update -qq", install] if packages else []
    return by_apt + [row.command for row in lacking if row.command]


if __name__ == "__main__":
    sys.stdout.writelines(f"{command}\n" for command in commands())
