"""The JVM of a session's driver, started with as little as possible.

Owns the SPARK_HOME of our sessions: a directory of links to PySpark, without jars that no job uses.
Its `spark-submit` starts the JVM of a session on one machine at once. Spark's own script starts
another JVM that builds the command line, and then a program that interprets it: a third of a
second. That command line is asked for once, and kept. Knows nothing of sessions.
"""

import contextlib
import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

from taskyard.pipeline import java
from taskyard.pipeline.java import Java

#: The beginnings of the names of jars that no job uses. Each session would load the functions of
#: Spark's machine learning by Scala's reflection, which takes a second of CPU.
_UNUSED_JARS: Final = ("spark-mllib_",)

_HOME_VARIABLE: Final = "SPARK_HOME"

#: Names the file with the JVM's options for our `spark-submit`, one on each line.
_OPTIONS_VARIABLE: Final = "TASKYARD_JVM_OPTIONS"

#: With one of these variables, Spark's own script is needed to interpret it.
_USER_VARIABLES: Final = (_HOME_VARIABLE, "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS")

#: The beginnings of settings that Spark's own script interprets.
_SCRIPT_SETTINGS: Final = (
    "spark.archives",
    "spark.driver.extraClassPath",
    "spark.driver.extraLibraryPath",
    "spark.files",
    "spark.jars",
    "spark.kerberos",
    "spark.submit",
)

#: Names Scala's version for programs that start further JVMs, such as the workers of a cluster.
_SCALA_VARIABLE: Final = "SPARK_SCALA_VERSION"
_SCALA = re.compile(r"spark-core_([\d.]+)-")

_SUBMIT_CLASS: Final = "org.apache.spark.deploy.SparkSubmit"
_GATEWAY_CLASS: Final = "org.apache.spark.api.python.PythonGatewayServer"

#: The program that builds command lines takes a fraction of a second.
_LAUNCHER_SECONDS_MAX: Final = 60

_STDERR: Final = 2

_SCRIPT: Final = f"""\
#!/bin/sh
# Starts the JVM of a session on one machine, or else Spark's own script.
[ -n "${_OPTIONS_VARIABLE}" ] || exec "$SPARK_HOME/bin/spark-class" {_SUBMIT_CLASS} "$@"
set --
while IFS= read -r option; do set -- "$@" "$option"; done < "${_OPTIONS_VARIABLE}"
unset {_OPTIONS_VARIABLE}
exec "$JAVA_HOME/bin/java" "$@" {_GATEWAY_CLASS}
"""


def spark_home() -> Path:
    """Return the user's SPARK_HOME, or PySpark's directory without the jars that no job uses.

    The latter is made of links. A jar that the user adds to PySpark makes another directory.
    """
    given = os.environ.get(_HOME_VARIABLE)
    if given:
        return Path(given)
    real = Path(pyspark.__path__[0])
    jars = sorted(path.name for path in (real / "jars").glob("*"))
    used = [name for name in jars if not name.startswith(_UNUSED_JARS)]
    home = java.cache_directory() / f"spark-{_digest(f'{real} {used} {_SCRIPT}')}"

    def fill(directory: Path) -> None:
        for folder in ("jars", "bin"):
            (directory / folder).mkdir()
        others = [path.name for path in real.iterdir() if path.name not in ("jars", "bin")]
        others += [f"bin/{path.name}" for path in (real / "bin").iterdir()]
        for name in (*others, *(f"jars/{name}" for name in used)):
            (directory / name).symlink_to(real / name)
        script = directory / "bin" / "spark-submit"
        script.unlink(missing_ok=True)
        script.write_text(_SCRIPT)
        script.chmod(0o755)

    if not home.is_dir():
        java.make_directory(home, fill)
    return home


def archived_program() -> str:
    """Return the name of the program whose classes are archived.

    One archive for all jobs: most classes are Spark's own, and filling an archive costs more than
    a few classes that it lacks. An archive fits one list of jars.
    """
    return f"{spark_home()} {pyspark.__version__}"


