"""Key files are private or refused, never shown, and accepted as soon as they exist."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
import zmq
from zmq.utils import z85

from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.journal.files import replace_private
from taskyard.net import keyring as keyring_module
from taskyard.net import keys
from taskyard.net.keyring import BROKER_FILE, Keyring
from taskyard.net.keys import Secret, read_peer_key
from taskyard.net.protocols import SystemClock
from taskyard.wire.roles import AuthenticatedPeer, Role

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "state")


def made(ring: Keyring, name: str, role: Role = Role.PRODUCER) -> Path:
    """Create a key and return its file."""
    out = ring.state.parent / f"{name}-{len(ring.entries())}.key"
    ring.create(name, role, out)
    return out


def public_of(file: Path) -> str:
    return read_peer_key(file).secret.public()


def test_created_key_is_accepted_and_its_file_has_both_halves(ring: Keyring) -> None:
    key = read_peer_key(made(ring, "ci-bot"))
    assert (key.name, key.roles) == ("ci-bot", (Role.PRODUCER,))
    assert key.broker == ring.secret().public()
    assert ring.find(key.secret.public()) == AuthenticatedPeer("ci-bot", (Role.PRODUCER,))


def test_key_may_have_several_roles_in_one_order(ring: Keyring) -> None:
    out = ring.state.parent / "site.key"
    ring.create("site", [Role.RELAY, Role.WORKER, Role.RELAY], out)
    key = read_peer_key(out)
    assert key.roles == (Role.WORKER, Role.RELAY)
    assert ring.find(key.secret.public()) == AuthenticatedPeer("site", key.roles)


@pytest.mark.parametrize("roles", ["[]", '["relay"]', '["worker", "worker"]', '"worker"'])
def test_entry_with_invalid_roles_disables_all_keys(ring: Keyring, roles: str) -> None:
    file = made(ring, "ci-bot")
    (entry,) = ring.directory.glob("*.guest")
    entry.write_text(entry.read_text().replace('["producer"]', roles))
    with pytest.raises(UserError, match="not a valid key file"):
        Keyring(ring.state).find(public_of(file))


def test_role_of_a_relay_needs_another(ring: Keyring) -> None:
    out = ring.state.parent / "site.key"
    with pytest.raises(UserError, match="role relay: needs another one beside it"):
        ring.create("site", Role.RELAY, out)
    assert not out.exists()


def test_all_created_files_are_private(ring: Keyring) -> None:
    old = os.umask(0)
    try:
        file = made(ring, "ci-bot")
    finally:
        os.umask(old)
    assert file.stat().st_mode & 0o777 == 0o600
    assert ring.state.stat().st_mode & 0o777 == 0o700
    assert ring.directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in ring.directory.iterdir()} == {0o600}


def test_brokers_own_key_is_made_once(ring: Keyring) -> None:
    brokers = [read_peer_key(made(ring, name)).broker for name in ("one", "two")]
    assert brokers[0] == brokers[1]


def test_secret_is_in_its_file_and_nowhere_else(ring: Keyring) -> None:
    file = made(ring, "ci-bot")
    key = read_peer_key(file)
    secret = key.secret.reveal().decode()
    assert secret in file.read_text()
    assert not any(secret in path.read_text() for path in ring.directory.iterdir())
    assert secret not in repr(key)
    file.write_text(file.read_text().replace('"producer"', f'"{secret}"'))
    with pytest.raises(UserError) as caught:
        read_peer_key(file)
    assert secret not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_existing_file_is_never_overwritten(ring: Keyring, tmp_path: Path) -> None:
    out = tmp_path / "kept"
    out.write_text("mine")
    with pytest.raises(UserError, match=r"kept: exists already \(give another --out\)"):
        ring.create("ci-bot", Role.VIEWER, out)
    assert out.read_text() == "mine"
    assert ring.entries() == []


def test_file_that_can_not_be_written_leaves_no_key(ring: Keyring, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r": can't write: No such file or directory"):
        ring.create("ci-bot", Role.VIEWER, tmp_path / "nowhere" / "x.key")
    assert ring.entries() == []


def test_key_that_can_not_be_kept_leaves_no_file(
    ring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(ring, "other")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keyring_module, "replace_private", refuse)
    out = tmp_path / "lost.key"
    with pytest.raises(UserError, match=r"keys: can't write: No space left on device"):
        ring.create("ci-bot", Role.VIEWER, out)
    assert not out.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "x.", "ä", "a b", "x\n", "x" * 65])
def test_ambiguous_name_is_refused(ring: Keyring, name: str) -> None:
    with pytest.raises(UserError, match=r"key name .*: must have 1 to 64 letters"):
        ring.create(name, Role.VIEWER, ring.state.parent / "x.key")
    assert not ring.state.exists()


def test_name_has_one_valid_key_at_a_time(ring: Keyring) -> None:
    old = public_of(made(ring, "ci-bot"))
    with pytest.raises(UserError, match=r"key 'ci-bot' exists already \(see `taskyard keys revoke"):
        made(ring, "ci-bot")
    ring.revoke("ci-bot")
    create = public_of(made(ring, "ci-bot", Role.ADMIN))
    assert ring.find(old) == AuthenticatedPeer("ci-bot", ())
    assert ring.find(create) == AuthenticatedPeer("ci-bot", (Role.ADMIN,))
    assert [bool(entry.revoked_ns) for entry in ring.entries()] == [True, False]


def test_keys_created_concurrently_all_exist_with_one_per_name(ring: Keyring) -> None:
    refused: list[UserError] = []

    def make(number: int) -> None:
        try:
            Keyring(ring.state).create(
                f"guest-{number // 2}", Role.VIEWER, ring.state.parent / f"{number}.key"
            )
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(ring.entries()), len(refused)) == (8, 8)
    assert len({read_peer_key(file).broker for file in ring.state.parent.glob("*.key")}) == 1


def test_revoked_key_is_seen_as_revoked_by_another_keyring(ring: Keyring) -> None:
    file = made(ring, "ci-bot")
    other = Keyring(ring.state)
    assert other.find(public_of(file)) == AuthenticatedPeer("ci-bot", (Role.PRODUCER,))
    ring.revoke("ci-bot")
    assert other.find(public_of(file)) == AuthenticatedPeer("ci-bot", ())
    assert not ring.has_keys()


def test_unknown_or_revoked_key_can_not_be_revoked(ring: Keyring) -> None:
    with pytest.raises(UserError, match=r"unknown key 'ci-bot' \(see `taskyard keys list`\)"):
        ring.revoke("ci-bot")
    made(ring, "ci-bot")
    ring.revoke("ci-bot")
    with pytest.raises(UserError, match=r"key 'ci-bot' is revoked already"):
        ring.revoke("ci-bot")


def test_key_whose_file_was_removed_is_unknown(ring: Keyring) -> None:
    public = public_of(made(ring, "ci-bot"))
    assert ring.find(public)
    (entry,) = ring.directory.glob("*.guest")
    entry.unlink()
    assert ring.find(public) is None


def test_aged_directory_is_not_read_again_and_a_fresh_one_is(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes within one tick of the file system's clock look like one."""
    made(ring, "ci-bot")
    changed_ns = ring.directory.stat().st_ctime_ns
    for age_ns, load_count in ((0, 1), (SECOND_NS // 20, 2), (SECOND_NS, 3), (SECOND_NS, 3)):
        now_ns = changed_ns + age_ns
        monkeypatch.setattr(SystemClock, "wall_ns", lambda now_ns=now_ns: now_ns)
        ring.refresh()
        assert ring.load_count == load_count


# Files that are open to others, damaged or missing.


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o602, 0o777])
def test_key_file_that_is_open_to_others_is_refused_with_a_remedy(ring: Keyring, mode: int) -> None:
    file = made(ring, "ci-bot")
    file.chmod(mode)
    expected = rf"accessible to other users, mode 0{mode:o} \(chmod 600 {file}, and create new keys"
    with pytest.raises(UserError, match=expected):
        read_peer_key(file)
    file.chmod(0o400)
    assert read_peer_key(file).name == "ci-bot"


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o711])
def test_directory_that_is_open_to_others_disables_all_keys(ring: Keyring, mode: int) -> None:
    public = public_of(made(ring, "ci-bot"))
    assert ring.find(public)
    ring.directory.chmod(mode)
    looks = (lambda: ring.find(public), ring.entries, lambda: ring.revoke("ci-bot"))
    for refresh in looks:
        with pytest.raises(
            UserError, match=rf"accessible to other .* \(chmod 700 {ring.directory}"
        ):
            refresh()
    ring.directory.chmod(0o700)
    assert ring.find(public)


