"""docs/campaigns.md: its tables match the code, and its examples are valid."""

import re
from pathlib import Path

import msgspec
import pytest

from taskyard.campaign import batches, formats, graph, lines, reader, shell_lines, task_spec, values
from taskyard.campaign.formats import Format
from taskyard.core import limits

PAGE = (Path(__file__).parents[2] / "docs" / "campaigns.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with this."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_key_is_documented_in_order() -> None:
    assert [row[0] for row in rows("key")] == [f"`{key}`" for key in task_spec.KEYS]


def test_every_format_is_documented_with_its_endings() -> None:
    assert [row[0].lower() for row in rows("format")] == [form.value for form in Format]
    for name, endings, _ in rows("format"):
        known = {suffix for suffix, form in formats.SUFFIXES.items() if form.value == name.lower()}
        assert known <= set(re.findall(r"`(\.\w+)`", endings))


def test_columns_that_are_more_than_text_are_documented() -> None:
    documented = {key for row in rows("column") for key in re.findall(r"`(\w+)`", row[0])}
    numbers = {"priority", "slots"}
    assert documented | numbers == set(values._READERS)  # noqa: SLF001  # the list is the point


def test_every_field_of_the_summary_is_documented() -> None:
    table = PAGE.partition("## Summary and rejected lines")[2]
    for field in msgspec.structs.fields(graph.GraphSummary):
        assert re.search(rf"^\|[^|]*\b{field.name}\b", table, re.MULTILINE), field.name


@pytest.mark.parametrize(
    "text",
    [
        f"up to {limits.NAME_BYTES_MAX} bytes",
        f"At most {limits.AFTER_MAX}",
        f"At most {task_spec.RECIPIENTS_MAX}. | one task",
        f"More than {task_spec.RECIPIENTS_MAX:,} recipients",
        f"or {batches.BUNDLE_BYTES_MAX // 1024 // 1024} MiB with all",
        f"from -{limits.PRIORITY_MAX} to {limits.PRIORITY_MAX}",
        f"at most {shell_lines.COMMAND_BYTES_MAX} bytes",
        f"at most {lines.LINE_BYTES_MAX // 1024 // 1024} MiB",
        f"`FILE{reader.REJECTED_SUFFIX}`",
        f"`{task_spec.BACKOFF_NS // limits.SECOND_NS}s`",
    ],
)
def test_limits_are_documented(text: str) -> None:
    assert text in PAGE


def test_examples_of_the_page_are_good(tmp_path: Path) -> None:
    examples = re.findall(r"```jsonl\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "c.jsonl").write_text("".join(examples))
    loaded = reader.read_campaign(tmp_path / "c.jsonl")
    assert (len(loaded.specs), loaded.rejected, loaded.summary.unknown) == (10, [], [])
    assert [(spec.name, spec.lane) for spec in loaded.specs[-2:]] == [
        ("news-7/0", "a.org"),
        ("news-7/1", "b.org"),
    ]
    after = {spec.name: spec.after for spec in loaded.specs}
    assert [*map(sorted, (after["sum"], after["lines"]))] == [["one", "two"], ["one"]]


def test_shell_commands_of_the_page_are_read_as_it_promises(tmp_path: Path) -> None:
    (tmp_path / "cmds.txt").write_text(PAGE.partition("```cmds\n")[2].partition("```")[0])
    loaded = reader.read_campaign(tmp_path / "cmds.txt")
    assert (len(loaded.specs), loaded.skipped.comments, loaded.choice.by_content) == (2, 1, True)
    assert f"`{loaded.specs[0].name}`" in PAGE
    assert f"`--format {'|'.join(form.value for form in Format)}`" in PAGE
    for shell in shell_lines.SHELLS:
        assert f"`{shell}`" in PAGE


def test_durations_of_the_page_are_durations() -> None:
    sentence = PAGE.partition("**Durations** read ")[2].partition(";")[0]
    durations = re.findall(r"`(\w+)`", sentence)
    assert len(durations) == 5
    for duration in durations:
        task_spec.check_task({"name": "a", "argv": ["x"], "time_limit": duration})