def launch(found: Java, settings: Mapping[str, str], *, is_local: bool) -> None:
    """Start the JVM with its stdout sent to our stderr, unless one runs.

    Our stdout is for results, and its reader must not wait for a JVM that outlives us by seconds.
    The JVM gets its own process session, so that terminal signals reach only us. `jvm` ends it.
    """
    if SparkContext._gateway is not None:  # noqa: SLF001  # Spark has no other way to say it
        return
    options = _options(found, settings) if is_local and is_plain(settings) else []
    conf = SparkConf().setAll([*settings.items()])
    with _variables(options):
        gateway = launch_gateway(conf, {"stdout": _STDERR, "start_new_session": True})  # type: ignore[no-untyped-call]
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001  # as above


def end() -> None:
    """End the JVM of a stopped session, and wait for it. It writes its class archive at exit."""
    gateway = SparkContext._gateway  # noqa: SLF001  # as above
    if gateway is not None:
        gateway.proc.stdin.close()
        gateway.proc.wait()


def is_plain(settings: Mapping[str, str]) -> bool:
    """Return whether no setting and no variable needs Spark's own script."""
    if any(os.environ.get(name) for name in _USER_VARIABLES):
        return False
    has_conf = (Path(pyspark.__path__[0]) / "conf").exists()
    return not has_conf and not any(name.startswith(_SCRIPT_SETTINGS) for name in settings)


def _options(found: Java, settings: Mapping[str, str]) -> list[str]:
    """Return the JVM's options. Empty if Spark's own script must find them."""
    usual = _usual_options(found)
    if not usual:
        return []
    heap = f"-Xmx{settings['spark.driver.memory']}"
    return [*usual, heap, *shlex.split(settings["spark.driver.extraJavaOptions"])]


def _usual_options(found: Java) -> list[str]:
    """Return the options that Spark gives every JVM: class path, modules to open.

    Spark's own program is asked once for each SPARK_HOME. Returns an empty list if it fails.
    """
    home = spark_home()
    kept = java.cache_directory() / f"{home.name}.options"
    if not kept.exists():
        asked = [_SUBMIT_CLASS, "pyspark-shell"]
        launcher = [str(found.home / "bin" / "java"), *java.launcher_options(found)]
        launcher += ["-cp", f"{home}/jars/*", "org.apache.spark.launcher.Main", *asked]
        env = {**os.environ, _HOME_VARIABLE: str(home), _SCALA_VARIABLE: _scala_version(home)}
        try:
            done = subprocess.run(
                launcher, env=env, capture_output=True, timeout=_LAUNCHER_SECONDS_MAX, check=True
            )
            words = os.fsdecode(done.stdout).lstrip("\0\n").split("\0")
            options = words[1 : words.index(_SUBMIT_CLASS)]
        except (OSError, subprocess.SubprocessError, ValueError):
            return []
        java.write_file(kept, "\n".join(one for one in options if not one.startswith("-Xmx")))
    return kept.read_text().splitlines()


def _scala_version(home: Path) -> str:
    """Return the version in the names of Spark's jars. Programs that start JVMs need it."""
    named = (_SCALA.match(path.name) for path in (home / "jars").glob("spark-core_*"))
    return next((found[1] for found in named if found is not None), "")


@contextlib.contextmanager
def _variables(options: list[str]) -> Iterator[None]:
    """Set variables for a JVM that starts. Programs that start later find their own."""
    added: dict[str, str] = {}
    if _HOME_VARIABLE not in os.environ:
        added[_HOME_VARIABLE] = str(spark_home())
    if options:
        text = "\n".join(options) + "\n"
        place = java.cache_directory() / f"jvm-{_digest(text)}.options"
        if not place.exists():
            java.write_file(place, text)
        added[_OPTIONS_VARIABLE] = str(place)
        # Spark's script sets both. All Python programs of a job hash strings alike.
        added["PYTHONHASHSEED"] = "0"
        added[_SCALA_VARIABLE] = _scala_version(spark_home())
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
