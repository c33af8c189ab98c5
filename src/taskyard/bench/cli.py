"""The benchmarks' command: runs a suite, prints its table, writes its JSON."""

import platform
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from taskyard.bench import core
from taskyard.bench.core import Line


class Report(msgspec.Struct):
    """The JSON document of a run."""

    suite: str
    python: str
    machine: str
    lines: list[Line]
    version: int = 1


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure Taskyard, side by side with what it should reach."""


@main.command("core")
@click.option("--repeats", default=3, show_default=True, help="Run each case so many times.")
@click.option("--huge", is_flag=True, help="Also ten million tasks; takes minutes and 6 GB.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here."
)
def core_command(repeats: int, json_file: Path | None, *, huge: bool) -> None:
    """The scheduler alone, and with the journal.

    Example: ./yard bench core --repeats 5 --json core.json
    """
    console = Console(stderr=True)
    lines = core.run(repeats=repeats, huge=huge, say=lambda text: console.print(text, style="dim"))
    show("core", lines)
    if json_file is not None:
        report = Report("core", platform.python_version(), platform.machine(), lines)
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def show(suite: str, lines: Sequence[Line]) -> None:
    """The table: best of several, spread, floor, goal, verdict."""
    table = Table(title=f"bench {suite}: best of several, CPU time", title_justify="left")
    table.add_column("what")
    for column in ("best", "worst", "unit", "floor", "goal", "reached"):
        table.add_column(column, justify="left" if column in {"unit", "reached"} else "right")
    for one in lines:
        bounds = [
            "" if one.floor is None else f"{one.floor:g}",
            "" if one.goal is None else f"{one.goal:g}",
        ]
        table.add_row(
            one.what, f"{one.best:.2f}", f"{one.worst:.2f}", one.unit, *bounds, one.verdict
        )
    Console().print(table)
