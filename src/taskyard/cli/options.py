"""Options that verbs have in common, each defined once.

An option of this file stores what it was given in the `Talk` of the call, so that it means the same
before the verb and after it.
"""

from pathlib import Path

import click


class Talk:
    """How one call of the command line talks to its user."""

    def __init__(self) -> None:
        #: Show the traceback of an error, not only its message.
        self.verbose = False
        #: Say nothing but the answer.
        self.quiet = False


def _remember_verbose(context: click.Context, _option: click.Parameter, given: bool) -> None:  # noqa: FBT001  # click's signature
    if given:
        context.ensure_object(Talk).verbose = True


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_verbose,
    help="Show where an error came from, too.",
)


def _remember_quiet(context: click.Context, _option: click.Parameter, given: bool) -> None:  # noqa: FBT001  # click's signature
    if given:
        context.ensure_object(Talk).quiet = True


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_quiet,
    help="Show no progress.",
)

state_option = click.option(
    "--state",
    type=click.Path(path_type=Path),
    default=".taskyard",
    metavar="DIR",
    help="The state directory; ./.taskyard if not given.",
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Answer with one JSON document, for programs."
)
