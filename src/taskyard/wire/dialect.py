"""Requests of all dialects are numbered without clashes: a number tells its dialect.

The scheduler gives a request's number back with whatever answers it, and nothing else would say
which dialect has to tell it.
"""

from collections.abc import Iterator
from itertools import count
from typing import Final

#: Dialects that one broker speaks at once, one that is spoken on several sockets counted once.
DIALECTS_MAX: Final = 16

#: Worker names that begin so belong to the dialect; the native one takes no such names.
ROUND_ROBIN: Final = b"round-robin:"
PING_PONG: Final = b"ping-pong:"
WMP: Final = b"wmp:"
PREFIXES: Final = (ROUND_ROBIN, PING_PONG, WMP)


def request_numbers(dialect: int) -> Iterator[int]:
    """The numbers of a dialect's requests; 0 is nobody's."""
    if not 0 <= dialect < DIALECTS_MAX:
        raise ValueError(f"a broker speaks at most {DIALECTS_MAX} dialects")
    return count(DIALECTS_MAX + dialect, DIALECTS_MAX)
