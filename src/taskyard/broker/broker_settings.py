"""The options of a broker: where its state is, where it listens, how much it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from taskyard.broker.blobs import BlobLimits
from taskyard.broker.compaction import CompactionLimits
from taskyard.core.events import RulesSet
from taskyard.journal.store import LEASE_NS
from taskyard.settings.keys import ListenSection
from taskyard.wire.native.pending import PLAIN_LEASE_NS


class BrokerSettings(Struct, frozen=True):
    """The options of a broker."""

    state: Path
    #: Endpoints besides the native socket: (listener, endpoint). A listener without a table has the
    #: name of its dialect.
    listen: tuple[tuple[str, str], ...] = ()
    tables: Mapping[str, ListenSection] = field(default_factory=dict)
    #: Require keys on local TCP endpoints, too.
    secure: bool = False
    #: Keep the journal in memory: nothing survives the process.
    in_memory: bool = False
    #: Stop when stdin ends, too.
    until_eof: bool = False
    #: How long plain dwork workers keep their tasks after a restart of the broker.
    plain_lease_ns: int = PLAIN_LEASE_NS
    #: The rules, unless a `SettingsReloader` provides them.
    rules: RulesSet = field(default_factory=lambda: RulesSet(0))
    #: When the journal is compacted.
    compact: CompactionLimits = CompactionLimits()
    #: How many bytes of blobs are kept, and how long, unless a `SettingsReloader` provides it.
    blobs: BlobLimits = BlobLimits()
    #: Where, if neither in the state directory nor in PostgreSQL.
    blobs_directory: Path | None = None
    #: The URL of a journal in PostgreSQL. Empty: in SQLite, in the state directory.
    store: str = ""
    #: How long a broker of that journal may be silent before another takes over.
    store_lease_ns: int = LEASE_NS
    #: Follow the broker that has the journal, and take over when it ends.
    standby: bool = False
    #: Let another one take over first: this broker has led in a term that is over.
    yields: bool = False
