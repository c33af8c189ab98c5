"""Where the blobs of a broker on PostgreSQL are: in its database, or in a directory.

Needs the extra `postgres`, so it is imported only by its users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.errors import UnusableStore
from taskyard.journal.blobs import FOLDER
from taskyard.journal.postgres import blobs, database, leader
from taskyard.journal.postgres.blobs import BlobRows, Blobs
from taskyard.journal.postgres.leader import Term

if TYPE_CHECKING:
    from pathlib import Path


def open_blobs(url: str, directory: Path | None, term: Term) -> Blobs | None:
    """Open the tables for a broker that leads. None: blobs are in a directory."""
    place = blobs.DATABASE if directory is None else blobs.DIRECTORY
    with database.open_database(url) as connection:
        blobs.note_place(connection, term, place)
    return Blobs(url, term) if directory is None else None


def open_beside(url: str) -> BlobRows | None:
    """Open the tables with the term of the broker that runs now, if there is one.

    None: blobs are in a directory.
    """
    with database.open_database(url) as connection:
        database.check_tables(connection)
        if blobs.known_place(connection) != blobs.DATABASE:
            return None
        seen = leader.read(connection)
    return BlobRows(Blobs(url, Term(seen.epoch, seen.holder)))


def check_place(url: str, state: Path, directory: Path | None) -> None:
    """Refuse a place of blobs that is not the one of the store."""
    with database.open_database(url) as connection:
        database.check_tables(connection)
        known = blobs.known_place(connection)
    if known == blobs.DATABASE and directory is not None:
        raise UnusableStore("blobs of the store are in the database (unset blobs.directory)")
    link = state / FOLDER
    if directory is None and (known == blobs.DIRECTORY or link.is_symlink()):
        where = f" {link.readlink()}" if link.is_symlink() else ""
        raise UnusableStore(f"blobs of the store are in a directory{where} (set blobs.directory)")
