"""How to run a suite that starts processes: repeats, sizes, and where progress is printed."""

from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias

from msgspec import Struct

#: A broker by the store of its journal, or the echo.
Kind: TypeAlias = Literal["durable", "in memory", "echo", "postgresql"]

#: The divisor for numbers of tasks in a quick run.
QUICK: Final = 100


class Settings(Struct, frozen=True):
    say: Callable[[str], None]
    repeats: int = 3
    #: Small numbers, to see whether it runs.
    quick: bool = False
    #: Print where the broker spends its time.
    profile: bool = False
    #: The URL of a store in PostgreSQL, to compare with SQLite, or `postgresql` for a server that
    #: is started.
    store: str = ""

    def count(self, count: int) -> int:
        return max(1, count // QUICK) if self.quick else count

    def times(self) -> Iterator[int]:
        return iter(range(self.repeats))
