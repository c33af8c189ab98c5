"""Histograms of durations: bins that are added up, and percentiles from them.

A bin is exact below 256 ns. Above, each power of two has 128 bins, so the middle of a bin is at
most 1/256 from any value in it. Integers only: the same durations give the same bins everywhere.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from taskyard.pipeline.fold.columns import Ints, Number, is_first, running_sums

#: Bins of one power of two, as bits.
_BITS: Final = 7
_BINS: Final = 1 << _BITS

#: The largest relative error of a percentile.
ERROR_MAX: Final = 1 / (2 * _BINS)


def bins(durations_ns: Ints) -> Ints:
    """Return the bin of each duration. A negative one counts as 0."""
    values = np.maximum(durations_ns, 0)
    _, exponents = np.frexp(values.astype(np.float64))
    shifts: Ints = np.maximum(exponents.astype(np.int64) - _BITS - 1, 0)
    found: Ints = _BINS * shifts + (values >> shifts)
    return found


def middles(numbers: Ints) -> Ints:
    """Return the duration in the middle of each bin."""
    shifts = np.maximum(numbers // _BINS - 1, 0)
    found: Ints = ((numbers - _BINS * shifts) << shifts) + ((np.int64(1) << shifts) >> 1)
    return found


def percentile(rows: Ints, numbers: Ints, counts: Ints, row_count: int, share: float) -> Number:
    """Return the percentile of each row: the middle of the bin that has this rank.

    Entries are sorted by row and bin.
    """
    totals = np.zeros(row_count, np.int64)
    np.add.at(totals, rows, counts)
    ranks = np.maximum(np.ceil(share * totals).astype(np.int64), 1)[rows]
    up_to = running_sums(counts, is_first(rows))
    is_it = (up_to >= ranks) & (up_to - counts < ranks)
    found = np.zeros(row_count, np.int64)
    found[rows[is_it]] = middles(numbers[is_it])
    return Number(found, totals > 0)
