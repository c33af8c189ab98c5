"""`taskyard pipeline`: the table of its verbs, and what they have in common.

Each verb has a file of its own, `pipeline_NAME.py`, and imports Spark only when it is called: help
and completion do without, and so does a machine without the extra, until it needs it.
"""

from importlib.util import find_spec

import click

from taskyard.cli.commands import LazyCommand, LazyGroup
from taskyard.cli.options import quiet_option, verbose_option
from taskyard.errors import UserError

COMMANDS: dict[str, LazyCommand] = {
    "load": LazyCommand(
        "taskyard.cli.pipeline.load:load",
        "Load graphs of tasks from files, checked by Spark.",
    ),
    "history": LazyCommand(
        "taskyard.cli.pipeline.history:history",
        "Turn a state's history into tables; only what is new.",
    ),
    "report": LazyCommand(
        "taskyard.cli.pipeline.report:report",
        "Make a page with pictures of what happened, and tables.",
    ),
    "sweep": LazyCommand(
        "taskyard.cli.pipeline.sweep:sweep",
        "Say how long a campaign would take with other workers.",
    ),
    "fleet": LazyCommand(
        "taskyard.cli.pipeline.fleet:fleet",
        "Run workers inside Spark's executors.",
    ),
}

#: What the extra `spark` brings that every verb here needs.
_NEEDED = ("pyspark", "pandas")


class SparkCommand(click.Command):
    """A verb that needs Spark: it says so in one line where there is none."""

    def invoke(self, ctx: click.Context) -> object:
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            raise UserError(
                f"this verb needs {' and '.join(missing)}, which is not installed: "
                "`pip install 'taskyard[spark]'`"
            )
        from taskyard.pipeline.jvm import end_jvm_on_signals  # noqa: PLC0415  # not for `--help`

        with end_jvm_on_signals():
            return super().invoke(ctx)


#: Where Spark runs.
master_option = click.option(
    "--master",
    metavar="URL",
    default="local[*]",
    show_default=True,
    help="Where Spark runs: this machine, or a cluster such as spark://HOST:7077.",
)


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, no_args_is_help=True)
@verbose_option
@quiet_option
def pipeline() -> None:
    """Run bulk data work on Spark: campaigns in, history to tables, reports, planning, fleets.

    Needs the extra: pip install 'taskyard[spark]'. It brings Java along. A session takes some
    seconds to start.
    """
