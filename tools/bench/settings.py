"""How to run a suite that starts processes: how often, how large, and who is told how it goes."""

from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias

from msgspec import Struct

#: A broker by where its journal is, or no broker at all.
Kind: TypeAlias = Literal["durable", "in memory", "echo"]

#: What a quick run divides the numbers of tasks by.
QUICK: Final = 100


class Settings(Struct, frozen=True):
    say: Callable[[str], None]
    repeats: int = 3
    #: Small numbers: whether it runs, not how fast.
    quick: bool = False
    huge: bool = False
    #: Print where the broker spends its time.
    profile: bool = False

    def count(self, count: int) -> int:
        return max(1, count // QUICK) if self.quick else count

    def times(self) -> Iterator[int]:
        return iter(range(self.repeats))
