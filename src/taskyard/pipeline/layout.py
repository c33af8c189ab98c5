"""Names of the directories and files that tables are stored in.

A campaign's directory is named by a key that is safe in a path, for any campaign name. Rows without
a campaign (workers, pauses) are stored under the key `yard`. The name itself is in the rows. Also
escapes paths for Spark.
"""

import hashlib
import re
from pathlib import Path
from typing import Final

from taskyard.journal.history import HistoryPart

KEY: Final = "campaign_key"
DAY: Final = "day"

#: The key of rows without a campaign. No campaign can have it: their keys end in a digest.
NO_CAMPAIGN: Final = "yard"

#: The day of a row without a time.
NO_DAY: Final = "unknown"

#: Long enough to recognise a name and to keep digests apart. If two names do share a key, they
#: share a directory and nothing is lost.
_SLUG_CHARACTERS_MAX: Final = 40
_DIGEST_CHARACTERS: Final = 12


def campaign_key(campaign: str | None) -> str:
    """Return the directory key of a campaign."""
    if campaign is None:
        return NO_CAMPAIGN
    slug = re.sub("[^A-Za-z0-9]+", "-", campaign).lower()[:_SLUG_CHARACTERS_MAX].strip("-")
    digest = hashlib.sha256(campaign.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{slug or 'none'}-{digest}"


def folder(key: str) -> str:
    return f"{KEY}={key}"


def row_range(part: HistoryPart) -> str:
    """Return the range of journal rows of a part, as file names contain it."""
    return f"{part.first:012}-{part.last:012}"


_SPECIAL = re.compile(r"[\\*?\[\]{}]")


def spark_write_path(path: Path) -> str:
    """Return a local path in the form that Spark writes to.

    It looks like a URI, but Spark does not decode percent signs.
    """
    return f"file://{path.absolute()}"


def spark_read_path(path: Path) -> str:
    """Return a local path in the form that Spark reads, with all pattern characters escaped."""
    escaped = _SPECIAL.sub(r"\\\g<0>", str(path.absolute()))
    return f"file://{escaped}"
