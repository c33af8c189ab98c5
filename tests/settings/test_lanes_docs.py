"""The page on lanes names every setting of a section and every reason of a lane, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from taskyard.core.explain import LANE_REASONS
from taskyard.core.limits import CRASH_DELAY_NS, CRASHES_MAX, LANE_RUN_TASKS_MAX, SECOND_NS
from taskyard.settings.keys import ServiceSection

PAGE: Final = (Path(__file__).parent.parent.parent / "docs" / "lanes.md").read_text()


def first_column(heading: str) -> list[str]:
    """Return the first column of the table under a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_every_setting_of_a_section_has_its_line() -> None:
    settings = [key.name for key in ServiceSection.keys("service.NAME")]
    assert sorted(first_column("Every setting of a section")) == sorted(settings)


def test_every_reason_of_a_lane_has_its_line_in_its_order() -> None:
    assert first_column("Why a lane waits") == [reason.value for reason in LANE_REASONS]


def test_numbers_are_those_of_the_code() -> None:
    assert f"at most {LANE_RUN_TASKS_MAX} tasks long" in PAGE
    seconds = CRASH_DELAY_NS // SECOND_NS
    without = (
        f"without a schedule it waits {seconds} s, and has failed after {CRASHES_MAX} attempts"
    )
    assert without in PAGE
