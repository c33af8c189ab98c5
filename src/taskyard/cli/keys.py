"""`taskyard keys`: create, list and revoke access keys.

Owns the output and the documents. A secret is written only to its key file and never printed.
"""

import shlex
import time
from pathlib import Path
from typing import Final

import click

from taskyard.cli.documents import KeyRecord, KeysListDocument, KeysNewDocument, KeysRevokeDocument
from taskyard.cli.options import json_option, quiet_option, state_option, verbose_option
from taskyard.cli.output import example, moment_cell, print_document, print_table
from taskyard.core.limits import SECOND_NS
from taskyard.net.keyring import Keyring
from taskyard.net.keys import KeyEntry
from taskyard.wire.roles import Role

_ROLES: Final = [role.value for role in Role]


@click.group(no_args_is_help=True)
@verbose_option
@quiet_option
def keys() -> None:
    """Create, list and revoke access keys.

    Peers on other machines need a key. On loopback TCP they need one if the broker runs with
    --secure. The broker may be running: changes apply at its next turn.
    """


@keys.command(epilog=example("keys new ci-bot --role producer", "keys new gpu --role worker"))
@click.argument("name")
@click.option(
    "--role",
    "roles",
    required=True,
    multiple=True,
    type=click.Choice(_ROLES),
    help="viewer: read. producer: also submit, cancel, retry. worker: run tasks. relay: forward "
    "for workers of any name, with another role. admin: all. Repeatable.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key file. Must not exist. NAME.key if omitted.",
)
@state_option
@json_option
@verbose_option
@quiet_option
def new(name: str, roles: tuple[str, ...], out: Path | None, state: Path, *, as_json: bool) -> None:
    """Create an access key and write it to a file.

    The file (mode 0600) is the only copy of the secret. Move it over a secure channel to the
    machine that uses it. The key authenticates the peer to the broker and the broker to the peer. A
    worker's key is bound to its name: the worker is called NAME or NAME/anything.
    """
    path = out or Path(f"{name}.key")
    entry = Keyring(state).create(name, map(Role, roles), path)
    if as_json:
        print_document(KeysNewDocument(file=str(path), key=_record(entry)))
        return
    click.echo(f"{path}: key of {name} ({_roles_text(entry)}), the only copy")
    click.echo(f"use it:    {_usage_hint(entry, path)}")
    click.echo(f"revoke it: taskyard keys revoke {name} --state {shlex.quote(str(state))}")


def _usage_hint(entry: KeyEntry, path: Path) -> str:
    command = "worker" if Role.WORKER in entry.roles else "status"
    file = shlex.quote(path.name)
    return f"taskyard {command} --broker tcp://HOST:PORT --key {file}"


@keys.command("list", epilog=example("keys list --json"))
@state_option
@json_option
@verbose_option
@quiet_option
def list_keys(state: Path, *, as_json: bool) -> None:
    """List all keys, including revoked ones, oldest first."""
    entries = Keyring(state).entries()
    if as_json:
        print_document(KeysListDocument(keys=[_record(entry) for entry in entries]))
        return
    rows = [
        (
            *(entry.name, ", ".join(entry.roles), entry.fingerprint),
            *(_cell(entry.made_ns), _cell(entry.revoked_ns)),
        )
        for entry in entries
    ]
    print_table(("NAME", "ROLES", "FINGERPRINT", "CREATED", "REVOKED"), rows)


@keys.command(epilog=example("keys revoke ci-bot"))
@click.argument("name")
@state_option
@json_option
@verbose_option
@quiet_option
def revoke(name: str, state: Path, *, as_json: bool) -> None:
    """Revoke a key at once.

    Connected peers are cut off: their next message is refused and they get no more replies. Tasks
    leased to a worker with this key return to the queue when the lease expires.
    """
    entry = Keyring(state).revoke(name)
    if as_json:
        print_document(KeysRevokeDocument(key=_record(entry)))
        return
    click.echo(f"revoked the key of {name} ({_roles_text(entry)}, {entry.fingerprint})")


def _record(entry: KeyEntry) -> KeyRecord:
    return KeyRecord(
        name=entry.name,
        role=",".join(entry.roles),
        roles=[role.value for role in entry.roles],
        fingerprint=entry.fingerprint,
        public=entry.public,
        created=entry.made_ns / SECOND_NS,
        revoked=entry.revoked_ns / SECOND_NS if entry.revoked_ns else None,
    )


def _roles_text(entry: KeyEntry) -> str:
    """Return `role worker`, or `roles producer, worker`."""
    return f"role{'s' if len(entry.roles) > 1 else ''} {', '.join(entry.roles)}"


def _cell(at_ns: int) -> str:
    return moment_cell(at_ns / SECOND_NS if at_ns else None, time.time())
