"""Where the rows of a table lie: names of directories and files, made of what the rows say.

A key is made of a campaign's name so that it is safe in a path, whatever bytes the name has; rows
that are of no campaign (workers, pauses) are under the key `yard`. The name itself is in the rows.
"""

import hashlib
import re
from pathlib import Path
from typing import Final

from taskyard.journal.history import HistoryPart

KEY: Final = "campaign_key"
DAY: Final = "day"

#: The key of rows that are of no campaign. No campaign has it: theirs end in a digest.
NO_CAMPAIGN: Final = "yard"

#: The day of a row that has no time.
NO_DAY: Final = "unknown"

#: Enough of a name to recognise it, and of its digest to tell names apart. Should two names share a
#: key all the same, they share directories, and nothing is lost.
_SLUG_CHARACTERS_MAX: Final = 40
_DIGEST_CHARACTERS: Final = 12


def campaign_key(campaign: str | None) -> str:
    """The directory's name for a campaign."""
    if campaign is None:
        return NO_CAMPAIGN
    slug = re.sub("[^A-Za-z0-9]+", "-", campaign).lower()[:_SLUG_CHARACTERS_MAX].strip("-")
    digest = hashlib.sha256(campaign.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{slug or 'none'}-{digest}"


def folder(key: str) -> str:
    return f"{KEY}={key}"


def row_range(part: HistoryPart) -> str:
    """A part's rows, as they are written in names of files."""
    return f"{part.first:012}-{part.last:012}"


_SPECIAL = re.compile(r"[\\*?\[\]{}]")


def spark_write_path(path: Path) -> str:
    """A path to write to."""
    return f"file://{path.absolute()}"


def spark_read_path(path: Path) -> str:
    """A path to read, and no other that it might be a pattern of."""
    escaped = _SPECIAL.sub(r"\\\g<0>", str(path.absolute()))
    return f"file://{escaped}"
