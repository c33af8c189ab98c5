"""Many trivial cases as one test: a test of its own costs each case more than its check.

The cases share the fixtures of the test, so they must not depend on fresh ones. A test that starts
a process, or that needs its own directory, is parametrized by pytest.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Test = Callable[..., None]


def each_case(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run all cases in one test, as `pytest.mark.parametrize` would in many.

    All of them run. The error of the first that failed has a note for each.
    """
    keys = (names,) if isinstance(names, str) else names
    given = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert given

    def decorate(test: Test) -> Test:
        @wraps(test)
        def every_case(**fixtures: Any) -> None:
            failures: list[BaseException] = []
            notes = [f"of {len(given)} cases these failed:"]
            for values in given:
                case = dict(zip(keys, values, strict=True))
                try:
                    test(**case, **fixtures)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # raised below
                    failures.append(error)
                    notes.append("  " + ", ".join(f"{key}={one!r}" for key, one in case.items()))
            if failures:
                failures[0].add_note("\n".join(notes))
                raise failures[0]

        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in keys]
        every_case.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return every_case

    return decorate
