"""One task as a user writes it: the values of each key, and the errors."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.campaign.task_spec import (
    KEYS,
    InvalidTask,
    TaskSpec,
    check_task,
    resources_of,
    to_row,
)
from taskyard.campaign.values import InvalidValue, TimeSpec, from_cell, read_duration
from taskyard.core.limits import AFTER_MAX, SECOND_NS
from tests.kit.cases import each_case

MINUTE_NS = 60 * SECOND_NS


def a_task(**keys: Any) -> TaskSpec:
    return check_task({"name": "a", "argv": ["true"]} | keys)


def why_not(raw: object) -> str:
    with pytest.raises(InvalidTask) as refused:
        check_task(raw)
    return str(refused.value)


def test_task_with_every_key_is_accepted() -> None:
    raw = {
        "name": "é",
        "call": "package.module:function",
        "args": [1, None, {"x": []}],
        "kwargs": {"width": 2.5},
        "after": ["b", "c", "b"],
        "service": "cpu",
        "lane": "disk",
        "priority": -1000,
        "due": "2031-05-04T12:00:00+02:00",
        "expiry": "2031-05-04T11:00:00Z",
        "retries": [1, 2.5],
        "backoff": "2m",
        "time_limit": 90,
        "slots": 4,
        "env": {"A": "1"},
        "cwd": "there",
    }
    ten_ns = 1_935_655_200 * SECOND_NS
    assert check_task(raw) == TaskSpec(
        name="é",
        call="package.module:function",
        args=[1, None, {"x": []}],
        kwargs={"width": 2.5},
        after=("b", "c"),
        service="cpu",
        lane="disk",
        priority=-1000,
        due=TimeSpec(ten_ns),
        expiry=TimeSpec(ten_ns + 3600 * SECOND_NS),
        retries=(1, 2.5),
        backoff_ns=2 * MINUTE_NS,
        time_limit_ns=90 * SECOND_NS,
        slots=4,
        env={"A": "1"},
        cwd="there",
    )


def test_files_are_lists_without_duplicates() -> None:
    spec = a_task(inputs=["b", "a", "b"], outputs="c d")
    assert (spec.inputs, spec.outputs) == (["b", "a"], ["c d"])


def test_resources_are_read_exactly() -> None:
    spec = a_task(cpus=1.5, memory="4G", gpus="0.1", resources={"tape-drive": 2, "none": 0})
    needed = ((b"cpus", 15_000), (b"gpus", 1_000), (b"memory", 4 << 30), (b"tape-drive", 20_000))
    assert resources_of(spec) == needed
    assert resources_of(check_task(to_row(spec))) == needed
    assert resources_of(a_task(cpus=0, memory=0, gpus=0, resources={})) == ()


@each_case(
    ("value", "amount"),
    [
        ("512M", 512 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("4gb", 4_000_000_000),
        ("7", 7),
        ("1k", 1024),
        ("2TiB", 2 << 40),
        (10**12, 10**12),
        (4e9, 4_000_000_000),
    ],
)
def test_memory_is_read_in_bytes(value: object, amount: int) -> None:
    assert a_task(memory=value).memory == amount


@each_case(
    ("key", "value", "problem"),
    [
        ("memory", "4 X", "must be a size"),
        ("memory", "-1", "must be a size"),
        ("memory", True, "must be a size"),
        ("memory", "9999999T", "must be from 0 to"),
        ("cpus", -1, "must be a number of 0 or more"),
        ("cpus", 0.00001, "must be a number of 0 or more"),
        ("cpus", True, "must be a number of 0 or more"),
        ("gpus", "0,1", "must be a number of 0 or more"),
        ("gpus", 10**18, "must be at most"),
        ("resources", ["license"], "must be an object"),
        ("resources", {"a b": 1}, "must have names of letters"),
        ("resources", {"gpus": 1}, 'must not have "gpus"'),
        ("resources", {"license": "x"}, 'has "license", which must be a number'),
        ("resources", {f"r{number}": 1 for number in range(30)}, "must have at most 29 names"),
    ],
)
def test_invalid_resource_is_refused(key: str, value: object, problem: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        a_task(**{key: value})
    assert str(refused.value).startswith(f'"{key}" {problem}')


def test_resources_of_a_cell_are_words_or_json() -> None:
    expected = {"license": "1", "tape": "0.5"}
    assert from_cell("resources", "license=1 tape=0.5") == expected
    assert from_cell("resources", '{"license": 1}') == {"license": 1}


def test_null_is_a_missing_key() -> None:
    nothing = dict.fromkeys(set(KEYS) - {"name", "argv"})
    assert a_task(**nothing) == TaskSpec(name="a", argv=["true"])


@each_case(
    ("payload", "kept"),
    [("", b""), ("é", "é".encode()), ({"b": 1, "a": [2]}, b'{"b":1,"a":[2]}'), (b"\xff", b"\xff")],
)
def test_payload_is_kept_as_bytes(payload: object, kept: bytes) -> None:
    assert check_task({"name": "a", "payload": payload}).payload == kept


@each_case(
    ("value", "duration_ns"),
    [
        ("90s", 90 * SECOND_NS),
        ("5m", 5 * MINUTE_NS),
        ("1h30m", 90 * MINUTE_NS),
        ("2d", 2880 * MINUTE_NS),
        ("1d1h1m1s1ms", 90_061_001_000_000),
        ("250ms", SECOND_NS // 4),
        ("0.000000001s", 1),
        (" 1.5h ", 90 * MINUTE_NS),
        ("90", 90 * SECOND_NS),
        (0, 0),
        (0.1, SECOND_NS // 10),
        (1e-9, 1),
        (90, 90 * SECOND_NS),
        (timedelta(minutes=5), 5 * MINUTE_NS),
    ],
)
def test_duration_is_read_exactly(value: object, duration_ns: int) -> None:
    assert read_duration(value) == duration_ns


@each_case(
    "value",
    [
        *("", "s", "5x", "5 m", "m5", "30m1h", "1h1h", "-5s", "1e3", "٣s", "1_000", "inf", "nan"),
        *("5ms1s", "5S", "1..5s"),
        *(True, -1, float("inf"), float("nan"), None, [], 10**10, 1e300, "9" * 20, "300000d"),
    ],
)
def test_invalid_duration_is_refused(value: object) -> None:
    with pytest.raises(InvalidValue):
        read_duration(value)


@each_case(
    ("value", "when"),
    [
        ("10m", TimeSpec(10 * MINUTE_NS, from_now=True)),
        (600, TimeSpec(10 * MINUTE_NS, from_now=True)),
        ("1970-01-01T00:00:01Z", TimeSpec(SECOND_NS)),
        ("1970-01-01 01:00:00.000001+01:00", TimeSpec(1000)),
        (datetime(1970, 1, 2, tzinfo=UTC), TimeSpec(1440 * MINUTE_NS)),
    ],
)
def test_point_in_time_is_a_date_or_a_duration_from_now(value: object, when: TimeSpec) -> None:
    assert a_task(due=value).due == a_task(expiry=value).expiry == when


def test_from_now_is_counted_from_the_moment_that_is_given() -> None:
    assert TimeSpec(5, from_now=True).at_ns(100) == 105
    assert TimeSpec(5).at_ns(100) == 5


def test_number_of_retries_is_as_many_single_intervals() -> None:
    assert a_task(retries=0).retries == ()
    assert a_task(retries=3).retries == (1, 1, 1)
    assert a_task(retries=3).backoff_ns == SECOND_NS
    assert a_task().retries is None


@each_case(
    ("raw", "reason"),
    [
        ([], 'must be an object with "name" and more, not []'),
        ({}, 'has no "name"'),
        ({"name": None}, 'has no "name"'),
        ({"name": "a"}, 'has no work (give "argv", "call" or "payload")'),
        (
            {"name": "a", "argv": ["x"], "payload": "y"},
            'must have only one of "argv", "call" and "payload"',
        ),
        (
            {"name": "a", "argv": ["x"], "args": []},
            'has "args" or "kwargs" without "call"',
        ),
        (
            {"name": "a", "payload": "x", "kwargs": {}},
            'has "args" or "kwargs" without "call"',
        ),
        (
            {"name": "a", "payload": "x", "cwd": "y"},
            'has "env" or "cwd", which are for "argv" and "call" only',
        ),
        (
            {"name": "a", "call": "m:f", "outputs": ["y"]},
            'has "inputs" or "outputs", which are for "argv" only',
        ),
        (
            {"name": "a", "call": "m:f", "final_exit_status": 3},
            'has "final_exit_status", which is for "argv" only',
        ),
    ],
)
def test_task_without_a_name_or_with_wrong_work_is_refused(raw: object, reason: str) -> None:
    assert why_not(raw) == reason


@each_case(
    ("key", "advice"),
    [
        ("afer", "has an unknown key 'afer' (did you mean \"after\"?)"),
        ("Argv", "has an unknown key 'Argv' (did you mean \"argv\"?)"),
        ("time-limit", "has an unknown key 'time-limit' (did you mean \"time_limit\"?)"),
        ("depends_on", "has an unknown key 'depends_on' (did you mean \"after\"?)"),
        ("timeout", "has an unknown key 'timeout' (did you mean \"time_limit\"?)"),
        ("zzz", f"has an unknown key 'zzz' (known keys: {', '.join(KEYS)})"),
        ("campaign", 'has "campaign", which is an option of loading, not a key of a task'),
    ],
)
def test_unknown_key_is_refused_with_a_suggestion(key: str, advice: str) -> None:
    assert why_not({"name": "a", "argv": ["true"], key: 1}) == advice


@each_case(
    ("key", "value", "reason"),
    [
        ("name", "", "must not be empty"),
        ("name", 7, "must be text, not 7"),
        ("name", "a\nb", "must not contain control characters, such as those in 'a\\nb'"),
        ("name", "\0", "must not contain control characters, such as those in '\\x00'"),
        ("name", "é" * 513, "must have at most 1024 bytes, not 1026"),
        ("name", "\ud800", "must be Unicode text, not '\\ud800'"),
        ("argv", "echo hi", 'must be a list of words, such as ["sleep", "1"], not \'echo hi\''),
        ("argv", [], "must name a program first"),
        ("argv", ["", "x"], "must name a program first"),
        ("argv", ["sleep", 1], "must contain only texts, not 1"),
        ("argv", ["x\0"], "must not contain a NUL character: 'x\\x00'"),
        ("after", "b", 'must be a list of names, such as ["first", "second"], not \'b\''),
        ("after", ["b", ""], "has a name that must not be empty"),
        ("after", ["b", 1], "must contain only texts, not 1"),
        (
            "after",
            ["b"] * (AFTER_MAX + 1),
            "must have at most 100000 names, not 100001 (put a task in between)",
        ),
        ("service", "", "must not be empty"),
        ("lane", 3, "must be text, not 3"),
        ("priority", 1001, "must be a whole number from -1000 to 1000, not 1001"),
        ("priority", True, "must be a whole number from -1000 to 1000, not True"),
        ("priority", 1.0, "must be a whole number from -1000 to 1000, not 1.0"),
        ("slots", 0, "must be at least 1, not 0"),
        ("due", "2031-05-04T12:00", "must have a time zone, such as 2031-05-04T12:00:00Z for UTC"),
        (
            *("due", 1_935_655_200),
            ("is more than ten years from now: 1935655200 (write a date as 2031-05-04T12:00:00Z)"),
        ),
        ("due", "1969-12-31T00:00:00Z", "must be from 1970 to 2262, not 1969-12-31T00:00:00+00:00"),
        (
            *("expiry", "soon"),
            (
                "must be a time, such as 2031-05-04T12:00:00Z, "
                "or a duration from now, such as 10m, not 'soon'"
            ),
        ),
        (
            *("retries", -1),
            "must be a number from 0 to 1000, or a list of multiples, such as [1, 2, 5], not -1",
        ),
        ("retries", [1, -1], "must have numbers of 0 or more, not -1"),
        ("retries", [float("nan")], "must have numbers of 0 or more, not nan"),
        ("retries", [1] * 1001, "must have at most 1000 steps, not 1001"),
        (
            *("time_limit", "soon"),
            "must be a duration, such as 90s, 5m or 1h30m, or a number of seconds, not 'soon'",
        ),
        ("time_limit", 0, "must be longer than 0"),
        ("env", ["A=1"], 'must be an object, such as {"LANG": "C"}, not [\'A=1\']'),
        ("env", {"A": 1}, "must have texts as values, not 1"),
        ("env", {"A=B": "1"}, "must have names of variables, not 'A=B'"),
        ("env", {"A": "\0"}, "must not contain a NUL character: 'A\\x00'"),
        ("cwd", "", "must not be empty"),
        ("inputs", 1, 'must be a list of paths, such as ["a.csv"], not 1'),
        ("outputs", ["a", ""], "has a path that must not be empty"),
        ("outputs", ["a", 1], "has a path that must be text, not 1"),
        ("inputs", ["a"] * 10_001, "must have at most 10000 paths, not 10001"),
        *(
            (
                "final_exit_status",
                value,
                f"must be exit statuses from 1 to 255, such as [3], not {value!r}",
            )
            for value in (0, 256, "3", True, [3, -1])
        ),
    ],
)
def test_wrong_value_is_refused_with_its_key(key: str, value: object, reason: str) -> None:
    assert why_not({"name": "a", "argv": ["true"], key: value}) == f'"{key}" {reason}'


@each_case(
    ("keys", "reason"),
    [
        (
            {"call": "imaging"},
            "\"call\" must be module:function, such as imaging:thumbnail, not 'imaging'",
        ),
        (
            {"call": "a b:c"},
            "\"call\" must be module:function, such as imaging:thumbnail, not 'a b:c'",
        ),
        ({"call": "a:b", "args": "x"}, "\"args\" must be a list, not 'x'"),
        ({"call": "a:b", "kwargs": []}, '"kwargs" must be an object, not []'),
        ({"payload": 1}, '"payload" must be text, a list or an object, not 1'),
        ({"payload": "\ud800"}, "\"payload\" must be Unicode text, not '\\ud800'"),
    ],
)
def test_wrong_call_or_payload_is_refused(keys: dict[str, object], reason: str) -> None:
    assert why_not({"name": "a"} | keys) == reason


@each_case(
    ("keys", "reason"),
    [
        ({"after": ["b", "a"]}, "waits for itself: 'a' is in its own \"after\""),
        ({"backoff": "1m"}, 'has "backoff" without "retries"'),
        (
            {"retries": [10**9], "backoff": "365d"},
            '"retries" times "backoff" must be less than 292 years',
        ),
        ({"due": "2m", "expiry": "1m"}, '"expiry" must be later than "due"'),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    keys: dict[str, object], reason: str
) -> None:
    assert why_not({"name": "a", "argv": ["true"]} | keys) == reason


def test_long_value_is_cut_in_a_message() -> None:
    assert len(why_not({"name": "a", "argv": "x" * 10_000})) < 200


@each_case(
    ("key", "cell", "value"),
    [
        ("argv", "echo 'a b' c", ["echo", "a b", "c"]),
        ("argv", ' ["echo", "a b"] ', ["echo", "a b"]),
        ("after", "a; b ;c", ["a", "b", "c"]),
        ("after", "a b", ["a", "b"]),
        ("after", '["a b"]', ["a b"]),
        ("inputs", "a.csv 'b c.csv'", ["a.csv", "b c.csv"]),
        ("outputs", '["b c"]', ["b c"]),
        ("final_exit_status", "3 4", [3, 4]),
        ("final_exit_status", "[3]", [3]),
        ("args", "[1, {}]", [1, {}]),
        ("kwargs", '{"x": 1}', {"x": 1}),
        ("env", "A=1 B='2 3'", {"A": "1", "B": "2 3"}),
        ("env", '{"A": "1"}', {"A": "1"}),
        ("retries", "3", 3),
        ("retries", "[1, 2]", [1, 2]),
        ("priority", "-5", -5),
        ("priority", "high", "high"),
        ("slots", "2", 2),
        ("payload", " x ", " x "),
        ("name", " a ", "a"),
        ("due", "10m", "10m"),
        ("lane", "  ", None),
        ("argv", "", None),
    ],
)
def test_cell_becomes_a_json_value(key: str, cell: str, value: object) -> None:
    assert from_cell(key, cell) == value


@each_case(
    ("key", "cell"),
    [("argv", "echo 'open"), ("argv", "[echo]"), ("args", "1,2"), ("env", "A"), ("after", "[")],
)
def test_invalid_cell_is_refused(key: str, cell: str) -> None:
    with pytest.raises(InvalidValue):
        from_cell(key, cell)


names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
times = st.one_of(
    st.integers(0, 10**17).map(lambda ns: TimeSpec(ns, from_now=True)),
    st.integers(0, 10**15).map(lambda microseconds: TimeSpec(microseconds * 1000)),
)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | names,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(names, values, max_size=3),
    max_leaves=5,
)
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
variables = st.dictionaries(names.filter(lambda name: "=" not in name), words, max_size=3)
work = st.one_of(
    st.builds(
        lambda program, arguments, env, outputs, statuses: {
            "argv": [program, *arguments],
            "env": env,
            "outputs": outputs,
            "final_exit_status": statuses,
        },
        *(names, st.lists(words, max_size=3), st.none() | variables),
        st.none() | st.lists(names, min_size=1, max_size=2, unique=True),
        st.none() | st.lists(st.integers(1, 255), min_size=1, max_size=2, unique=True).map(sorted),
    ),
    st.fixed_dictionaries(
        {
            "call": st.just("m:f"),
            "args": st.none() | st.lists(plain_values, max_size=3),
            "kwargs": st.none() | st.dictionaries(names, plain_values, max_size=3),
            "cwd": st.none() | names,
        }
    ),
    st.fixed_dictionaries({"payload": texts.map(str.encode)}),
)


@st.composite
def task_specs(draw: st.DrawFn) -> TaskSpec:
    """Any task that could have been written."""
    name = draw(names)
    others = names.filter(lambda other: other != name)
    due, expiry = draw(st.one_of(st.just((None, None)), st.tuples(times, st.none())))
    retries = draw(st.none() | st.lists(st.integers(0, 99) | st.just(0.5), max_size=4).map(tuple))
    backoff_ns = SECOND_NS if retries is None else draw(st.integers(0, 10**15))
    return TaskSpec(
        name=name,
        after=tuple(draw(st.lists(others, max_size=3, unique=True))),
        service=draw(st.none() | names),
        lane=draw(st.just("") | names),
        priority=draw(st.integers(-1000, 1000)),
        due=due,
        expiry=expiry,
        retries=retries,
        backoff_ns=backoff_ns,
        time_limit_ns=draw(st.just(0) | st.integers(1, 10**15)),
        slots=draw(st.integers(1, 64)),
        **draw(work),
    )


@given(task_specs())
def test_written_task_is_read_back(spec: TaskSpec) -> None:
    assert check_task(to_row(spec)) == spec
