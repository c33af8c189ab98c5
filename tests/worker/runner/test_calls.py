"""Tasks of `call` in real Python processes: results, output, crashes, allow-list."""

import os
from pathlib import Path

import pytest

from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.limits import REASON_BYTES_MAX
from taskyard.worker.jobs import (
    OUTPUT_TAIL_BYTES,
    RESULT_BYTES_MAX,
    Job,
)
from tests.worker.runner_harness import (
    a_fifo,
    a_runner,
    assert_is_quiet,
    call,
    done,
    failed,
    failed_final,
    has_ended,
    open_descriptors,
    result_of,
    result_of_call,
    turns,
)

pytestmark = pytest.mark.usefixtures("home")

NO_CLASS = b"yard:sys.path.insert: sys is not a class (use module:function or module:Class.method)"
NO_MODULE = b"ModuleNotFoundError: No module named '%b'%b"


def test_result_is_the_return_value_as_json() -> None:
    job = call("yard:add", 2, kwargs={"b": 3})
    assert result_of_call(job) == done(job, b"5")
    job = call("yard:add", "ä", "€")
    assert result_of_call(job) == done(job, '"ä€"'.encode())
    job = call("yard:nothing")
    assert result_of_call(job) == done(job, b"null")


def test_method_of_a_class_can_be_called() -> None:
    job = call("yard:Adder.add", 1, 2)
    assert result_of_call(job) == done(job, b"3")


def test_call_of_a_custom_service_is_run() -> None:
    plain = call("yard:add", 1, 2)
    job = Job(b"t", 1, b"cpu", plain.payload)
    assert result_of_call(job) == done(job, b"3")


def test_process_is_kept_for_the_next_call() -> None:
    with a_runner(allow=["yard"]) as runner:
        for _ in range(3):
            runner.start(call("yard:pid"))
        pids = {found.text for found in turns(runner, 3)}
        assert len(pids) == 1
        assert pids != {str(os.getpid()).encode()}


def test_output_belongs_to_its_call() -> None:
    with a_runner(allow=["yard"]) as runner:
        jobs = [call("yard:echo", "one"), call("yard:nothing"), call("yard:echo", "ä")]
        for job in jobs:
            runner.start(job)
        outputs = [found.output for found in turns(runner, 3)]
        assert outputs == [b"one\n", b"", "ä\n".encode()]


def test_exception_is_the_reason_and_its_traceback_is_the_output() -> None:
    found = result_of_call(call("yard:raise_error", "no\nsuch thing"))
    assert (found.outcome, found.text) == (Outcome.FAILED, b"ValueError: no\nsuch thing")
    assert found.output.startswith(b"before\nTraceback (most recent call last):\n  File ")
    assert found.output.endswith(b"ValueError: no\nsuch thing\n")
    assert b"/yard.py" in found.output
    assert b"child.py" not in found.output


def test_final_exception_is_not_retried() -> None:
    found = result_of_call(call("yard:raise_final", "no such page"))
    assert (found.outcome, found.text) == (
        Outcome.FAILED_FINAL,
        b"taskyard.errors.Final: no such page",
    )
    assert found.output.endswith(b"Final: no such page\n")


def test_wrong_use_of_our_own_functions_is_not_retried() -> None:
    found = result_of_call(call("yard:submit_wrongly"))
    assert found.outcome == Outcome.FAILED_FINAL
    assert found.text.startswith(b"taskyard.errors.UserError: ")


@pytest.mark.parametrize(
    ("args", "outcome"),
    [
        (("UnknownName", "no such task"), Outcome.FAILED_FINAL),
        (("Refused", "two tasks", "duplicate"), Outcome.FAILED_FINAL),
        (("Refused", "too many tasks", "full"), Outcome.FAILED),
        (("Refused", "later", "shutting-down"), Outcome.FAILED),
        (("StateLocked", "in use"), Outcome.FAILED),
        (("NoBroker", "none answers"), Outcome.FAILED),
        (("TaskFailed", "another task"), Outcome.FAILED),
    ],
)
def test_errors_of_ours_that_pass_are_retried(args: tuple[str, ...], outcome: Outcome) -> None:
    assert result_of_call(call("yard:raise_ours", *args)).outcome == outcome


def test_text_of_an_exception_is_bounded() -> None:
    found = result_of_call(call("yard:raise_error", "x" * 3_000_000))
    assert found.text.startswith(b"ValueError: xxx")
    assert len(found.text) == REASON_BYTES_MAX
    assert len(found.output) == OUTPUT_TAIL_BYTES


def test_exception_with_a_broken_str_is_still_reported() -> None:
    found = result_of_call(call("yard:raise_unprintable"))
    assert found.text == b"yard.Unprintable: (its message can't be shown)"


def test_exception_that_is_not_an_error_does_not_end_the_process() -> None:
    found = result_of_call(call("yard:raise_cancelled"))
    assert found.text == b"asyncio.exceptions.CancelledError"


