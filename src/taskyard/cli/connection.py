"""Connect a command to a broker, or to a state directory without a broker.

Shell completion imports the commands, and the client is slow to import. So it is imported when a
command connects.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import click

from taskyard.core.limits import SECOND_NS
from taskyard.errors import ExitCode, NoBroker, StateLocked, TaskyardError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from taskyard.cli.options import CliContext
    from taskyard.client.discovery import BrokerLocation
    from taskyard.client.internal import InternalClient
    from taskyard.core.blobs import Result
    from taskyard.core.events import Scope
    from taskyard.wire.native.task_contents import Part

#: The timeout of the first reply. With the start of the process it makes about 5 s.
FIRST_ANSWER_SECONDS: Final = 4.5

#: How often the locks of a broker are read, and how many times in a row they must be free. Another
#: `map` or `run` may start a broker in between.
FREE_POLL_SECONDS: Final = 0.5
_FREE_COUNT: Final = 2

#: Files of a state directory: its journal, or the URL of its journal.
_JOURNAL_FILES: Final = ("journal.sqlite", "store")

_OFFLINE_NOTE: Final = "no broker is running on {}: showing its last state"


class ReadOnlyClient(Protocol):
    """The requests of a client that change nothing."""

    def status(self) -> dict[str, Any]: ...

    def workers(self) -> list[dict[str, Any]]: ...

    def existing(self, names: Sequence[str]) -> dict[str, dict[str, Any]]: ...

    def resolve(self, names: Sequence[str]) -> list[str]: ...

    def line_labels(self, views: Sequence[dict[str, Any]]) -> dict[str, str]: ...

    def campaign_lines(self, campaign: str) -> dict[str, str]: ...

    def show(self, name: str) -> dict[str, Any]: ...

    def explain(self, name: str) -> dict[str, Any]: ...

    def tasks(
        self, scope: Scope | None = None, match: str = "", *, measured: bool = False
    ) -> Iterator[dict[str, Any]]: ...

    def lanes(
        self, service: str | None = None, pattern: str | None = None
    ) -> Iterator[dict[str, Any]]: ...

    def kept_result(self, name: str) -> Result: ...

    def output(self, name: str, stream: str | None = None) -> bytes: ...

    def output_page(
        self,
        name: str,
        offset: int = 0,
        stream: str = "stdout",
        *,
        attempt: int | None = None,
        count: int | None = None,
    ) -> Part: ...


def connect_client(
    cli_context: CliContext, report: Callable[[str], object] | None = None
) -> InternalClient:
    """Connect to the broker that the options name. Raises `NoBroker`.

    `report` is called when a broker does not answer. The default is a warning on stderr.
    """
    from taskyard.client.discovery import configured_key_file  # noqa: PLC0415

    location = broker_location(cli_context)
    if location.broker is None:
        check_not_standby(location.state)
    key = cli_context.key or configured_key_file(cli_context.settings())
    return connect_to(cli_context, location.endpoint(), key, report)


def connect_to(
    cli_context: CliContext,
    broker: str,
    key: Path | None = None,
    report: Callable[[str], object] | None = None,
) -> InternalClient:
    """Connect to a broker. Report when it does not answer, by default on stderr."""
    from taskyard.client.internal import InternalClient  # noqa: PLC0415  # slow to import

    limit_ns = cli_context.broker_timeout
    client = InternalClient(
        broker,
        key=key,
        timeout=None if limit_ns is None else limit_ns / SECOND_NS,
        connect_timeout=FIRST_ANSWER_SECONDS,
        report=report or cli_context.warn,
        env=cli_context.variables,
    )
    # Commands read long results part by part, so that memory stays bounded.
    client.skip_long_results()
    return client


def given_location(cli_context: CliContext) -> str:
    """Return the given options that lead another command to the same broker, each after a space."""
    given = [("--state", cli_context.state), *(("--broker", one) for one in cli_context.brokers)]
    return "".join(f" {name} {shlex.quote(str(value))}" for name, value in given if value)


def broker_location(cli_context: CliContext) -> BrokerLocation:
    """Return the location of the broker that the options or the settings name.

    Raises `SeveralBrokers`.
    """
    from taskyard.client import discovery  # noqa: PLC0415

    return discovery.locate(cli_context.brokers, cli_context.state, settings=cli_context.settings())


def _ignore_unneeded_settings(cli_context: CliContext) -> None:
    """Ignore invalid settings in a command that reads a given state directory."""
    if cli_context.state is not None and not cli_context.brokers:
        cli_context.ignore_invalid_settings()


def local_state(cli_context: CliContext) -> Path:
    """Return the state directory on this machine. Raises `UserError` if only a broker is given."""
    location = broker_location(cli_context)
    broker, state = location.broker, location.state
    if broker is not None:
        raise UserError(f"broker {broker}: its files are not here (give its state with --state)")
    return state


@contextmanager
def connect_read_only(cli_context: CliContext) -> Iterator[ReadOnlyClient]:
    """Connect to the broker, or open the state directory read-only if no broker runs on it.

    A given state directory needs no settings, so invalid settings are ignored with a warning.
    Raises `NoBroker` at once if there is no such directory.
    """
    _ignore_unneeded_settings(cli_context)
    location = broker_location(cli_context)
    broker, state = location.broker, location.state
    if broker is None and not state.absolute().exists():  # raises in a deleted directory
        raise NoBroker(
            f"no broker is running: {state} does not exist (start one with `taskyard up`, or give "
            "another --state)"
        )
    if broker is None:
        check_not_standby(state)
    offline = _offline_client(cli_context)
    if offline is not None:
        cli_context.info(_OFFLINE_NOTE.format(state))
    with offline or connect_client(cli_context) as client:
        yield client


def check_not_standby(state: Path) -> None:
    """Raise `NoBroker` at once if a standby runs here: it answers nothing before it leads."""
    from taskyard.process.state_files import running_standby  # noqa: PLC0415  # not for `--help`

    found = running_standby(state)
    if found is not None:
        raise NoBroker(f"{state}: the broker here is {found} (use its --state or endpoint)")


@contextmanager
def connect_unless_settled(
    cli_context: CliContext, is_settled: Callable[[InternalClient], bool]
) -> Iterator[InternalClient]:
    """Connect to the broker, for a command that waits.

    If no broker runs on the state directory, and `is_settled` returns True for it, nothing needs to
    be awaited: then open it read-only.
    """
    offline = _offline_client(cli_context)
    if offline is not None:
        with offline:
            if is_settled(offline):
                cli_context.info(_OFFLINE_NOTE.format(offline.broker))
                yield offline
                return
    with connect_client(cli_context) as client:
        yield client


def _offline_client(cli_context: CliContext) -> InternalClient | None:
    """Return a client for the state directory if no broker uses it."""
    from taskyard.process.state_files import LOCK_FILE, lock_holder  # noqa: PLC0415

    location = broker_location(cli_context)
    broker, state = location.broker, location.state
    if broker is not None:
        return None
    if not has_journal(state) or lock_holder(state / LOCK_FILE) is not None:
        return None
    try:
        return open_last_state(cli_context, state)
    except StateLocked:  # a broker has started meanwhile
        return None


def has_journal(state: Path) -> bool:
    """Return whether a state directory has a journal, in SQLite or elsewhere."""
    return any((state / name).exists() for name in _JOURNAL_FILES)


def open_last_state(cli_context: CliContext, state: Path) -> InternalClient:
    """Open a client for a state directory without a broker. Raises `StateLocked`."""
    from taskyard.cli.offline import OfflineClient  # noqa: PLC0415  # imports most of the broker
    from taskyard.settings.loader import to_rules_set  # noqa: PLC0415

    return OfflineClient(state, to_rules_set(cli_context.settings()))


@contextmanager
def removed_if_unused(cli_context: CliContext, state: Path) -> Iterator[None]:
    """Remove a state directory that the block has made, if it fails as misused before any task.

    A missing input or an address in use would leave an empty directory behind.
    """
    is_new = not state.absolute().exists()
    try:
        yield
    except (TaskyardError, click.exceptions.Exit) as error:
        is_refused = error.exit_code in (ExitCode.USAGE, ExitCode.STORE_IN_USE)
        if is_new and is_refused and _is_unused(cli_context, state):
            shutil.rmtree(state, ignore_errors=True)
        raise


def _is_unused(cli_context: CliContext, state: Path) -> bool:
    """Return whether no process uses a state directory, and no task was ever submitted."""
    if not has_journal(state):
        return state.exists()
    try:
        with open_last_state(cli_context, state) as client:
            return not any(client.status()["counts"].values())
    except TaskyardError:
        return False


def is_offline(broker: ReadOnlyClient) -> bool:
    """Return whether a client reads a state directory without a broker."""
    module = sys.modules.get("taskyard.cli.offline")  # slow to import
    return module is not None and isinstance(broker, module.OfflineClient)


@contextmanager
def closed_with_own_broker(cli_context: CliContext, client: InternalClient) -> Iterator[None]:
    """Close the client when the `map` or `run` that has started its broker ends.

    Requests raise `ClientClosed` then. They would wait without end: that broker does not return.
    """
    from taskyard.process.state_files import LOCAL_FILE, LOCK_FILE, lock_holder  # noqa: PLC0415

    location = broker_location(cli_context)
    broker, state = location.broker, location.state
    if broker is not None or lock_holder(state / LOCAL_FILE) is None:
        yield
        return

    def has_ended() -> bool:
        return all(lock_holder(state / name) is None for name in (LOCAL_FILE, LOCK_FILE))

    def follow() -> None:
        count = 0
        while count < _FREE_COUNT and not is_over.wait(FREE_POLL_SECONDS):
            count = count + 1 if has_ended() else 0
        if not is_over.is_set():
            client.close(0)

    is_over = threading.Event()
    thread = threading.Thread(target=follow, name="taskyard-locks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def whole_result(broker: ReadOnlyClient, name: str) -> Result:
    """Return the result of a task that is done, as far as it is kept."""
    from taskyard.core.blobs import Result  # noqa: PLC0415  # not for `--help`

    kept = broker.kept_result(name)
    return kept if kept.blob is None else Result(broker.output(name, "result"))


def stream_parts(
    broker: ReadOnlyClient, name: str, stream: str = "stdout", attempt: int | None = None
) -> Iterator[bytes]:
    """Yield a stream part by part.

    Raises `BytesTruncated` or `BytesDamaged` at its end if bytes are missing or damaged.
    """
    from taskyard.wire.native.task_contents import StreamPages  # noqa: PLC0415  # not for `--help`

    pages = StreamPages(name)
    while True:
        page = broker.output_page(name, pages.offset, stream, attempt=attempt)
        yield page.data
        if pages.add(page):
            return
        attempt = page.attempt
