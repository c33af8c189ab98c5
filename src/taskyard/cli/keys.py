"""`taskyard keys`: who may come to a broker from other machines, and what they may do there.

Owns the words and the documents that these verbs print. A secret is written to the file of its
guest and to nothing else: it is never printed.
"""

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from taskyard.cli.documents import KeyRecord, KeysListDocument, KeysNewDocument, KeysRevokeDocument
from taskyard.cli.options import json_option, quiet_option, state_option, verbose_option
from taskyard.cli.output import example, print_document, print_table
from taskyard.core.limits import SECOND_NS
from taskyard.net.keyring import Keyring
from taskyard.net.keys import KeyEntry
from taskyard.wire.roles import Role, with_article

_ROLES: Final = [role.value for role in Role]


@click.group(no_args_is_help=True)
@verbose_option
@quiet_option
def keys() -> None:
    """Make keys for guests of a broker, list and revoke them.

    A guest is whoever comes to the broker over TCP, from this machine or another, and has a key.
    The broker need not be stopped: what is changed here holds from its next turn on.
    """


@keys.command(epilog=example("keys new ci-bot --role producer", "keys new gpu --role worker"))
@click.argument("name")
@click.option(
    "--role",
    required=True,
    type=click.Choice(_ROLES),
    help="viewer looks; producer also submits, cancels, retries; worker works; admin does all.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write the key; NAME.key if not given. It must not be there.",
)
@state_option
@json_option
@verbose_option
@quiet_option
def new(name: str, role: str, out: Path | None, state: Path, *, as_json: bool) -> None:
    """Make a key for a guest, and write it to a file that you hand over.

    The file, mode 0600, is the only copy of the secret: move it to where it is used, by a way that
    nobody else sees. With it a guest proves who it is, and knows the broker from any other. A
    worker's key is bound to its name: it works as NAME or as NAME/anything.
    """
    path = out or Path(f"{name}.key")
    entry = Keyring(state).create(name, Role(role), path)
    if as_json:
        print_document(KeysNewDocument(file=str(path), key=_record(entry)))
        return
    click.echo(f"{path}: the key of {name}, {with_article(entry.role)}'s; the only copy")
    click.echo(f"use it there: {_usage_hint(entry, path)}")
    click.echo(f"take it back: taskyard keys revoke {name} --state {shlex.quote(str(state))}")


def _usage_hint(entry: KeyEntry, path: Path) -> str:
    verb = "worker" if entry.role is Role.WORKER else "status"
    file = shlex.quote(path.name)
    return f"taskyard {verb} --broker tcp://HOST:PORT --key {file}"


@keys.command("list", epilog=example("keys list --json"))
@state_option
@json_option
@verbose_option
@quiet_option
def list_keys(state: Path, *, as_json: bool) -> None:
    """List the keys that there are and were, the oldest first; never a secret."""
    entries = Keyring(state).entries()
    if as_json:
        print_document(KeysListDocument(keys=[_record(entry) for entry in entries]))
        return
    rows = [
        (entry.name, entry.role, entry.fingerprint, _day(entry.made_ns), _day(entry.revoked_ns))
        for entry in entries
    ]
    print_table(("NAME", "ROLE", "FINGERPRINT", "CREATED", "REVOKED"), rows)


@keys.command(epilog=example("keys revoke ci-bot"))
@click.argument("name")
@state_option
@json_option
@verbose_option
@quiet_option
def revoke(name: str, state: Path, *, as_json: bool) -> None:
    """Take a key back, at once: also from those who are connected.

    Their next message is refused, and what they wait for is not sent to them. Tasks that a worker
    of this key holds go to others when its lease has run out.
    """
    entry = Keyring(state).revoke(name)
    if as_json:
        print_document(KeysRevokeDocument(key=_record(entry)))
        return
    click.echo(f"revoked {name}, {with_article(entry.role)}'s key {entry.fingerprint}")


def _record(entry: KeyEntry) -> KeyRecord:
    return KeyRecord(
        name=entry.name,
        role=entry.role.value,
        fingerprint=entry.fingerprint,
        public=entry.public,
        created=entry.made_ns / SECOND_NS,
        revoked=entry.revoked_ns / SECOND_NS if entry.revoked_ns else None,
    )


def _day(at_ns: int) -> str:
    if not at_ns:
        return ""
    return datetime.fromtimestamp(at_ns // SECOND_NS, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")
