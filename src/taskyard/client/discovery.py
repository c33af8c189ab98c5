"""Finds brokers and keys: from arguments, the environment, the settings file, or defaults.

A nearer source wins. In one source, a broker's endpoint wins over an invitation, and both win over
a state directory. A key file wins over an invitation. A state directory stands for its own broker,
so one in the arguments wins over an endpoint in the environment, and one in the environment over an
endpoint in the file.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from taskyard.calls.environments import Environment, encode_environment, is_passed
from taskyard.core.limits import ENVIRONMENT_BYTES_MAX
from taskyard.core.model import counted
from taskyard.errors import NoBroker, SeveralBrokers, UnusableKey, UserError
from taskyard.net import endpoints
from taskyard.net.endpoints import is_local
from taskyard.settings.files import InvalidSettings
from taskyard.settings.loader import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.net.keys import Invitation, PeerKey
    from taskyard.settings.loader import Settings

#: The dialect of clients.
NATIVE_DIALECT: Final = "dwork"

#: An endpoint or several, each perhaps a list with commas.
Brokers: TypeAlias = "str | Sequence[str] | None"

#: How long a connection may take to be refused. A reply of the system takes one round trip.
PROBE_SECONDS: Final = 0.5


class BrokerLocation(NamedTuple):
    """The endpoint of a broker, or a state directory."""

    #: None stands for the broker of the state directory.
    broker: str | None
    state: Path

    def endpoint(self) -> str:
        """Return the endpoint to connect to."""
        return self.broker or endpoints.native_endpoint(self.state)


def locate(
    broker: Brokers = None,
    state: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
    settings: Settings | None = None,
) -> BrokerLocation:
    """Return the broker's location. Reads the settings only if they are needed and not passed.

    Raises `SeveralBrokers`.
    """
    given = peer_endpoints(broker)
    if state:
        return BrokerLocation(_only(given), Path(state))
    settings = settings or load(environment=environment)
    return BrokerLocation(_only(given or _named_endpoints(settings)), settings.broker.state)


def _only(found: Sequence[str]) -> str | None:
    """Return the only endpoint. Raises `SeveralBrokers`."""
    if len(found) > 1:
        raise SeveralBrokers(f"brokers {', '.join(found)}: this takes one broker")
    return found[0] if found else None


def _named_endpoints(settings: Settings) -> tuple[str, ...]:
    """Return the endpoints in the settings, unless a nearer source has a state directory."""
    url, invite, state = (settings.source(f"broker.{name}") for name in ("url", "invite", "state"))
    if invite > url and invite >= state:
        return invited_endpoints(settings)
    return configured_endpoints(settings) if url >= state else ()


def invited_endpoints(settings: Settings) -> tuple[str, ...]:
    """Return the first endpoint of the configured invitation. Raises `UserError`."""
    found = configured_invitation(settings)
    if found is None:
        return ()
    if found.dialect != NATIVE_DIALECT:
        origin = settings.all["broker.invite"].origin
        raise UnusableKey(
            f"{origin}: the invitation is for the dialect {found.dialect}, this needs "
            f"{NATIVE_DIALECT} (give another broker or state directory)"
        )
    return found.endpoints[:1]


def configured_invitation(settings: Settings) -> Invitation | None:
    """Return the invitation of the settings or the environment. Raises `UserError`."""
    invite = settings.broker.invite
    if invite is None:
        return None
    from taskyard.net.keys import read_invitation, read_invitation_line  # noqa: PLC0415  # as in `key_for`

    if isinstance(invite, Path):
        return read_invitation(str(invite))
    return read_invitation_line(settings.all["broker.invite"].origin.location, invite.reveal())


def peer_endpoints(broker: Brokers) -> tuple[str, ...]:
    """Return the canonical forms of endpoints to connect to, each once. Raises `UserError`."""
    given = [broker] if isinstance(broker, str) else broker or ()
    if not isinstance(given, Iterable):
        raise UserError(
            f"broker {given!r}: must be an endpoint, such as 'tcp://HOST:PORT', or a list of them "
            "(a directory is given by state=)"
        )
    single = [one for some in given if some for one in endpoints.split_endpoints(some)]
    return tuple(dict.fromkeys(endpoints.peer_endpoint(one.strip()) for one in single))


def configured_endpoints(settings: Settings) -> tuple[str, ...]:
    """Return the endpoints in the settings. Raises `InvalidSettings` if one is invalid."""
    try:
        return tuple(dict.fromkeys(map(endpoints.peer_endpoint, settings.broker.url or ())))
    except UserError as wrong:
        raise InvalidSettings(
            f"{settings.all['broker.url'].origin}: broker.url: {wrong}"
        ) from wrong


def endpoint(
    broker: Brokers = None,
    state: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
    settings: Settings | None = None,
) -> str:
    """Return the endpoint to connect to. A given broker needs no settings.

    Raises `SeveralBrokers`.
    """
    given = _only(peer_endpoints(broker))
    return given or locate(None, state, environment, settings).endpoint()


def worker_endpoints(
    brokers: Sequence[str], state: Path | None, settings: Settings
) -> tuple[str, ...]:
    """Return the endpoints of the brokers that a worker works for."""
    given = peer_endpoints(brokers)
    if not given and not state:
        given = _named_endpoints(settings)
    return given or (endpoints.native_endpoint(state or settings.broker.state),)


def key_for(
    endpoint: str,
    key: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
    settings: Settings | None = None,
) -> PeerKey | None:
    """Return the key for an endpoint, if there is one. Raises `UserError`.

    Only TCP uses keys. On other sockets the kernel authenticates the peer.
    """
    if not endpoints.uses_tcp(endpoint):
        return None
    if key:
        return _read_key(Path(key))
    settings = settings or load(environment=environment)
    path = configured_key_file(settings)
    if path is None:
        invitation = configured_invitation(settings)
        return None if invitation is None else invitation.key
    return _read_key(path)


def configured_key_file(settings: Settings) -> Path | None:
    """Return the key file of the settings, if there is one. It may be an invitation's."""
    key, invite = settings.broker.key, settings.broker.invite
    if settings.source("broker.invite") > settings.source("broker.key"):
        return invite if isinstance(invite, Path) else None
    return key


