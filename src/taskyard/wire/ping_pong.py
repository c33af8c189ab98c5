"""Ping-pong at the broker, the smallest worker protocol there is: workers at the backend, clients
at the frontend. Two dialects that share nothing but words.

`ping_pong_backend` and `ping_pong_frontend` hold them, `ping_pong_words` what they share.
`docs/dialects/ping-pong.md` says what goes over the wire.
"""

from collections.abc import Callable
from typing import Final

from taskyard.wire.ping_pong_backend import Backend
from taskyard.wire.ping_pong_frontend import Frontend
from taskyard.wire.ping_pong_words import Settings

__all__ = ["Backend", "Frontend", "Settings", "at_broker"]

_USUAL: Final = Settings()


def at_broker(
    dialect: int, luck: Callable[[], int], settings: Settings = _USUAL
) -> tuple[Backend, Frontend]:
    """Both, by this number and the next one."""
    return Backend(dialect, luck, settings), Frontend(dialect + 1, luck, settings)
