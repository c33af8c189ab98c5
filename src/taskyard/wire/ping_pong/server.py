"""Ping-pong at the broker, the smallest worker protocol there is: workers at the backend, clients
at the frontend. Two dialects that share nothing but words.

`ping_pong_backend` and `ping_pong_frontend` hold them, `ping_pong_words` what they share.
`docs/dialects/ping-pong.md` says what goes over the wire.
"""

from collections.abc import Callable
from typing import Final

from taskyard.wire.ping_pong.backend import Backend
from taskyard.wire.ping_pong.frames import Settings
from taskyard.wire.ping_pong.frontend import Frontend

__all__ = ["Backend", "Frontend", "Settings", "make_server"]

_DEFAULT_SETTINGS: Final = Settings()


def make_server(
    dialect: int, random_bits: Callable[[], int], settings: Settings = _DEFAULT_SETTINGS
) -> tuple[Backend, Frontend]:
    """Both, by this number and the next one."""
    return Backend(dialect, random_bits, settings), Frontend(dialect + 1, random_bits, settings)