@pytest.mark.parametrize("name", [BROKER_FILE, "*.guest"])
def test_broker_file_that_is_open_to_others_disables_all_keys(ring: Keyring, name: str) -> None:
    public = public_of(made(ring, "ci-bot"))
    (file,) = ring.directory.glob(name)
    file.chmod(0o644)
    with pytest.raises(UserError, match=r"accessible to other users, .* \(chmod 600"):
        ring.secret() if name == BROKER_FILE else ring.find(public)


def test_file_of_another_user_is_refused(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    file = made(ring, "ci-bot")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for refresh in (lambda: read_peer_key(file), ring.entries):
        with pytest.raises(UserError, match=r"belongs to user \d+, not to you .* or chown \d+ /"):
            refresh()


def test_one_damaged_entry_disables_all_keys(ring: Keyring) -> None:
    public = public_of(made(ring, "ci-bot"))
    made(ring, "other")
    assert ring.find(public)
    replace_private(ring.directory / "0123456789abcdef.guest", b"role = ")
    with pytest.raises(UserError, match=r"guest: not a valid key file"):
        ring.find(public)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret",
        'name = "x"\nrole = "king"\nsecret = "S"\nbroker = "B"',
        'name = "../x"\nrole = "viewer"\nsecret = "S"\nbroker = "B"',
        'name = "x"\nrole = "viewer"\nsecret = "short"\nbroker = "B"',
        'name = "x"\nrole = "viewer"\nsecret = 7\nbroker = "B"',
        'name = "x"\nrole = "viewer"\nsecret = "S"\nbroker = "short"',
        "x" * 20_000,
    ],
)
def test_invalid_key_file_is_refused(tmp_path: Path, text: str) -> None:
    public, secret = (half.decode() for half in zmq.curve_keypair())
    file = tmp_path / "x.key"
    keys.create_key_file(file, text.replace('"S"', f'"{secret}"').replace('"B"', f'"{public}"'))
    with pytest.raises(UserError, match=r"x.key: not a valid key file"):
        read_peer_key(file)


