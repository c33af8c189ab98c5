"""Campaign files: the rows of each format, and every kind of damage."""

import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from taskyard.campaign import lines, other_systems, tables
from taskyard.campaign.formats import FileOptions, Format
from taskyard.campaign.lines import LINE_BYTES_MAX, InvalidCampaign
from taskyard.campaign.reader import LoadedCampaign, read_campaign
from taskyard.campaign.task_spec import TaskSpec
from taskyard.campaign.values import TimeSpec
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
A = b'{"name": "a", "argv": ["true"]}'
B = b'{"name": "b", "argv": ["true"], "after": ["a"]}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named without a directory here, so that messages can be compared."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _in_folder(folder: Path) -> None:
    del folder


def load(name: str, content: bytes, options: FileOptions | None = None) -> LoadedCampaign:
    Path(name).write_bytes(content)
    return read_campaign(name, options)


def names(loaded: LoadedCampaign) -> list[str]:
    return [spec.name for spec in loaded.specs]


def complaints(loaded: LoadedCampaign) -> list[str]:
    return [str(rejected) for rejected in loaded.rejected]


def refusal(name: str, content: bytes, options: FileOptions | None = None) -> str:
    with pytest.raises(UserError) as refused:
        load(name, content, options)
    return str(refused.value)


# --- lines


@pytest.mark.parametrize(
    "content",
    [
        A + b"\n" + B + b"\n",
        A + b"\n" + B,
        A + b"\r\n" + B + b"\r\n",
        b"\xef\xbb\xbf" + A + b"\n" + B,
        b"\n\n" + A + b"\n  \t\r\n" + B + b"\n\n",
    ],
    ids=["plain", "no last newline", "windows", "byte order mark", "blank lines"],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("chunk_bytes", [7, lines.CHUNK_BYTES])
def test_all_line_ends_are_accepted(
    content: bytes,
    pack: Callable[[bytes], bytes],
    chunk_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", chunk_bytes)
    loaded = load("c.jsonl", pack(content))
    assert (names(loaded), loaded.rejected) == (["a", "b"], [])


def test_line_numbers_count_blank_lines() -> None:
    loaded = load("c.jsonl", b"\n" + A + b"\n\nx\n" + B)
    assert list(loaded.lines) == [2, 5]
    assert [rejected.line for rejected in loaded.rejected] == [4]


@pytest.mark.parametrize("ending", [b"", b"\n" + B])
def test_line_that_is_too_long_is_rejected_alone(ending: bytes) -> None:
    loaded = load("c.jsonl", A + b"\n" + b"x" * (LINE_BYTES_MAX + 1) + ending)
    reason = f"the line has {LINE_BYTES_MAX + 1} bytes, the limit is {LINE_BYTES_MAX}"
    assert complaints(loaded) == [f"c.jsonl:2: {reason}"]
    assert names(loaded) == (["a", "b"] if ending else ["a"])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("c.csv", b"name,payload\na,x\n", b"b,y"), ("c.dwork", b"\na\n", b"b")],
)
def test_line_that_is_too_long_is_rejected_alone_in_every_format(
    name: str, before: bytes, after: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 20)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 15)
    loaded = load(name, before + b"x" * 90 + b"\n" + after)
    assert complaints(loaded) == [f"{name}:3: the line has 90 bytes, the limit is 20"]
    assert names(loaded) == ["a", "b"]


def test_longest_line_is_accepted() -> None:
    line = b'{"name": "a", "payload": "%s"}'
    loaded = load("c.jsonl", line % (b"x" * (LINE_BYTES_MAX - len(line) + 2)) + b"\n")
    assert loaded.rejected == []