def _read_key(path: Path) -> PeerKey:
    from taskyard.net import keys  # noqa: PLC0415  # most calls have no key, and shell completion must be fast

    return keys.read_peer_key(path)


def keys_for(
    found: Sequence[str],
    keys: Sequence[str | Path] = (),
    environment: Mapping[str, str] = os.environ,
    settings: Settings | None = None,
) -> list[PeerKey | None]:
    """Return the key for each endpoint: the first file for the first TCP endpoint, and so on.

    A key file has the public key of its broker, so that each broker has its own. Raises
    `UserError` if their numbers differ.
    """
    remote = [one for one in found if endpoints.uses_tcp(one)]
    if len(found) == 1 and len(keys) <= 1:
        return [key_for(found[0], next(iter(keys), None), environment, settings)]
    if remote and not keys:
        configured = configured_key_file(settings or load(environment=environment))
        keys = () if configured is None else (configured,)
    if keys and len(keys) != len(remote):
        raise UnusableKey(
            f"{counted(len(keys), 'key')}, but {counted(len(remote), 'broker')} over TCP (give "
            "--key for each of them, in the same order)"
        )
    files = dict(zip(remote, keys, strict=False))
    return [key_for(one, files[one]) if one in files else None for one in found]


def key_files_for(
    found: Sequence[str], keys: Sequence[str | Path], settings: Settings
) -> list[Path | None]:
    """Return the absolute path of the key file for each endpoint, as `keys_for` assigns them.

    None: the endpoint needs no key, or its key is in no file.
    """
    remote = [one for one in found if endpoints.uses_tcp(one)]
    configured = configured_key_file(settings)
    files = [*keys] or ([] if configured is None else [configured])
    by_endpoint = dict(zip(remote, files, strict=False))
    return [Path(by_endpoint[one]).absolute() if one in by_endpoint else None for one in found]


def is_refused(endpoint: str) -> bool:
    """Return whether no process listens at an endpoint. False if that is not known quickly.

    Nor is it known of a broker with several addresses: a standby may be about to take over.
    """
    if endpoints.has_addresses(endpoint):
        return False
    address = endpoints.parse_peer(endpoint)
    try:
        if isinstance(address, endpoints.Tcp):
            socket.create_connection((address.host, address.port), PROBE_SECONDS).close()
        else:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_SECONDS)
                probe.connect(address.path)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def refused_error(endpoint: str, key: PeerKey | None = None) -> NoBroker:
    """Return the error for an endpoint where no process listens."""
    hint = connection_hint(endpoint, key)
    return NoBroker(f"broker at {endpoint}: connection refused ({hint})")


def connection_hint(endpoint: str, key: PeerKey | None) -> str:
    """Return a hint on an endpoint that does not answer. On TCP the key may be the cause."""
    if not endpoints.uses_tcp(endpoint):
        return "start one with `taskyard up`, or give another broker or state directory"
    if key is None:
        return "is it running? If it requires a key, give --key FILE or Client(key=…)"
    return f"is it running, and is {key.name} a key of this broker?"


#: The variables to pass on. A mapping: exactly these. Names: these and the usual variables. True
#: stands for all, False for none, and None for the usual variables.
Variables = Mapping[str, str] | Iterable[str] | bool | None


def submitter_environment(
    endpoint: str, variables: Variables = None, own: Mapping[str, str] = os.environ
) -> bytes:
    """Return the environment for a broker at this endpoint. b"": it is not on the local socket.

    Raises `UserError` for a variable that is not set, for variables that are too long, and if
    variables were chosen but can't be passed on.
    """
    if not is_local(endpoint):
        if variables not in (None, False):
            raise UserError(
                "environment: can't be passed on over TCP, only on the local socket of the broker "
                "(give NAME=VALUE)"
            )
        return b""
    env = _chosen(variables, own)
    is_whole = variables is True
    encoded = encode_environment(Environment(socket.gethostname(), _cwd(own), env, is_whole))
    if len(encoded) > ENVIRONMENT_BYTES_MAX:
        raise UserError(
            f"environment of {len(encoded):,} bytes: limit is {ENVIRONMENT_BYTES_MAX:,} (pass "
            "fewer variables)"
        )
    return encoded


def _cwd(own: Mapping[str, str]) -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a text is needed
    except FileNotFoundError:  # deleted: tasks that are submitted here fail with its name
        return own.get("PWD") or "/"


def _chosen(variables: Variables, own: Mapping[str, str]) -> dict[str, str] | None:
    if variables is False:
        return None
    if variables is True:
        return dict(own)
    if isinstance(variables, Mapping):
        return dict(variables)
    usual = {name: value for name, value in own.items() if is_passed(name)}
    return usual | {name: _value(name, own) for name in variables or ()}


def _value(name: str, own: Mapping[str, str]) -> str:
    if name not in own:
        raise UserError(f"variable {name}: not set (give {name}=VALUE)")
    return own[name]