@pytest.mark.parametrize(
    ("job", "how", "output"),
    [
        (call("yard:leave_at_once", 3), b"exit status 3", b"last words\n"),
        (call("yard:leave", 4), b"exit status 4", b""),
        (call("yard:leave", None), b"exit status 0", b""),
        (call("yard:leave", "too bad"), b"exit status 1", b"too bad\n"),
    ],
)
def test_call_that_ends_its_process_has_failed(job: Job, how: bytes, output: bytes) -> None:
    assert result_of_call(job) == failed(job, b"the process died: " + how, output)


def test_crash_shows_where_it_was() -> None:
    found = result_of_call(call("yard:crash"))
    assert (found.outcome, found.text) == (
        Outcome.FAILED,
        b"the process died: killed by SIGSEGV",
    )
    assert b"in crash" in found.output


def test_process_that_died_is_replaced() -> None:
    with a_runner(allow=["yard"]) as runner:
        before = open_descriptors()
        for number in range(6):
            runner.start(call("yard:crash") if number % 2 else call("yard:add", number))
        outcomes = [found.outcome for found in turns(runner, 6)]
        assert outcomes == [Outcome.DONE, Outcome.FAILED] * 3
        assert open_descriptors() == before


def test_process_that_dies_between_calls_is_replaced_silently(home: Path) -> None:
    fifo = a_fifo(home / "fifo")
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:die_later"))
        pid = int(turns(runner)[0].text)
        Path(fifo).write_text("now")
        assert has_ended(pid)
        job = call("yard:add", 1, 2)
        runner.start(job)
        assert turns(runner) == [done(job, b"3")]


def test_result_that_is_not_json_fails_for_good() -> None:
    job = call("yard:strange")
    text = b"result of type set can't be sent as JSON: Object of type set is not JSON serializable"
    assert result_of_call(job) == failed_final(job, text)
    assert result_of_call(call("yard:lost")).text.startswith(
        b"result of type float can't be sent as"
    )


def test_too_large_result_fails_for_good() -> None:
    job = call("yard:letters", RESULT_BYTES_MAX - 2)
    assert result_of_call(job) == done(job, b'"' + b"x" * (RESULT_BYTES_MAX - 2) + b'"')
    job = call("yard:letters", RESULT_BYTES_MAX - 1)
    text = (
        b"result too large: 1048577 bytes, at most 1048576 (write it to a file and return the "
        b"file's name)"
    )
    assert result_of_call(job) == failed_final(job, text)


def test_payload_larger_than_the_sockets_room_arrives_whole() -> None:
    with a_runner(allow=["yard"]) as runner:
        jobs = [call("yard:size", "x" * 5_000_000), call("yard:size", "x")]
        for job in jobs:
            runner.start(job)
        assert turns(runner, 2) == [done(jobs[0], b"5000000"), done(jobs[1], b"1")]
        assert_is_quiet(runner)


def test_memory_is_bounded_whatever_a_call_prints() -> None:
    job = call("yard:flood", 10_000_000)
    printed = Blob(b"", 10_000_000, bytes(OUTPUT_TAIL_BYTES))
    assert result_of_call(job) == done(job, b"null", printed)


def test_call_may_close_stdout() -> None:
    with a_runner(allow=["yard"]) as runner:
        jobs = [call("yard:close_all"), call("yard:add", 1)]
        for job in jobs:
            runner.start(job)
        assert turns(runner, 2) == [done(jobs[0], b"null"), done(jobs[1], b"1")]


def test_refused_module_is_named_with_the_option_that_allows_it() -> None:
    job = call("os:getpid")
    reason = b"module os is not allowed (start the worker with --allow os)"
    assert result_of_call(job) == failed_final(job, reason)


def test_refusal_costs_no_process() -> None:
    with a_runner() as runner:
        before = open_descriptors()
        runner.start(call("yard:add"))
        assert [found.outcome for found in runner.turn()] == [Outcome.FAILED_FINAL]
        assert open_descriptors() == before


@pytest.mark.parametrize(
    ("function", "allow", "text"),
    [
        ("package.inner:f", ["package"], b'"inner"'),
        ("package.inner:f", ["package.inner"], b'"inner"'),
        ("operator:add", ["operator"], b"3"),
        ("math:hypot", ["builtins", "math"], b"2.23606797749979"),
        ("datetime:date.fromordinal", ["datetime"], b"result of type date"),
    ],
)
def test_function_of_an_allowed_module_can_be_called(
    function: str, allow: list[str], text: bytes
) -> None:
    args = {"operator:add": (1, 2), "math:hypot": (1, 2), "datetime:date.fromordinal": (1,)}
    found = result_of(call(function, *args.get(function, ())), allow=allow)
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("package2:f", b"module package2 is not allowed (start the worker with --allow pack"),
        ("yard:run", b"yard:run is defined in subprocess: module subprocess is not allowed "),
        ("yard:join", b"yard:join is defined in posixpath: module posixpath is not allowed "),
        ("yard:os.system", b"yard:os.system: os is not a class (use module:function"),
        ("yard:SIZE", b"yard:SIZE: not callable (type int)"),
        ("package:getppid", b"package:getppid is defined in posix: module posix is not allowed"),
    ],
)
def test_function_outside_the_allowed_modules_is_failed_final(function: str, reason: bytes) -> None:
    found = result_of(call(function), allow=["yard", "package"])
    assert found.outcome == Outcome.FAILED_FINAL
    assert found.text.startswith(reason)


