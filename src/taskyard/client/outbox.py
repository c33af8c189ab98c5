"""Submit tasks inside a user's own transaction, on a connection to the broker's database.

Each task becomes a call of `taskyard.submit` in SQL, so it exists once the transaction commits, and
never if it rolls back. Nothing here commits, connects or needs a broker. Connections are of psycopg
or another driver of Python's database API, of Django, or of SQLAlchemy, which is imported for its
own connections only.
"""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from taskyard.campaign.batches import encode_batch, encode_text, task_bytes
from taskyard.campaign.task_spec import check_task, to_row
from taskyard.client import functions
from taskyard.client.exchanges import AwaitingRunner, BlockingRunner, exchange_method
from taskyard.client.functions import CallEncoder
from taskyard.client.submit import (
    after_names,
    check_function,
    check_work_type,
    function_row,
    positional,
    rows_of,
    split_arguments,
    taken_options,
    work_keys,
)
from taskyard.core.identity import spelling
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from taskyard.client.exchanges import Steps
    from taskyard.client.submit import Arguments, Work

#: Types are named, because not every driver sends them.
_SQL: Final = (
    "SELECT taskyard.submit(name => CAST({name} AS text), campaign => CAST({campaign} AS text), "
    "payload => CAST({payload} AS bytea), options => CAST(CAST({options} AS text) AS jsonb))"
)
_KEYS: Final = ("name", "campaign", "payload", "options")

#: With names as drivers and as SQLAlchemy write them.
_DRIVER_SQL: Final = _SQL.format(**{key: f"%({key})s" for key in _KEYS})
_SQLALCHEMY_SQL: Final = _SQL.format(**{key: f":{key}" for key in _KEYS})

#: Keys of work, which are encoded in the payload, and the name.
_ENCODED: Final = (
    *("name", "argv", "call", "args", "kwargs", "payload", "env", "cwd", "inputs", "outputs"),
    "final_exit_status",
)

#: Bytes of a generated name: many outboxes of many processes make names of one function.
_NAME_RANDOM_BYTES: Final = 10

#: A task as the values of a statement.
_Values = dict[str, Any]


def _values(raw: dict[str, Any], campaign: str) -> _Values:
    """Return a row of a file as the values of a statement, with its work as a payload."""
    if "after" in raw:
        raw["after"] = after_names(raw["after"], campaign)
    spec = check_task(raw, campaign)
    batch = encode_batch([spec], encode_text(campaign), time.time_ns())
    after = batch.after[0] if batch.after else []
    task_bytes(batch.names[0], batch.text_of(0), encode_text(spec.lane), after)  # raises
    row = {key: value for key, value in to_row(spec).items() if key not in _ENCODED}
    row["service"] = batch.terms[0].service.decode()
    if after:
        row["after"] = [*map(bytes.decode, after)]
    return {
        "name": spec.name,
        "campaign": campaign,
        "payload": batch.text_of(0),
        "options": msgspec.json.encode(row).decode(),
    }


def _new_name(first: str) -> str:
    return f"{first}-{secrets.token_hex(_NAME_RANDOM_BYTES)}"


def _full_name(values: _Values) -> str:
    return str(spelling(values["campaign"], values["name"]))


def _homes(connection: object) -> list[str]:
    """Return the modules of an object's classes."""
    return [base.__module__ for base in type(connection).__mro__]


def _is_sqlalchemy(connection: object) -> bool:
    """Return whether this is a session or connection of SQLAlchemy, also of a derived class."""
    return any(home.partition(".")[0] == "sqlalchemy" for home in _homes(connection))


def _is_async(connection: object) -> bool:
    in_sqlalchemy = any(home.startswith("sqlalchemy.ext.asyncio") for home in _homes(connection))
    return in_sqlalchemy or hasattr(connection, "__aenter__")


def _check(connection: object, *, is_async: bool) -> None:
    """Raise `UserError` for an object that can't execute a statement here."""
    if "sqlite3" in _homes(connection):
        raise UserError("connection: SQLite has no outbox (it needs a broker on PostgreSQL)")
    if not hasattr(connection, "execute" if _is_sqlalchemy(connection) else "cursor"):
        raise UserError(
            f"connection: {connection!r} is neither a connection to PostgreSQL, such as one of "
            "psycopg, nor a session or connection of SQLAlchemy"
        )
    if _is_async(connection) is not is_async:
        kind = "Outbox" if is_async else "AsyncOutbox"
        raise UserError(f"connection: {connection!r} is for `taskyard.{kind}`")


