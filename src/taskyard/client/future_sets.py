"""Many futures at once: gathering their values, and scattering values as futures.

Owns the walk over collections of futures, for both clients. Imports no client.
"""

from __future__ import annotations

import concurrent.futures
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from taskyard.client import progress as drawing
from taskyard.client.futures import as_completed
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.client.futures import Future

#: What `gather` does with futures that have no value.
Errors = Literal["raise", "skip"]

#: Stands for a future that is left out.
_SKIPPED: Final = object()

#: The function of a scattered value. It gets the value in a tuple, and returns it. Workers have it
#: without importing anything.
FIRST: Final = operator.itemgetter(0)


def futures_in(value: object, kind: type[Any]) -> Iterator[Any]:
    """Yield the futures in a collection, and in the lists, tuples, sets and dicts inside it."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from futures_in(one, kind)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from futures_in(one, kind)


def gathered(value: object, kind: type[Any], errors: Errors) -> Any:  # noqa: ANN401  # as the value
    """Return a collection with the results of settled futures in their places.

    With `errors` "skip", leave out those that have none.
    """
    if isinstance(value, kind):
        return _result(value, errors)
    if isinstance(value, dict):
        found = {key: gathered(one, kind, errors) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not _SKIPPED}
    if isinstance(value, list | tuple | set | frozenset):
        results = (gathered(one, kind, errors) for one in value)
        return _like(value, [one for one in results if one is not _SKIPPED])
    return value


def _like(value: Any, items: list[Any]) -> Any:  # noqa: ANN401  # a collection
    """Return items in a collection of the same kind."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    kind: Callable[[list[Any]], Any] = next(
        one for one in (list, tuple, set, frozenset) if isinstance(value, one)
    )
    return kind(items)


def _result(future: Any, errors: Errors) -> Any:  # noqa: ANN401  # a task's own value
    if errors == "raise":
        return future.result()
    try:
        return future.result()
    except Exception:  # noqa: BLE001  # the caller does not want it
        return _SKIPPED


def prepared(futures: object, errors: str) -> Any:  # noqa: ANN401  # a collection
    """Return a collection that can be walked twice. Raises `UserError` for unknown `errors`."""
    if errors not in ("raise", "skip"):
        raise UserError(f"errors {errors!r}: expected 'raise' or 'skip'")
    return _as_list(futures)


def without_skipped(value: Any) -> Any:  # noqa: ANN401  # as the value
    """Return None for a single future that was left out."""
    return None if value is _SKIPPED else value


def scattered(values: object, submit: Callable[[object], Any]) -> Any:  # noqa: ANN401  # as the values
    """Return a future for each item of a list, tuple, set or dict, or for one other value."""
    if isinstance(values, dict):
        return {key: submit(one) for key, one in values.items()}
    if isinstance(values, list | tuple | set | frozenset):
        return _like(values, [submit(one) for one in values])
    return submit(values)


def progress(*futures: Future[Any] | Iterable[Future[Any]]) -> None:
    """Draw a bar until all futures are settled, on a terminal or in a notebook.

    Takes futures and collections of futures, of a `Client`. Raises nothing if one fails: the bar
    counts it.
    """
    waiting = [*futures_in([*map(_as_list, futures)], concurrent.futures.Future)]
    for _ in drawing.with_progress(as_completed(waiting), len({*waiting})):
        pass


def _as_list(value: object) -> object:
    """Return the items of an iterator as a list, and any other value as it is."""
    return [*value] if isinstance(value, Iterator) else value