def test_names_in_all_are_allowed_wherever_they_are_defined() -> None:
    assert result_of(call("package:getpid"), allow=["package"]).outcome == Outcome.DONE


def test_call_cannot_change_what_the_next_one_finds(home: Path) -> None:
    (home / "evil").mkdir()
    (home / "evil" / "planted.py").write_text("def f(): return 'planted'\n")
    jobs = [
        call("yard:__setattr__", "__path__", [str(home / "evil")]),
        call("yard.planted:f"),
        call("yard:sys.path.insert", 0, str(home / "evil")),
        call("yard:search", str(home / "evil")),
        call("yard.planted:f"),
        call("planted:f"),
        call("package.planted:f"),
        call("package.inner:f"),
    ]
    with a_runner(allow=["yard", "package", "planted"]) as runner:
        for job in jobs:
            runner.start(job)
        found = turns(runner, len(jobs))
    assert [(one.outcome, one.text) for one in found] == [
        (Outcome.FAILED_FINAL, b"yard:__setattr__: a name that begins with _ is not allowed"),
        (Outcome.FAILED, NO_MODULE % (b"yard.planted", b"; 'yard' is not a package")),
        (Outcome.FAILED_FINAL, NO_CLASS),
        (Outcome.DONE, b"null"),
        (Outcome.FAILED, NO_MODULE % (b"yard.planted", b"; 'yard' is not a package")),
        (Outcome.FAILED, NO_MODULE % (b"planted", b"")),
        (Outcome.FAILED, NO_MODULE % (b"package.planted", b"")),
        (Outcome.DONE, b'"inner"'),
    ]


def test_module_is_imported_in_the_directory_and_environment_of_the_worker(home: Path) -> None:
    (home / "elsewhere").mkdir()
    (home / "package" / "place.py").write_text(
        "import os\nSEEN = os.getcwd(), os.environ.get('CHOSEN')\n"
        "def seen(): return [SEEN, os.getcwd(), os.environ.get('CHOSEN')]\n"
    )
    elsewhere = str(home / "elsewhere")
    job = call("package.place:seen", cwd=elsewhere, env={"CHOSEN": "x"})
    text = f'[["{home}",null],"{elsewhere}","x"]'.encode()
    assert result_of(job, allow=["package"]) == done(job, text)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("missing:f", b"ModuleNotFoundError: No module named 'missing'"),
        ("yard:missing", b"AttributeError: module 'yard' has no attribute 'missing'"),
        ("broken:f", b"SyntaxError: invalid syntax (broken.py, line 1)"),
    ],
)
def test_function_that_can_not_be_found_is_a_failure(function: str, reason: bytes) -> None:
    found = result_of(call(function), allow=["missing", "yard", "broken"])
    assert (found.outcome, found.text) == (Outcome.FAILED, reason)


def test_module_of_the_user_is_found_and_replaces_none_of_ours(home: Path) -> None:
    assert (home / "json.py").exists()
    assert result_of_call(call("yard:where")).text == f'"{home}"'.encode()


def test_environment_and_directory_are_for_one_call(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_BOTH", "the worker's")
    env = {"OF_BOTH": "the task's", "OWN": "also"}
    with a_runner(allow=["yard"]) as runner:
        for own_env, cwd in ((env, "/"), (None, None)):
            runner.start(call("yard:look", "OF_BOTH", env=own_env, cwd=cwd))
            runner.start(call("yard:look", "OWN", env=own_env, cwd=cwd))
            runner.start(call("yard:where", env=own_env, cwd=cwd))
        texts = [found.text.decode() for found in turns(runner, 6)]
        assert texts == ['"the task\'s"', '"also"', '"/"', '"the worker\'s"', "null", f'"{home}"']


def test_variables_that_can_not_all_be_set_are_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, text)
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:nothing", env={"OWN": "left", "OTHER": "\u20ac"}))
        runner.start(call("yard:look", "OWN"))
        refused, later = turns(runner, 2)
    assert refused.text.startswith(b"UnicodeEncodeError: 'ascii' codec can't encode")
    assert later.text == b"null"


def test_each_call_begins_in_the_directory_of_the_worker(home: Path) -> None:
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:go", "/"))
        runner.start(call("yard:where"))
        assert turns(runner, 2)[1].text == f'"{home}"'.encode()


def test_missing_directory_is_in_the_reason() -> None:
    found = result_of_call(call("yard:where", cwd="/nowhere"))
    assert found.text == b"FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'"


def test_function_gets_its_task_in_the_environment() -> None:
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:look", "TASKYARD_TASK", name=b"a/b"))
        runner.start(call("yard:look", "TASKYARD_ATTEMPT", attempt=7))
        assert [found.text for found in turns(runner, 2)] == [b'"a/b"', b'"7"']
