"""The keys of a store in PostgreSQL, and their copies in state directories."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from taskyard.errors import UnknownName, UnusableKey, UnusableState, UnusableStore
from taskyard.net.keyring import Keyring
from taskyard.postgresql import database, keys
from taskyard.postgresql.driver import keyring_of
from taskyard.postgresql.keys import KeyCopy, StoreKeyring
from taskyard.wire.roles import Role

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.net.keys import PeerKey
    from taskyard.postgresql.database import Connection
    from tests.kit.postgres import Cluster


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    with database.connect(url) as made:
        yield made


def files(state: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (state / "keys").glob("*")}


def issue(keyring: Keyring, name: str) -> PeerKey:
    issued: list[PeerKey] = []
    keyring.issue(name, Role.WORKER, issued.append)
    return issued[0]


def test_brokers_of_a_store_have_the_same_keys(url: str, tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    one = issue(StoreKeyring(first, url), "one")
    two = issue(StoreKeyring(second, url), "two")
    assert one.broker == two.broker
    keyring = StoreKeyring(first, url)
    assert [entry.name for entry in keyring.entries()] == ["one", "two"]
    assert files(first) == files(second)
    assert len(files(first)) == 3
    with pytest.raises(UnusableKey, match="exists already"):
        issue(keyring, "two")
    keyring.revoke("two")
    with pytest.raises(UnusableKey, match="revoked already"):
        StoreKeyring(second, url).revoke("two")
    with pytest.raises(UnknownName):
        StoreKeyring(second, url).revoke("three")
    issue(StoreKeyring(second, url), "two")


def test_broker_copies_changes(
    url: str, connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = issue(StoreKeyring(tmp_path / "admin", url), "one").secret.public()
    state = tmp_path / "broker"
    copy, keyring = KeyCopy(state), Keyring(state)
    copy.poll(connection)
    found = keyring.find(one)
    assert found is not None
    assert (found.name, found.roles) == ("one", (Role.WORKER,))
    with monkeypatch.context() as patch:
        patch.setattr(keys, "read", None)
        copy.poll(connection)  # nothing has changed
    StoreKeyring(tmp_path / "admin", url).revoke("one")
    copy.poll(connection)
    found = keyring.find(one)
    assert found is not None
    assert found.roles == ()


def test_revoked_key_is_refused_on_a_full_disk(
    url: str,
    connection: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = issue(StoreKeyring(tmp_path / "admin", url), "one").secret.public()
    copy, keyring = KeyCopy(tmp_path / "broker"), Keyring(tmp_path / "broker")
    copy.poll(connection)
    StoreKeyring(tmp_path / "admin", url).revoke("one")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(keys, "replace_private", fail)
        copy.poll(connection)
    assert "No space left on device" in caplog.text
    assert keyring.find(one) is None
    copy.poll(connection)
    assert keyring.find(one) is not None


def test_keys_from_before_the_store_are_kept(url: str, tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    one = issue(Keyring(first), "one")
    issue(Keyring(other), "one")
    before = files(first)
    assert StoreKeyring(first, url).has_keys()
    assert files(first) == before
    assert issue(StoreKeyring(second, url), "two").broker == one.broker
    with pytest.raises(UnusableKey, match="has other keys than the store"):
        StoreKeyring(other, url)
    issue(Keyring(second), "three")  # by an older version
    assert len(StoreKeyring(first, url).entries()) == 2
    assert len(StoreKeyring(second, url).entries()) == 3
    assert len(StoreKeyring(first, url).entries()) == 3


def test_store_that_can_not_be_used_is_refused(cluster: Cluster, url: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableStore, match="store init"):
        keyring_of(tmp_path, cluster.database(with_store=False))
    with pytest.raises(UnusableStore, match="connection to server"):
        keyring_of(tmp_path, "postgresql://test@127.0.0.1:1/x")
    (tmp_path / "journal.sqlite").touch()
    with pytest.raises(UnusableState, match="journal in SQLite"):
        keyring_of(tmp_path, url)
