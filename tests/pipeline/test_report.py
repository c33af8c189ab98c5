"""The report: its page in a real browser, its tables, and the escaping of users' names."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from docs.schemas import check
from taskyard.cli.entry import run, taskyard
from taskyard.client import task_filters
from taskyard.client.task_filters import form_of
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.demo.campaign import AuditCounts, Auditor
from taskyard.design import PALETTES
from taskyard.errors import UserError
from taskyard.journal import recovery, witness
from taskyard.journal.sqlite import JournalReader, SqliteStore
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import CRITICAL_PATH, TASKS
from taskyard.pipeline.fold.whole import fold_whole
from taskyard.pipeline.jobs import history as history_job
from taskyard.pipeline.jobs import report
from taskyard.pipeline.report import charts, page, summary
from taskyard.pipeline.report.format import format_bytes, format_duration, shorten_name
from taskyard.pipeline.report.headline import lower_bound_ns, page_of
from taskyard.pipeline.report.page import Page, Section, Table
from taskyard.pipeline.report.reasons import failure_groups, last_outputs
from taskyard.pipeline.report.stays import with_work_of
from taskyard.pipeline.report.summary import BrokerSummary, ReportSummary
from taskyard.pipeline.sources import history
from taskyard.pipeline.transforms.guarantees import NO_TASKS
from taskyard.pipeline.transforms.summaries import LISTED
from tests.journal.scenarios import BEGIN_NS, WritingYard
from tests.kit.processes import campaign, run_here
from tests.pipeline.browser import Opened, opened
from tests.pipeline.event_log import EventLog

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from pyspark.sql import SparkSession

#: Text that would run as a script without escaping.
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
#: A campaign's name has no `/`.
CAMPAIGN = HOSTILE.replace("/", "|")
MARKUP = '<a href="javascript:alert(2)">x</a>&lt;b&gt;<br>'

#: All charts of a page.
CHARTS = (
    *("over-time", "workers", "slowest", "times", "lanes", "setbacks", "levels", "critical-path"),
)


def fill(yard: WritingYard) -> None:
    """Run a campaign with a graph, lanes, failures, a lost worker and a stale report."""
    hostile, markup = HOSTILE.encode(), MARKUP.encode()
    yard.join(markup, slots_total=2, services=(b"exec", b"smtp"), incarnation=1)
    yard.join(b"w2", slots_total=2, services=(b"exec", b"smtp"), lease_timeout_ns=5 * SECOND_NS)
    first = [hostile, *(b"first-%d" % number for number in range(9))]
    campaign = CAMPAIGN.encode()
    yard.submit(*first, campaign=campaign, service=b"exec")
    second = [b"second-%d" % number for number in range(10)]
    yard.submit(*second, after=[[name] for name in first], campaign=campaign, service=b"exec")
    mail = [b"mail-%d" % number for number in range(6)]
    lanes = [markup, markup, b"y", b"y", hostile, hostile]
    yard.submit(*mail, lanes=lanes, campaign=campaign, service=b"smtp")
    yard.take(b"w2", 1)
    yard.later(6)  # the leases of w2 expire
    yard.handle_stale(CAMPAIGN.encode() + b"/mail-0")
    for _ in range(60):
        taken = yard.take(markup, 2)
        if not taken:
            break
        yard.later(1)
        for name in taken:
            _settle(yard, name)


def _settle(yard: WritingYard, name: bytes) -> None:
    worker, reason = MARKUP.encode(), HOSTILE.encode()
    attempts = yard.scheduler.ledger.tasks[name].attempt
    if name.endswith(b"/first-1"):
        yard.report(worker, name, Outcome.FAILED_FINAL, texts=[reason])
    elif name.endswith(b"/first-2") and attempts == 1:
        due_ns = BEGIN_NS + yard.now_ns + SECOND_NS // 2
        yard.report(worker, name, Outcome.RETRY_AT, texts=[b"busy"], retry_at_ns=[due_ns])
    else:
        yard.finish(worker, name)


def tally_of(state: Path) -> AuditCounts:
    seen = witness.read(state)
    assert seen is not None
    counting, number = Auditor(), 0
    with JournalReader(state, *seen) as reader:
        for row in reader.rows():
            counting.add(recovery.records_of(row, number))
            number = row.record_last
    return counting.tally()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report") / "state"
    directory.mkdir()
    with closing(SqliteStore(directory)) as store:
        fill(WritingYard(store))
    return directory


@pytest.fixture(scope="module")
def document(state: Path, spark: SparkSession) -> dict[str, Any]:
    """Return the JSON output of the command, which also writes the page."""
    assert spark is not None
    answer = io.TextIOWrapper(io.BytesIO())
    arguments = ["report", "--state", str(state), "--campaign", CAMPAIGN, "--json"]
    arguments += ["--page", "http://page.example:8080/tasks"]
    with contextlib.redirect_stdout(answer):
        assert run(taskyard, [*arguments, "--out", str(state.parent / "out")]) == 0
    answer.seek(0)
    text = answer.read()
    check(text)
    document: dict[str, Any] = json.loads(text)
    return document


@pytest.fixture(scope="module")
def out(document: dict[str, Any]) -> Path:
    return Path(document["page"]).parent


@pytest.fixture(scope="module")
def seen(out: Path, browser: Browser) -> Opened:
    return opened(browser, out / report.PAGE)


def test_page_opens_offline_without_errors_and_shows_every_chart(seen: Opened) -> None:
    figures = seen.figures()
    assert seen.complaints == []
    assert seen.requests == []
    assert sorted(figures) == sorted(CHARTS)
    for name, (wide, high, drawn) in figures.items():
        assert wide > 800, name
        assert high >= 200, name
        assert drawn, name
    assert seen.page.title().startswith("Campaign <|script><script>docu")
    assert HOSTILE[:20] in seen.page.inner_text("body")


@pytest.fixture(scope="module")
def dark(out: Path, browser: Browser) -> Opened:
    return opened(browser, out / report.PAGE, dark=True)


def test_page_is_drawn_in_dark_mode(dark: Opened) -> None:
    ground = dark.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark.complaints == []
    assert ground == "rgb(20, 24, 30)"
    assert dark.page.locator(".xtitle").first.evaluate("one => one.style.fill") == (
        "rgb(154, 167, 182)"
    )


def test_charts_fit_a_phone_and_paper(dark: Opened) -> None:
    shown = dark.page
    looks = """() => [...document.querySelectorAll(".figure")].map(
      ({ _fullLayout: { width, font } }) => [width, font.color])"""
    shown.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = ({looks})(); }})")
    made = shown.pdf(prefer_css_page_size=True)
    assert made.startswith(b"%PDF")
    inks = {mode: PALETTES[mode]["ink"] for mode in ("light", "dark")}
    assert shown.evaluate("window.printed") == [[680, inks["light"]]] * len(CHARTS)
    shown.set_viewport_size({"width": 390, "height": 844})
    shown.wait_for_function(f"() => ({looks})().every(([width]) => width <= 390)")
    assert {colour for _, colour in shown.evaluate(looks)} == {inks["dark"]}
    assert shown.evaluate("document.documentElement.scrollWidth") == 390


def test_failed_task_is_shown_with_its_reason_and_links_to_the_page(
    seen: Opened, out: Path
) -> None:
    assert seen.page.locator("#section-failures p").first.inner_text() == (
        "1 task failed, grouped by the form of the reason."
    )
    block = seen.page.locator("#section-failures article")
    assert block.locator("h3").inner_text() == f"1 task: {form_of(HOSTILE)}"
    assert block.locator("p").inner_text() == "first-1"
    assert block.locator("pre").inner_text() == HOSTILE
    (link,) = [one.get_attribute("href") for one in block.locator("a").all()]
    address = urlsplit(link or "")
    assert (address.netloc, address.path) == ("page.example:8080", "/task")
    assert parse_qs(address.query) == {"name": [f"{CAMPAIGN}/first-1"]}
    meta = seen.page.evaluate("document.getElementById('lanes').data[0].meta.links")
    filters = [parse_qs(urlsplit(one).query)["filter"][0] for one in meta]
    lanes = {task_filters.parse(text).lane for text in filters}
    tasks = pq.read_table(out / "tables" / "tasks.parquet").to_pylist()
    assert lanes == {row["lane"] for row in tasks if row["lane"]}


def test_click_on_a_bar_opens_its_task(seen: Opened, out: Path) -> None:
    tasks = pq.read_table(out / "tables" / "tasks.parquet").to_pylist()
    ran = sorted((-row["run_ns"], row["task"]) for row in tasks if row["run_ns"])
    seen.page.evaluate("window.open = (link) => { window.opened = link; }")
    seen.page.locator("#slowest .point").first.click(force=True)
    link = seen.page.wait_for_function("window.opened").json_value()
    assert parse_qs(urlsplit(link).query) == {"name": [ran[0][1]]}
    bars = seen.page.evaluate("document.getElementById('slowest').data[0].meta.links")
    assert [parse_qs(urlsplit(one).query)["name"][0] for one in bars] == [
        task for _, task in ran[:10]
    ]


def test_counts_equal_those_of_the_journal(
    seen: Opened, document: dict[str, Any], state: Path
) -> None:
    counted = tally_of(state)
    assert (counted.submitted, counted.failed, counted.stale) == (26, 1, 1)
    rows = seen.page.locator("#section-guarantees tbody tr").all_inner_texts()
    tiles = seen.page.locator("header dl").inner_text()
    assert rows[0].split("\t")[1] == (
        f"{counted.submitted} submitted = {counted.done} done + {counted.failed} failed + "
        f"{counted.unfinished} blocked by a failure"
    )
    assert [row.split("\t")[2] for row in rows] == ["holds"] * 5
    assert rows[-1].split("\t")[1] == "1 stale result refused"
    assert f"tasks\n{counted.submitted}" in tiles
    assert tiles.endswith("retries\n2")
    setbacks = seen.page.locator("#section-setbacks p").first.inner_text()
    assert setbacks.startswith("3 of 27 attempts did not succeed. 1 task failed. ")
    assert document["sound"] is True
    assert document["guarantees"]["done"] == counted.done
    assert document["summary"][0].startswith(
        "26 tasks: 24 done, 1 failed, 1 blocked by a failure. "
    )


def test_tables_are_written_as_parquet_and_csv(out: Path) -> None:
    for name, rows in {"tasks": 26, "workers": 2}.items():
        assert pq.read_table(out / "tables" / f"{name}.parquet").num_rows == rows
        assert pyarrow.csv.read_csv(out / "tables" / f"{name}.csv").num_rows == rows
    tasks = pq.read_table(out / "tables" / "tasks.parquet")
    assert HOSTILE in tasks.column("name").to_pylist()
    assert f"{CAMPAIGN}/{HOSTILE}" in tasks.column("task").to_pylist()


def test_history_is_found_in_every_kind_of_directory(state: Path, tmp_path: Path) -> None:
    live = len(history.find(state, tmp_path / "live").read("events"))
    history_job.export(state)
    copy = shutil.copytree(state / "history", tmp_path / "copied")
    for place in (state, state / "history", copy):
        found = history.find_directory(place, tmp_path / "scratch")
        assert len(found.read("events")) == live
    with pytest.raises(UserError, match="no history found"):
        history.find_directory(tmp_path, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--campaign", "weekly"], "unknown campaign 'weekly' (this history has <|script>"),
        (["--history", "."], "--state and --history exclude each other"),
        (["--state", "."], "histories of the same broker"),
        (["--state", "/", "--tables", "t"], "not a state directory"),
        (["--page", "here"], "--page here: not the address of a page"),
    ],
)
def test_input_errors_come_before_spark_starts(
    words: list[str],
    text: str,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(state)
    assert run(taskyard, ["report", "--state", str(state), *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "starting Spark" not in err


def test_tables_are_kept_for_the_next_report(
    spark: SparkSession, document: dict[str, Any], state: Path, tmp_path: Path
) -> None:
    assert spark is not None
    words = ["report", "--state", str(state), "--tables", "kept", "--campaign", CAMPAIGN]
    code, text, _ = run_here(tmp_path, *words, "--json")
    made = json.loads(text)
    assert (code, made["summary"]) == (0, document["summary"])
    pages = [Path(document["page"]), tmp_path / made["page"]]
    for name in ("failures", "slowest", "places"):  # by queries, and from rows in memory
        first, second = (_section_text(one, name) for one in pages)
        assert first == second, name
    assert made["guarantees"] == document["guarantees"]
    assert tables.read(spark, tmp_path / "kept", TASKS).count() == 26
    for name in ("workers", "critical_path"):
        rows = [
            pq.read_table(Path(one) / f"{name}.parquet").to_pylist()
            for one in (document["tables"], tmp_path / made["tables"])
        ]
        old, new = (sorted(str(sorted(row.items())) for row in table) for table in rows)
        assert old == new


def _section_text(path: Path, name: str) -> str:
    whole = (
        path.read_text().partition(f'<section id="section-{name}"')[2].partition("</section>")[0]
    )
    return re.sub("<[^>]*>", "", whole)


def test_run_writes_a_report_at_the_end(spark: SparkSession, tmp_path: Path) -> None:
    assert spark is not None
    name = campaign(tmp_path, [{"name": "a", "argv": ["true"]}], "c.jsonl")
    code, _, err = run_here(tmp_path, "run", name, "--workers", "1", "--report", "made")
    assert (code, err.splitlines()[-1]) == (0, "report: made/report.html")
    text = (tmp_path / "made" / report.PAGE).read_text()
    assert "Campaign c" in text
    (attempt,) = pq.read_table(tmp_path / "made" / "tables" / "attempts.parquet").to_pylist()
    cells = [attempt["host"], "1", *(format_duration(attempt[f"{n}_ns"]) for n in ("run", "cpu"))]
    row = text.partition('id="section-places"')[2].partition("<tbody><tr>")[2].partition("</tr>")[0]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row)[:4] == cells


# Without Spark.


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (48_234_496, "48.2 MB"), (2 * 10**15, "2e+03 TB")],
)
def test_sizes_have_readable_units(number: int, text: str) -> None:
    assert format_bytes(number) == text


def test_failures_of_one_form_are_one_group() -> None:
    reasons = ["row 1: bad", "exit status 3", "row 22: bad\nmore", None, "row 3: bad"]
    rows: list[dict[str, Any]] = [
        dict[str, Any].fromkeys(LISTED, "")
        | {"task": f"t{n}", "reason": reason, "ended": 9 - n, "count": n}
        for n, reason in enumerate(reasons, 1)
    ]
    groups = failure_groups(pa.Table.from_pylist(rows))
    assert [(one.form, one.count, [row["task"] for row in one.tasks]) for one in groups] == [
        ("row #: bad", 9, ["t5", "t3", "t1"]),
        ("no reason given", 4, ["t4"]),
        ("exit status 3", 2, ["t2"]),
    ]


def test_output_of_failed_tasks_ends_with_its_last_lines() -> None:
    lines = [f"line {number}\x1b[0m" for number in range(2000)]
    texts = {"c/a/b": "\n".join(lines), "c/d": "one\ntwo\n", "c/e": "\n", "c/other": "x"}
    events = [{"task": task, "record": 2, "reason": text} for task, text in texts.items()]
    events.append({"task": "c/d", "record": 1, "reason": "of an attempt before"})
    printed = pa.Table.from_pylist(events)
    tasks = [{"task": task} for task in ("c/a/b", "c/d", "c/e", "c/nothing")]
    assert last_outputs(tasks, printed) == {
        "c/a/b": "\n".join(line.replace("\x1b", " ") for line in lines[-12:]),
        "c/d": "one\ntwo",
    }


def test_report_of_a_run_needs_a_state(tmp_path: Path) -> None:
    name = campaign(tmp_path, [{"name": "a", "argv": ["true"]}])
    words = ("run", name, "--broker", "tcp://127.0.0.1:1", "--report", "made")
    code, _, err = run_here(tmp_path, *words)
    assert code == 2
    assert "--report: needs the state directory of the broker" in err


def broker_summary(label: str, **changes: int) -> BrokerSummary:
    counts = msgspec.structs.replace(NO_TASKS, submitted=1, done=1, **changes)
    return BrokerSummary(f"id of {label}", label, f"/{label}", ["c"], counts)


def facts(**more: Any) -> ReportSummary:
    """Return the summary of a campaign with one task and one worker."""
    began = datetime(2026, 3, 1, tzinfo=UTC)
    totals = {"tasks": 1, "done": 1, "attempts": 1, "submitted": began}
    totals["ended"] = began + timedelta(seconds=2)
    worker = {"worker": "w", "slots": 1, "joined": began, "left": None, "utilisation": 1.0}
    given: dict[str, Any] = {
        "campaign": "c",
        "brokers": [broker_summary("north")],
        "totals": totals,
        "over_time": summary.TimeSeries(SECOND_NS, [0, 1], [0, 0], [1, 0], [0, 0], [0, SECOND_NS]),
        "worker_times": {},
        "workers": pa.Table.from_pylist([worker]),
        "worker_runs": pa.Table.from_pylist([{"worker": "w", "run_ns": SECOND_NS}]),
        "distributions": _empty("service", "phase", "bin", "count", "time_ns"),
        "lanes": _empty(
            *("lane", "service", "wait_p50_ns", "wait_p95_ns", "attempts", "lanes"),
            *("run_ns", "alone_ns"),
        ),
        "setbacks": _empty(*("reason", "retried", "failed", "lost", "attempts_all", "failed_all")),
        "levels": _empty("level", "done", "failed", "open"),
        "critical_path": _empty(*CRITICAL_PATH.names),
        "hosts": _empty("host", "attempts", "run_ns", "cpu_ns", "memory_max_bytes"),
        "slowest": _empty("task", "run_ns"),
    }
    return ReportSummary(**given | more)


def _empty(*names: str) -> pa.Table:
    return pa.table({name: pa.array([], pa.int64()) for name in names})


def traces_of(section: Section) -> list[dict[str, Any]]:
    assert section.figure is not None
    traces: Any = section.figure["data"]
    return list(traces)


def test_broken_guarantee_is_shown_in_red() -> None:
    broken = facts(brokers=[broker_summary("north", completed_twice=1)])
    text = page.render(page_of(broken, ""))
    assert text.count('<td class="bad">broken</td>') == 1
    assert text.count('<td class="good">holds</td>') == 4


def test_brokers_have_a_table_if_there_are_several() -> None:
    brokers = [broker_summary("north"), broker_summary("<b>south", completed_twice=1)]
    assert 'id="section-brokers"' not in page.render(page_of(facts(), ""))
    text = page.render(page_of(facts(brokers=brokers), ""))
    assert 'id="section-brokers"' in text
    assert "From 2 brokers, with this campaign at north, &lt;b&gt;south." in text
    assert text.count('<td class="bad">broken</td>') == 2  # of the south, and in total
    assert facts(brokers=brokers).guarantees.submitted == 2


def test_critical_path_is_that_of_the_broker_that_ended_last() -> None:
    rows = [
        {"broker": broker, "ended": ended, "position": position}
        | {"campaign": "c", "task_campaign": "c"}
        for broker, position, ended in (("n", 1, 3), ("s", 1, 5), ("n", 2, 4), ("s", 2, 9))
    ]
    found = report.last_path(pa.Table.from_pylist(rows))
    assert found.column("broker").to_pylist() == ["s", "s"]


def test_chart_without_data_is_replaced_by_a_sentence() -> None:
    text = page.render(page_of(facts(), ""))
    for name in ("lanes", "setbacks", "levels", "times", "critical-path"):
        assert f'<div class="figure" id="{name}"' not in text
    assert "No dependencies between tasks." in text
    assert "Every attempt succeeded." in text
    assert "No named lanes: every task was in the open lane" in text


def test_stay_counts_the_work_of_one_campaign_only() -> None:
    log, other = EventLog("mine"), EventLog("other")
    log.join(0, "w", slots=2)
    for task, began in (("a", 1), ("b", 2), ("c", 10)):
        log.submit(0, task)
        log.run(task, began, began + 3)
    log.add(20, "worker_left", worker="w", reason="left")
    log.join(30, "w", incarnation=2)
    other.events, other._numbers = log.events, log._numbers  # noqa: SLF001  # one journal
    other.submit(30, "d")
    other.run("d", 31, 35)
    events, edges = log.tables()
    folded = fold_whole(events, edges, "broker")
    work = ("attempts", "finished", "run_ns", "busy_ns", "stay_ns", "utilisation")

    def rows(campaign: str) -> list[tuple[float, ...]]:
        mine = folded.attempts.filter(pc.equal(folded.attempts["campaign"], campaign))
        found = with_work_of(folded.workers, events, mine).sort_by("stay").to_pylist()
        return [
            tuple(row[one] / (SECOND_NS if one.endswith("_ns") else 1) for one in work)
            for row in found
        ]

    assert rows("mine") == [(3, 3, 9, 7, 20, 9 / 40), (0, 0, 0, 0, 5, 0)]
    assert rows("other") == [(0, 0, 0, 0, 20, 0), (1, 1, 4, 4, 5, 4 / 5)]


def test_thousand_workers_are_shown_as_a_histogram() -> None:
    rows = [
        {"worker": f"w{n}", "slots": 1, "joined": None, "left": None, "utilisation": n / 1000}
        for n in range(1000)
    ]
    section = charts.workers(facts(workers=pa.Table.from_pylist(rows)))
    (trace,) = traces_of(section)
    assert trace["y"] == [100] * 10


def test_busy_share_counts_slots_registered_during_the_campaign() -> None:
    began = datetime(2026, 3, 1, tzinfo=UTC)

    def stay(worker: str, slots: int, joined: float, left: float | None) -> dict[str, object]:
        times = [None if at is None else began + timedelta(seconds=at) for at in (joined, left)]
        return {"worker": worker, "slots": slots, "joined": times[0], "left": times[1]}

    stays = [
        stay("early", 2, -100, 1),  # 2 slots for 1 of 2 s
        stay("restarted", 1, 0, None),  # as two processes, 2 s in total
        stay("restarted", 1, 1, None),
        stay("any", 0, 0, None),
        stay("late", 9, 50, None),
    ]
    runs = {"early": 1, "restarted": 1, "any": 7}
    found = facts(
        workers=pa.Table.from_pylist(stays),
        worker_runs=pa.Table.from_pylist(
            [{"worker": name, "run_ns": run * SECOND_NS} for name, run in runs.items()]
        ),
    )
    assert summary.busy_share(found) == 2 / 4


def test_parallel_lane_gives_no_lower_bound() -> None:
    lanes = [
        {"run_ns": 8 * SECOND_NS, "alone_ns": 2 * SECOND_NS},  # four at once
        {"run_ns": SECOND_NS, "alone_ns": SECOND_NS},
    ]
    found = facts(lanes=pa.Table.from_pylist(lanes))
    assert lower_bound_ns(found) == SECOND_NS
    found.totals["floor_ns"] = 3 * SECOND_NS
    assert lower_bound_ns(found) == 3 * SECOND_NS


def test_long_critical_path_shows_its_longest_steps() -> None:
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    steps = [
        dict.fromkeys(CRITICAL_PATH.names, 0)
        | {"task": f"t{n}", "position": n, "started": begin, "run_ns": n * SECOND_NS}
        for n in range(1, 101)
    ]
    section = charts.critical_path(facts(critical_path=pa.Table.from_pylist(steps)))
    (trace,) = traces_of(section)
    assert len(trace["y"]) == charts.STEPS_SHOWN_MAX
    assert trace["y"][-1] == "100. t100"


def test_users_text_can_neither_end_a_script_nor_start_a_tag() -> None:
    figure: page.Figure = {"data": [{"name": HOSTILE}], "layout": {}}
    table = Table([HOSTILE], [[MARKUP]])
    section = Section("one", HOSTILE, [MARKUP], figure, table)
    text = page.render(Page(HOSTILE, [HOSTILE], [], [section], MARKUP))
    assert "<script>document.title" not in text
    assert "<img src=x" not in text
    assert MARKUP[:20] not in text
    assert text.count("</script>") == 3  # figures, plotly, drawing


def test_page_without_charts_has_no_script() -> None:
    text = page.render(Page("words", ["Nothing to draw."], [], [Section("one", "One", ["Two."])]))
    assert "<script" not in text
    assert len(text) < 10_000


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 s"),
        (400_000, "400 µs"),
        (2_500_000, "2.5 ms"),
        (86_499_400_000_000, "1 d"),
        (3_000_000, "3 ms"),
        (4_200_000_000, "4.2 s"),
        (42 * SECOND_NS, "42 s"),
        (330 * SECOND_NS, "5 min 30 s"),
        (2460 * SECOND_NS, "41 min"),
        (5 * 3600 * SECOND_NS, "5 h"),
        (100 * 3600 * SECOND_NS, "4 d 4 h"),
    ],
)
def test_durations_have_readable_units(time_ns: int, text: str) -> None:
    assert format_duration(time_ns) == text


def test_long_or_unprintable_name_becomes_short_and_visible() -> None:
    assert shorten_name("x\ny\x1b[31m") == "x\\ny\\x1b[31m"
    cut = shorten_name("a" * 30 + "b" * 30)
    assert len(cut) < 50
    assert (cut[0], cut[-1], "…" in cut) == ("a", "b", True)


@pytest.mark.parametrize("seconds", [0.5, 60, 3600, 86_400 * 30, 86_400 * 4000])
def test_any_time_span_has_a_limited_number_of_intervals(seconds: float) -> None:
    makespan_ns = int(seconds * SECOND_NS)
    width_ns = summary.interval_width(makespan_ns)
    assert 20 < makespan_ns / width_ns <= summary.INTERVALS_MAX


def test_changes_accumulate_over_empty_intervals() -> None:
    changes = {
        "place": [0, 3],
        "finished": [0, 1],
        "failed": [0, 0],
        "depth": [2, -1],
        "running": [1, -1],
        "busy_ns": [4, -7],
    }
    series = summary.over_time(pa.table(changes), 10)
    assert series.ready_counts == [2, 2, 2, 1]
    assert series.running == [1, 1, 1, 0]
    assert series.busy_ns == [4, 10, 10, 3]
    assert series.begins_ns == [0, 10, 20, 30]