def _sqlalchemy_statement() -> Any:  # noqa: ANN401  # of a package that may be missing
    from sqlalchemy import text  # noqa: PLC0415  # the user has it

    return text(_SQLALCHEMY_SQL)


class OutboxBase:
    """Checks and encodes tasks. The base of both outboxes, which execute the statements."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401  # of several packages
        _check(connection, is_async=isinstance(self, AwaitingRunner))
        self._connection = connection
        self._calls = CallEncoder(None)

    @exchange_method
    def submit(  # all but the first are named
        self,
        work: Work,
        /,
        *values: Any,  # noqa: ANN401  # arguments of a function
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Steps[str]:
        """Submit one task when the transaction commits: a function, an argv, or bytes.

        Arguments are as for `Client.submit`. Returns the full name of the task, which
        `client.future` takes after the commit. Raises `UserError` for invalid arguments, and the
        driver's errors. The task runs where its worker was started, and large arguments are a part
        of the task, which has at most 16 MiB.
        """
        arguments: Arguments = (positional(args, values) if values else args, kwargs)
        if name == "":
            raise UserError("task name: must not be empty")
        if callable(work) or isinstance(work, str):
            taken = taken_options(name, campaign)
            arguments, options = split_arguments(work, arguments, options, taken)
        task = _values(self._row(work, name, campaign, arguments, options), campaign)
        yield [task]
        return _full_name(task)

    @exchange_method
    def map(
        self,
        work: Callable[..., Any] | str,
        /,
        *iterables: Iterable[Any],
        campaign: str = "",
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Steps[list[str]]:
        """Submit a call of a function per item, or per row of several iterables.

        Like `Client.map`, when the transaction commits. Returns the full names of the tasks.
        """
        check_function(work)
        taken = taken_options(None, campaign)
        (_, named), options = split_arguments(work, (None, kwargs), options, taken)
        row = partial(self._row, work)
        if callable(work):
            row = partial(self._call, self._calls.pickle_once(work))
        tasks = [
            _values(row(None, campaign, (args, named), options), campaign)
            for args in rows_of(iterables)
        ]
        if tasks:
            yield tasks
        return [*map(_full_name, tasks)]

    def _row(
        self,
        work: Work,
        name: str | None,
        campaign: str,
        arguments: Arguments,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Return a task as a row of a file."""
        if callable(work):
            return self._call(work, name, campaign, arguments, options)
        check_work_type(work, arguments)
        raw = {"name": name or _new_name(campaign or "task")}
        return {**raw, **work_keys(work, *arguments), **options}

    def _call(
        self,
        function: Callable[..., Any],
        name: str | None,
        campaign: str,
        arguments: Arguments,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the call of a function, or of its substitute, as a row of a file."""
        if "key" in options:
            raise UserError("key: names by content are for `Client.submit`, not for an outbox")
        args, kwargs = arguments[0] or (), arguments[1] or {}
        marks_of = None if name is None else functions.marks_of_named
        encoded = self._calls.encode(function, args, kwargs, marks_of)
        if name is None:
            name = _new_name(functions.function_name(function))
        return function_row(name, campaign, (args, kwargs), encoded, options)


class Outbox(OutboxBase, BlockingRunner):
    """Submits tasks in the transaction of a connection to PostgreSQL.

    The broker of that database runs them after the commit, each once, and never after a rollback.
    The connection is of psycopg, another driver or Django, or a session or connection of
    SQLAlchemy. Needs no client.
    """

    def _reply_to(self, tasks: Any) -> Any:  # noqa: ANN401  # of no exchange with a broker
        if _is_sqlalchemy(self._connection):
            self._connection.execute(_sqlalchemy_statement(), tasks)
            return
        with self._connection.cursor() as cursor:
            if len(tasks) == 1:
                cursor.execute(_DRIVER_SQL, tasks[0])
            else:
                cursor.executemany(_DRIVER_SQL, tasks)


class AsyncOutbox(OutboxBase, AwaitingRunner):
    """Submits tasks in the transaction of an asynchronous connection to PostgreSQL.

    That is an `AsyncConnection` of psycopg, or an `AsyncSession` or `AsyncConnection` of
    SQLAlchemy, whose methods are awaited.
    """

    async def _reply_to(self, tasks: Any) -> Any:  # noqa: ANN401  # of no exchange with a broker
        if _is_sqlalchemy(self._connection):
            await self._connection.execute(_sqlalchemy_statement(), tasks)
            return
        async with self._connection.cursor() as cursor:
            if len(tasks) == 1:
                await cursor.execute(_DRIVER_SQL, tasks[0])
            else:
                await cursor.executemany(_DRIVER_SQL, tasks)