def test_endless_line_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 100)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 50)
    stream = io.BufferedReader(io.BytesIO(b"x" * 1000))
    ((number, line),) = lines.numbered_lines(stream, "c")
    assert isinstance(line, lines.InvalidRow)
    assert (number, line.raw) == (1, "x" * 50)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_wide_text_is_refused(encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    content = (mark + A.decode()).encode(encoding)
    assert refusal("c.jsonl", content) == "c.jsonl:1: the file is UTF-16, not UTF-8"


def many(count: int) -> bytes:
    return b"".join(b'{"name": "%d", "argv": ["true"]}\n' % number for number in range(count))


def test_truncated_gzip_is_refused_with_its_last_line() -> None:
    packed = gzip.compress(many(10_000))
    text = refusal("c.jsonl.gz", packed[: len(packed) // 2])
    place, reason = text.split(": ")
    assert reason == "the compressed file is truncated"
    assert 1000 < int(place.removeprefix("c.jsonl.gz:")) < 9000


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.gz", "c.json.gz"])
@pytest.mark.parametrize("length", [5, 12])
def test_gzip_of_a_few_bytes_is_refused(name: str, length: int) -> None:
    reason = "the compressed file is truncated"
    assert refusal(name, gzip.compress(A)[:length]) == f"{name}:1: {reason}"


def test_gzip_that_is_damaged_is_refused() -> None:
    packed = bytearray(gzip.compress(many(1000)))
    packed[-8] ^= 1
    assert refusal("c.jsonl", bytes(packed)).startswith(
        "c.jsonl:1001: the compressed file is damaged (CRC check failed"
    )


def test_gzip_is_detected_by_content_for_all_formats() -> None:
    workflow = (EXAMPLES / "workflow.json").read_bytes()
    assert len(load("w.json.gz", gzip.compress(workflow)).specs) == 4
    assert names(load("c.ndjson", gzip.compress(A))) == ["a"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("missing.jsonl", "No such file or directory"), (".", "Is a directory")],
)
def test_file_that_can_not_be_opened_is_refused(name: str, reason: str) -> None:
    with pytest.raises(InvalidCampaign) as refused:
        read_campaign(name)
    assert str(refused.value) == f"{name}: {reason}"


def test_invalid_file_name_is_refused() -> None:
    with pytest.raises(InvalidCampaign, match="not a file name"):
        read_campaign("a\0b")


class Stdin:
    def __init__(self, buffer: io.BufferedIOBase) -> None:
        self.buffer = buffer


@pytest.fixture(params=["pipe", "bytes"])
def stdin(request: pytest.FixtureRequest, folder: Path) -> Iterator[Stdin]:
    (folder / "in").write_bytes(A + b"\nx\n" + B)
    with (folder / "in").open("rb") as pipe:
        buffer = pipe if request.param == "pipe" else io.BytesIO(pipe.read())
        yield Stdin(buffer)


def test_dash_is_stdin_as_json_lines(stdin: Stdin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    loaded = read_campaign("-")
    assert names(loaded) == ["a", "b"]
    assert [rejected.line for rejected in loaded.rejected] == [2]
    assert complaints(loaded)[0].startswith("stdin:2: ")
    assert not stdin.buffer.closed


def test_parquet_can_not_come_from_stdin(stdin: Stdin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(InvalidCampaign, match="stdin: Parquet can only be read from a file"):
        read_campaign("-", FileOptions(format=Format.PARQUET))


# --- JSONL

BAD_LINES = [
    (b'{"name": "\xff"}', "not valid UTF-8 (byte 11)"),
    (b"\0\0\0", "the line has NUL bytes; was the file written to its end?"),
    (b"# a comment", "not JSON; comments are not allowed"),
    (b"// a comment", "not JSON; comments are not allowed"),
    (b'{"name": "x"', "the JSON ends too early; a task is one line"),
    (b'{"name": "x",}', "JSON is malformed: trailing comma in object (byte 13)"),
    (b"{'name': 'x'}", "JSON is malformed: object keys must be strings (byte 1)"),
    (b'{"name": "x"} {}', "JSON is malformed: trailing characters (byte 15)"),
    (b'{"name": NaN}', "JSON is malformed: invalid character (byte 9)"),
    (b"[" * 100_000, "the JSON is nested too deeply"),
    (b'["a"]', "must be an object with \"name\" and more, not ['a']"),
    (b'"a"', "must be an object with \"name\" and more, not 'a'"),
    (b"null", 'must be an object with "name" and more, not None'),
    (b'{"name": "x", "argv": ["y"], "slots": 1e999}', "Number out of range"),
    (b'{"name": "x", "argv": ["y"], "slots": ' + b"9" * 5000 + b"}", "Integer value out of range"),
    (b'{"name": "x", "argv": ["y"], "afer": []}', "has an unknown key 'afer'"),
]


def test_every_bad_line_is_reported_and_the_good_ones_are_read() -> None:
    content = b"\n".join([A, *(line for line, _ in BAD_LINES), B])
    loaded = load("c.jsonl", content)
    assert names(loaded) == ["a", "b"]
    for number, (complaint, (_, reason)) in enumerate(
        zip(complaints(loaded), BAD_LINES, strict=True), start=2
    ):
        assert complaint.startswith(f"c.jsonl:{number}: {reason}")


def test_empty_file_has_no_tasks() -> None:
    for name in ("c.jsonl", "c.csv", "c.dwork", "c"):
        assert (load(name, b"").specs, load(name, b"\n\n").rejected) == ([], [])


# --- CSV


def test_rows_of_a_table_are_tasks() -> None:
    content = (
        "name, argv ,after,retries,env,priority,due,payload\n"
        "a,echo 'good morning',,,,,,\n"
        '"b","[""echo"", ""x""]","a",3,LANG=C,-5,10m,\n'
        ",,,,,,,\n"
        'c,"echo ""two\nlines""",a;b,"[1, 2]",,,,\n'
        "d,,a b,,,,, as it is \n"
    )
    loaded = load("c.csv", content.encode())
    assert loaded.rejected == []
    assert list(loaded.lines) == [2, 3, 5, 7]
    assert loaded.specs == [
        TaskSpec(name="a", argv=["echo", "good morning"]),
        TaskSpec(
            name="b",
            argv=["echo", "x"],
            after=("a",),
            retries=(1, 1, 1),
            env={"LANG": "C"},
            priority=-5,
            due=TimeSpec(600 * SECOND_NS, from_now=True),
        ),
        TaskSpec(name="c", argv=["echo", "two\nlines"], after=("a", "b"), retries=(1, 2)),
        TaskSpec(name="d", payload=b" as it is ", after=("a", "b")),
    ]


@pytest.mark.parametrize("content", [b"name;argv\na;echo x", b"\n\r\nname\targv\r\na\techo x\r\n"])
def test_table_without_commas_may_have_semicolons_or_tabs(content: bytes) -> None:
    assert load("c.csv", content).specs == [TaskSpec(name="a", argv=["echo", "x"])]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"name,cmd", "c.csv:1: the table has an unknown column 'cmd' (did you mean \"argv\"?)"),
        (b"\nargv,after", "c.csv:2: the header must have \"name\", not only ['argv', 'after']"),
        (b"name,argv,argv", "c.csv:1: the header has 'argv' twice"),
        (b"na\xffme", "c.csv:1: not valid UTF-8 (byte 3)"),
    ],
)
def test_wrong_header_is_refused_at_once(header: bytes, reason: str) -> None:
    explained = "; read as CSV, because its name ends in .csv (--format "
    assert refusal("c.csv", header + b"\na,b\n").startswith(reason + explained)
    forced = FileOptions(format=Format.CSV)
    assert refusal("c.txt", header + b"\na,b\n", forced) == reason.replace("c.csv", "c.txt")


def test_every_bad_row_is_reported_and_the_good_ones_are_read() -> None:
    rows = [
        (b"x,echo", "the row has 2 cells, the header 3"),
        (b"x,echo,,", "the row has 4 cells, the header 3"),
        (b"x,echo 'open,", '"argv" can\'t be split into words (No closing quotation)'),
        (b"\xff,echo,", "not valid UTF-8 (byte 1)"),
        (b"x,\0,", "the line has NUL bytes"),
        (b"x,echo," + b"y" * 200_000, "a cell has more than 131072 characters"),
        (b'x,"echo"y,', "not valid CSV: ',' expected after '\"'"),
        (b"x,,", 'has no work (give "argv", "call" or "payload")'),
    ]
    content = b"\n".join([b"name,argv,lane", *(row for row, _ in rows), b"a,true,", b'z,"echo'])
    loaded = load("c.csv", content)
    assert names(loaded) == ["a"]
    expected = [*(reason for _, reason in rows), "a quote is never closed"]
    lines_expected = [*range(2, 10), 11]
    for complaint, line, reason in zip(complaints(loaded), lines_expected, expected, strict=True):
        assert complaint.startswith(f"c.csv:{line}: {reason}")


def test_row_of_several_lines_with_a_bad_one_is_rejected_whole() -> None:
    loaded = load("c.csv", b'name,argv\na,"x\n\xff\ny"\nb,true\n')
    assert names(loaded) == ["b"]
    assert complaints(loaded) == ["c.csv:2: not valid UTF-8 (byte 1)"]


def test_problem_of_one_row_is_not_reported_for_the_next() -> None:
    loaded = load("c.csv", b'name,argv\na,"\xff"x\nb,true\n')
    assert names(loaded) == ["b"]


# --- dwork's comma lines


def test_comma_lines_are_plain_tasks() -> None:
    loaded = load("c.dwork", b"a\nb,a\n\nc , a, b\r\n")
    assert loaded.specs == [
        TaskSpec(name="a", payload=b""),
        TaskSpec(name="b", payload=b"", after=("a",)),
        TaskSpec(name="c", payload=b"", after=("a", "b")),
    ]


def test_bad_comma_lines_are_reported() -> None:
    loaded = load("c.dwork", b"a,,b\nb,\nplain prose, as it is\n\xff\nb\0\nd,d\ne,a")
    assert complaints(loaded) == [
        "c.dwork:1: a name is missing between commas",
        "c.dwork:2: a name is missing between commas",
        "c.dwork:3: a name has spaces: 'plain prose'; a line is task,dependency,…",
        "c.dwork:4: not valid UTF-8 (byte 1)",
        "c.dwork:5: the line has NUL bytes; was the file written to its end?",
        "c.dwork:6: waits for itself: 'd' is in its own \"after\"",
        "c.dwork:7: waits for 'a', which was rejected (line 1)",
    ]


# --- Parquet


def write_table(columns: dict[str, pa.Array], name: str = "c.parquet") -> None:
    pq.write_table(pa.table(columns), name)


def test_parquet_has_the_same_columns_with_their_own_types() -> None:
    moment = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    write_table(
        {
            "name": pa.array(["a", "b", "c"]).dictionary_encode(),
            "argv": pa.array([["echo", "x"], None, None]),
            "call": pa.array([None, "m:f", None]),
            "kwargs": pa.array([None, '{"x": 1}', None]),
            "payload": pa.array([None, None, b"\xff"]),
            "after": pa.array([[], ["a"], ["a", "b"]]),
            "env": pa.array([[("A", "1")], None, None], pa.map_(pa.string(), pa.string())),
            "priority": pa.array([None, 3, None], pa.int16()),
            "retries": pa.array([None, "2", None]),
            "due": pa.array([moment, None, None], pa.timestamp("ns", "UTC")),
            "time_limit": pa.array([timedelta(seconds=5), None, None], pa.duration("ns")),
        }
    )
    loaded = read_campaign("c.parquet")
    assert loaded.rejected == []
    assert list(loaded.lines) == [1, 2, 3]
    assert loaded.specs == [
        TaskSpec(
            name="a",
            argv=["echo", "x"],
            env={"A": "1"},
            due=TimeSpec(SECOND_NS),
            time_limit_ns=5 * SECOND_NS,
        ),
        TaskSpec(name="b", call="m:f", kwargs={"x": 1}, after=("a",), priority=3, retries=(1, 1)),
        TaskSpec(name="c", payload=b"\xff", after=("a", "b")),
    ]


def test_bad_rows_of_parquet_are_reported_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS_PER_BATCH", 2)
    argv = ["echo", "[echo]", None, "echo", "echo 'x"]
    write_table({"name": pa.array(["a", "b", "c", None, "d"]), "argv": pa.array(argv)})
    loaded = read_campaign("c.parquet")
    assert names(loaded) == ["a"]
    assert [complaint[:22] for complaint in complaints(loaded)] == [
        'c.parquet:2: "argv" mu',
        "c.parquet:3: has no wo",
        'c.parquet:4: has no "n',
        'c.parquet:5: "argv" ca',
    ]


def test_parquet_with_wrong_columns_is_refused() -> None:
    write_table({"name": pa.array(["a"]), "cmd": pa.array(["x"])})
    with pytest.raises(
        InvalidCampaign, match=r"c\.parquet:1: the table has an unknown column 'cmd'"
    ):
        read_campaign("c.parquet")
    write_table({"argv": pa.array(["x"])})
    with pytest.raises(InvalidCampaign, match=r'c\.parquet:1: the table must have "name"'):
        read_campaign("c.parquet")


def test_truncated_parquet_is_refused() -> None:
    write_table({"name": pa.array(["a"]), "argv": pa.array(["x"])})
    whole = Path("c.parquet").read_bytes()
    for content in (b"", b"PAR1", whole[:-20], b"not a Parquet file"):
        assert refusal("c.parquet", content).startswith(
            "c.parquet:1: not a complete Parquet file: "
        )


# --- WfCommons


def workflow(tasks: object, executed: object = ()) -> bytes:
    sections = {"specification": {"tasks": tasks}, "execution": {"tasks": executed}}
    return json.dumps({"schemaVersion": "1.5", "workflow": sections}).encode()


def test_workflow_is_run_as_it_was() -> None:
    loaded = read_campaign(EXAMPLES / "workflow.json")
    assert loaded.specs == [
        TaskSpec(name="split_1", argv=["echo", "split"]),
        TaskSpec(name="half_1", argv=["echo", "first", "half"], after=("split_1",)),
        TaskSpec(name="half_2", argv=["echo", "second", "half"], after=("split_1",)),
        TaskSpec(name="merge_1", argv=["echo", "merge"], after=("half_1", "half_2")),
    ]


def test_replay_sleeps_for_as_long_as_a_task_took_divided_by_the_speedup() -> None:
    loaded = read_campaign(EXAMPLES / "workflow.json", FileOptions(replay=True, speedup=10))
    assert [spec.argv for spec in loaded.specs] == [
        ["sleep", "0.15"],
        ["sleep", "0.6"],
        ["sleep", "0.525"],
        ["sleep", "0.2"],
    ]


def test_edge_listed_only_by_the_parent_counts() -> None:
    tasks = [{"id": "a", "children": ["b"]}, {"id": "b", "parents": []}]
    executed = [{"id": name, "runtimeInSeconds": 1, "coreCount": 1.5} for name in "ab"]
    loaded = load("w.json", workflow(tasks, executed), FileOptions(replay=True))
    assert [(spec.after, spec.slots, spec.argv) for spec in loaded.specs] == [
        ((), 2, ["sleep", "1"]),
        (("a",), 2, ["sleep", "1"]),
    ]


def test_task_of_a_workflow_that_can_not_be_run_is_reported_by_its_place() -> None:
    tasks = [{"id": "a"}, {"name": "no id"}, {"id": "b", "parents": "a"}, {"id": "c"}]
    executed = [{"id": "c", "command": {"arguments": []}, "runtimeInSeconds": -1}]
    assert complaints(load("w.json", workflow(tasks, executed))) == [
        "w.json:1: has no command under workflow.execution (--replay sleeps instead)",
        "w.json:2: not a task: Object missing required field `id`",
        "w.json:3: not a task: Expected `array`, got `str` - at `$.parents`",
        "w.json:4: has no command under workflow.execution (--replay sleeps instead)",
    ]
    replayed = load("w.json", workflow(tasks, executed), FileOptions(replay=True))
    reason = "has no runtimeInSeconds under workflow.execution, so it can't be replayed"
    assert complaints(replayed)[::3] == [f"w.json:1: {reason}", f"w.json:4: {reason}"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"workflow": {"tasks": []}, "schemaVersion": "1.4"}', "schema 1.4 has no workflow."),
        (b'{\n"workflow":', "not a WfCommons document: "),
        (b'{"workflow": []}', "not a WfCommons document: "),
        (b'{"workflow": {"execution": {"tasks": [{}]}}}', "not a WfCommons document: "),
    ],
)
def test_document_without_a_workflow_is_refused(content: bytes, reason: str) -> None:
    assert refusal("w.json", content).startswith(f"w.json:1: {reason}")


