"""The start of a broker on PostgreSQL."""

from __future__ import annotations

from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import psycopg
import pytest

from taskyard.broker.server import BrokerSettings
from taskyard.core.limits import SECOND_NS
from taskyard.errors import LeaderLost, StateError, UnusableStore, UserError
from taskyard.journal.chain import Head
from taskyard.journal.lock import StateLock
from taskyard.postgresql import driver as broker_database
from taskyard.postgresql.driver import open_database
from taskyard.postgresql.leader import Term
from taskyard.postgresql.standby import WarmState
from tests.kit.postgres import Proxy

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.journal.ended_tasks import EndedTasks
    from taskyard.postgresql.lease import Lease
    from tests.kit.postgres import Cluster


def test_connection_lost_at_any_statement_of_a_start_is_an_error_of_ours(
    cluster: Cluster, tmp_path: Path
) -> None:
    name = cluster.database().partition("@/")[2].partition("?")[0]
    left = 0

    def cut(portion: bytes | None) -> bool:
        nonlocal left
        left -= portion is not None
        return left == 0

    failed = 0
    with closing(Proxy(cluster, cut)) as proxy, StateLock(tmp_path):
        settings = BrokerSettings(tmp_path, store=proxy.url(name), store_lease_ns=SECOND_NS)
        for number in range(1, 200):
            left = number
            try:
                with ExitStack() as stack:
                    open_database(settings, stack)
            except (StateError, UserError) as error:
                assert f"127.0.0.1:{proxy.port}/{name}" in str(error)  # noqa: PT017  # or none
                failed += 1
            if left > 0:
                break
        else:
            raise AssertionError("a start takes more statements than expected")
    assert failed > 10


def test_connection_lost_in_a_takeover_ends_the_term_of_a_standby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> None:
        raise psycopg.OperationalError("server closed the connection")

    monkeypatch.setattr(broker_database, "_take_over", lose)
    settings = BrokerSettings(tmp_path, store="postgresql://db/yard")
    lease = cast("Lease", SimpleNamespace(term=Term(7, "standby")))
    warm = WarmState(lease, Head(0, 0, b""), cast("EndedTasks", None))
    with pytest.raises(LeaderLost, match="db/yard: server closed the connection, so epoch 7 ends"):
        open_database(settings, ExitStack(), warm)
    with pytest.raises(UnusableStore, match=r"db/yard: server closed the connection$"):
        open_database(settings, ExitStack())
