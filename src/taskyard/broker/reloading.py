"""The settings read again while the broker runs: on SIGHUP, and nothing is restarted.

Owns what is said about it. A file that can't be used changes nothing: the rules that hold stay.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskyard.errors import UserError
from taskyard.settings import changes
from taskyard.settings import rules as settings_rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.events import RulesSet
    from taskyard.settings.sections import Settings

logger = logging.getLogger("taskyard.broker")


class SettingsReloader:
    """The settings that hold, and where they came from."""

    def __init__(self, settings: Settings, read: Callable[[], Settings]) -> None:
        """`read` reads them anew, and raises `InvalidSettings` if it can't."""
        self._settings = settings
        self._read = read

    @property
    def rules(self) -> RulesSet:
        return settings_rules.to_rules_set(self._settings)

    def reload(self) -> RulesSet | None:
        """Read them again and say what has changed; None: they can't be used, and nothing has."""
        try:
            found = self._read()
        except UserError as bad:
            logger.warning("the settings are as they were, because what was read is bad: %s", bad)
            return None
        logger.warning("read the settings: %s", changes.diff(self._settings, found).sentence())
        self._settings = found
        return self.rules
