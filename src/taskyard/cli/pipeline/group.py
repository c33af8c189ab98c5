"""`taskyard pipeline`: the table of its commands and their common options.

Each command has a module in this package and imports Spark only when it runs. So help and
completion are fast, and work without the extra `spark`.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from taskyard.cli.command import Command
from taskyard.cli.commands import LazyCommand, LazyGroup
from taskyard.cli.options import NEAREST_STATE, SettingOption
from taskyard.errors import NotInstalled

COMMANDS: dict[str, LazyCommand] = {
    "history": LazyCommand(
        "taskyard.cli.pipeline.history:history",
        "Compute tables from the history, incrementally.",
    ),
    "sweep": LazyCommand(
        "taskyard.cli.pipeline.sweep:sweep",
        "Simulate a campaign with other numbers of workers.",
    ),
    "fleet": LazyCommand(
        "taskyard.cli.pipeline.fleet:fleet",
        "Run workers inside Spark executors.",
    ),
}

#: Packages of the extra `spark` that every command needs.
_NEEDED = ("pyspark", "pandas", "pyarrow")


def require_spark() -> None:
    """Raise NotInstalled if a package of the extra is missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise NotInstalled(f"{', '.join(missing)} not installed (`pip install 'taskyard[spark]'`)")


class SparkCommand(Command):
    """A command that needs Spark. Without it, it raises a `UserError`."""

    def invoke(self, ctx: click.Context) -> object:
        require_spark()
        from taskyard.pipeline.jvm import end_jvm_on_signals  # noqa: PLC0415  # not needed by `--help`

        with end_jvm_on_signals():
            return super().invoke(ctx)


#: All cores of this machine.
LOCAL_MASTER: Final = "local[*]"

master_option = click.option(
    "--master",
    metavar="URL",
    default=LOCAL_MASTER,
    envvar="SPARK_REMOTE",
    show_envvar=True,
    help="Spark master: this machine, a cluster as in spark://HOST:7077, or a Spark Connect "
    "server as in sc://HOST:15002.",
)


#: For commands that read the histories of several brokers. Without it, the state of the settings.
states_option = click.option(
    "--state",
    "states",
    type=click.Path(path_type=Path, readable=False),
    cls=SettingOption,
    envvar="TASKYARD_STATE",
    show_default=NEAREST_STATE,
    multiple=True,
    metavar="DIR",
    help="State directory. Repeatable: one for each broker.",
)


#: Commands that have another place.
_SUGGESTIONS: dict[str, tuple[str, ...]] = {
    "load": ("`taskyard load --spark`",),
    "report": ("`taskyard report`",),
}


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, suggestions=_SUGGESTIONS, no_args_is_help=True)
def pipeline() -> None:
    """Run Spark jobs: history, sweep, fleet.

    Needs the extra: pip install 'taskyard[spark]', which includes Java. A Spark session takes some
    seconds to start.
    """