def test_missing_or_irregular_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x.key: key file not found \(create one on the broker's"):
        read_peer_key(tmp_path / "x.key")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match=r"pipe: not a valid key file"):
        read_peer_key(tmp_path / "pipe")
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(UserError, match=r"folder: not a valid key file"):
        read_peer_key(tmp_path / "folder")
    with pytest.raises(UserError, match=r"x: can't read key file: Not a directory"):
        read_peer_key(tmp_path / "pipe" / "x")


def test_without_a_directory_all_keys_are_refused(ring: Keyring) -> None:
    assert ring.entries() == []
    assert not ring.has_keys()
    with pytest.raises(UserError, match=r"keys: can't read: No such file or directory"):
        ring.find("x" * 40)
    with pytest.raises(UserError, match=r"keys: no broker key \(create one with `taskyard keys n"):
        ring.secret()


def test_file_in_place_of_the_directory_disables_all_keys(ring: Keyring) -> None:
    ring.state.mkdir()
    ring.directory.write_text("")
    ring.directory.chmod(0o600)
    for refresh in (ring.entries, ring.refresh):
        with pytest.raises(UserError, match=r"keys: can't read: Not a directory"):
            refresh()
    with pytest.raises(UserError, match=r"keys: can't be used for keys: "):
        ring.create("ci-bot", Role.VIEWER, ring.state.parent / "x.key")


def test_keys_are_bounded(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    made(ring, "one")
    made(ring, "two")
    monkeypatch.setattr(keyring_module, "KEYS_MAX", 1)
    with pytest.raises(UserError, match=r"keys: 2 keys, limit 1 \(remove files of revoked keys\)"):
        ring.refresh()


def test_secret_must_be_well_formed_and_public_keys_have_32_bytes() -> None:
    with pytest.raises(ValueError, match=r"^$"):
        Secret("x" * 39)
    assert repr(Secret("x" * 40)) == "Secret(…)"
    public = zmq.curve_keypair()[0]
    assert keys.public_text(z85.decode(public)) == public.decode()
    with pytest.raises(ValueError, match=r"public key: must have 32 bytes"):
        keys.public_text(b"x" * 31)