def test_workflow_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_systems, "DOCUMENT_BYTES_MAX", 100)
    assert refusal("w.json", b'{"workflow": ' + b" " * 100).startswith(
        "w.json:1: more than 100 bytes (split it, or use JSONL); read as WfCommons, because"
    )


# --- which format


@pytest.mark.parametrize(
    ("name", "content", "names_read"),
    [
        ("c", A, ["a"]),
        ("c.json", A + b"\n" + B, ["a", "b"]),
        ("c.txt", b"name,payload\na,x", ["a"]),
        ("c.txt", b"a\nb,a\n", ["a", "b"]),
        ("c.dwork", b"name,a\na", ["a", "name"]),
        ("c.dwork.gz", gzip.compress(b"name,a\na", mtime=0), ["a", "name"]),
        ("C.CSV", b"name,payload\na,x", ["a"]),
    ],
)
def test_format_is_detected_by_name_and_content(
    name: str, content: bytes, names_read: list[str]
) -> None:
    assert names(load(name, content)) == names_read


def test_parquet_is_detected_by_content() -> None:
    write_table({"name": pa.array(["a"]), "argv": pa.array(["x"])}, "c.data")
    assert names(read_campaign("c.data")) == ["a"]


def test_workflow_is_detected_by_content() -> None:
    executed = [{"id": "a", "command": {"program": "x"}}]
    one_line = workflow([{"id": "a"}], executed)
    many_lines = json.dumps(json.loads(one_line), indent=1).encode()
    assert names(load("w", one_line)) == names(load("w", many_lines)) == ["a"]
    assert names(load("w", many_lines, FileOptions(format=Format.WFCOMMONS))) == ["a"]


def test_broken_first_line_does_not_make_another_format_of_it() -> None:
    loaded = load("c", b'{"name": "x" "argv": []}\n' + A)
    assert (names(loaded), len(loaded.rejected)) == (["a"], 1)


def test_list_of_tasks_is_refused_with_advice() -> None:
    reason = "a JSON list (write one task per line, as JSONL)"
    assert refusal("c.json", b"[" + A + b"]") == f"c.json:1: {reason}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            FileOptions(replay=True),
            "replay: only for WfCommons, not for jsonl",
        ),
        (FileOptions(speedup=0), "speedup: must be more than 0, not 0"),
        (FileOptions(speedup=float("nan")), "speedup: must be more than 0, not nan"),
        (
            FileOptions(speedup=2),
            "speedup: only for a replay",
        ),
    ],
)
def test_options_for_another_format_are_refused(options: FileOptions, reason: str) -> None:
    assert refusal("c.jsonl", A, options) == reason
