"""Invitations: one line with all that a peer on another machine needs to connect to a broker.

The line has the broker's endpoints and public key, and the peer's name, roles and secret, as JSON
in Base64 behind a prefix. A file of it may have comments, and must be private like a key file,
which it can replace. Which keys are valid is decided by `keyring.py`.
"""

import sys
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from taskyard.errors import UnusableKey, UserError
from taskyard.net import endpoints, keys
from taskyard.net.keys import PeerKey, Secret
from taskyard.settings.kinds import INVITATION_PREFIX
from taskyard.wire.roles import Role

#: Endpoints in one invitation.
ENDPOINTS_MAX: Final = 16

#: Stands for stdin.
STDIN: Final = "-"


class Invitation(Struct, frozen=True):
    """A key, and where to use it."""

    name: str
    roles: tuple[Role, ...]
    secret: Secret
    #: The broker's public key.
    broker: str
    #: The dialect of the endpoints.
    dialect: str
    endpoints: tuple[str, ...]

    @property
    def key(self) -> PeerKey:
        return PeerKey(self.name, self.roles, self.secret, self.broker)


def invite(key: PeerKey, dialect: str, places: tuple[str, ...]) -> Invitation:
    """Return the invitation of a key."""
    return Invitation(key.name, key.roles, key.secret, key.broker, dialect, places)


def format_line(invitation: Invitation) -> str:
    """Return the line of an invitation. It contains the secret."""
    return keys.format_invitation(msgspec.to_builtins(invitation, enc_hook=_reveal))


def format_file(invitation: Invitation) -> str:
    """Return the content of an invitation file."""
    return (
        f"# An invitation to a Taskyard broker as {invitation.name} "
        f"({', '.join(invitation.roles)}).\n"
        "# Keep it private, mode 0600. Use it with `taskyard join FILE`, --invite FILE of\n"
        "# other commands, or TASKYARD_INVITE=FILE.\n"
        f"{format_line(invitation)}\n"
    )


def _reveal(value: object) -> str:
    if isinstance(value, Secret):
        return value.reveal().decode("ascii")
    raise NotImplementedError


def read(place: str) -> Invitation:
    """Read an invitation from a file, or a line of stdin if `place` is `-`. Raise UserError."""
    if place.startswith(INVITATION_PREFIX):
        raise UnusableKey(
            "--invite: other users can see the options of a process (give a file, or set "
            "TASKYARD_INVITE to the line)"
        )
    shown = "stdin" if place == STDIN else place
    try:
        content = _line_of_stdin() if place == STDIN else keys.read_private(Path(place))
    except FileNotFoundError:
        raise UnusableKey(
            f"{place}: invitation not found (create one on the broker's machine with "
            "`taskyard keys invite`)"
        ) from None
    return _parse_from(shown, content)


def read_line(origin: str, line: str) -> Invitation:
    """Read an invitation from its line. `origin` is named in errors. Raise UserError."""
    return _parse_from(origin, line.encode(errors="replace"))


def _parse_from(origin: str, content: bytes) -> Invitation:
    try:
        return _parse(content.decode())
    except ValueError:
        # Without the cause, which could reveal the content.
        raise UnusableKey(
            f"{origin}: not a valid invitation (create one with `taskyard keys invite`)"
        ) from None
    except UserError as error:
        raise UnusableKey(f"{origin}: {error}") from error


def _parse(text: str) -> Invitation:
    """Parse an invitation. Raise ValueError, or UserError for an invalid endpoint."""
    fields = keys.invitation_fields(text)
    found = msgspec.convert(fields, Invitation, dec_hook=keys.decode_secret)
    if not keys.is_valid(found.key) or not 0 < len(found.endpoints) <= ENDPOINTS_MAX:
        raise ValueError
    for one in found.endpoints:
        endpoints.peer_endpoint(one)
    return found


def _line_of_stdin() -> bytes:
    """Read one line, so that a supervisor can keep stdin open."""
    return sys.stdin.buffer.readline(keys.FILE_BYTES_MAX)
