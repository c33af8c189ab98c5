"""A filter of names: says for certain that a name is new, and else that it may be known.

Most names that a broker meets are new, and to look each of them up in the index of finished tasks
is ten times as dear as to see here that it can't be there. One bit a name, at the place that its
hash says; it never says "new" of a name that was added. Lives in memory: Python's hashes are
another process's noise.
"""

from collections.abc import Iterable
from typing import Final

#: With so many bits a name, one new name in sixteen is looked up in vain.
BITS_PER_NAME: Final = 16

#: For a million names, 2 MiB: smaller ones would only have to grow.
CAPACITY_MIN: Final = 1 << 20


class NameFilter:
    """Names that may be known. With more names than it is made for it says "may be" more often."""

    def __init__(self, names_expected: int = 0, capacity_min: int = CAPACITY_MIN) -> None:
        #: The next power of two, so that a byte's place is the low bits of a hash. The bit in it is
        #: said by the highest ones.
        self.capacity = 1 << (max(names_expected, capacity_min, 1) - 1).bit_length()
        self._bits = bytearray(self.capacity * BITS_PER_NAME // 8)
        self._mask = len(self._bits) - 1
        #: How many were added; some perhaps twice.
        self.count = 0

    @property
    def is_full(self) -> bool:
        return self.count > self.capacity

    def add(self, names: Iterable[bytes]) -> None:
        bits, mask, count = self._bits, self._mask, 0
        for place in map(hash, names):
            bits[place & mask] |= 1 << (place >> 61 & 7)
            count += 1
        self.count += count

    def may_contain(self, names: list[bytes]) -> list[bytes]:
        """Those of these names that may have been added; the others were not."""
        bits, mask = self._bits, self._mask
        return [
            name
            for name, place in zip(names, map(hash, names), strict=True)
            # Most bytes have no bit at all: to ask that first is quicker.
            if (byte := bits[place & mask]) and byte >> (place >> 61 & 7) & 1
        ]
