"""Sessions and tables of a database: their settings, `store init`, secrets."""

import psycopg
import pytest

from pair_demo.postgresql import ROLE
from taskyard.cli.entry import run as run_command
from taskyard.cli.entry import taskyard
from taskyard.core.limits import SECOND_NS
from taskyard.errors import JournalDamaged, UnknownFormat, UnusableStore
from taskyard.postgresql import database
from tests.kit.postgres import Cluster, name_in

#: The lease of a broker that a test waits for.
SHORT_NS = SECOND_NS


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def set_defaults(url: str, *settings: str) -> None:
    """Give a database defaults of its sessions."""
    run(url, *[f"ALTER DATABASE {name_in(url)} SET {one}" for one in settings])


class TestSessions:
    """Defaults that are meant for other programs."""

    def test_commits_are_durable(self, url: str) -> None:
        set_defaults(url, "synchronous_commit = off")
        with database.connect(url) as connection:
            assert connection.execute("SHOW synchronous_commit").fetchall() == [("on",)]

    def test_waits_are_limited_by_the_lease_alone(self, url: str) -> None:
        limits = ("statement", "lock", "idle_in_transaction_session", "idle_session")
        set_defaults(url, *[f"{limit}_timeout = 59999" for limit in limits])
        with psycopg.connect(url) as plain, database.connect(url) as connection:
            count = "SELECT count(*) FROM pg_settings WHERE setting = '59999'"
            assert plain.execute(count).fetchall() == [(4,)]
            assert connection.execute(count).fetchall() == [(0,)]

    @pytest.mark.parametrize("level", ["serializable", "'repeatable read'"])
    def test_statement_sees_what_others_have_committed(self, url: str, level: str) -> None:
        set_defaults(url, f"default_transaction_isolation = {level}")
        with database.connect(url) as first, database.connect(url) as second, second.transaction():
            second.execute("SELECT renewal FROM taskyard.leader")
            first.execute("UPDATE taskyard.leader SET renewal = 17")
            second.execute("UPDATE taskyard.leader SET renewal = renewal + 1")
            found = second.execute("SELECT renewal FROM taskyard.leader").fetchall()
            assert found == [(18,)]

    def test_text_bytes_and_functions_are_as_everywhere(self, url: str) -> None:
        set_defaults(url, "client_encoding = LATIN1", "search_path = public, pg_catalog")
        set_defaults(url, "standard_conforming_strings = off", "bytea_output = escape")
        run(url, "CREATE FUNCTION public.reverse(text) RETURNS text LANGUAGE sql RETURN 'wrong'")
        with database.connect(url) as connection:
            assert connection.execute("SELECT reverse('юЖ'::text)").fetchall() == [("Жю",)]
            assert connection.execute(r"SELECT '\x00ff'::bytea::text").fetchall() == [(r"\x00ff",)]

    def test_policy_of_rows_hides_nothing_in_silence(self, url: str) -> None:
        run(
            url,
            "CREATE ROLE limited LOGIN",
            "GRANT USAGE ON SCHEMA taskyard TO limited",
            "GRANT SELECT ON ALL TABLES IN SCHEMA taskyard TO limited",
            "ALTER TABLE taskyard.meta ENABLE ROW LEVEL SECURITY",
        )
        with (
            database.connect(url.replace(f"{ROLE}@", "limited@")) as connection,
            pytest.raises(psycopg.Error, match="row-level security"),
        ):
            database.check_tables(connection)


class TestTables:
    @pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
    def test_other_encoding_is_refused(self, cluster: Cluster, encoding: str) -> None:
        options = f"ENCODING {encoding} LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        url = cluster.database(options, with_store=False)
        with (
            database.connect(url) as connection,
            pytest.raises(UnusableStore, match=f"has the encoding {encoding}"),
        ):
            database.init(connection)

    def test_init_twice_changes_nothing(self, cluster: Cluster) -> None:
        url = cluster.database(with_store=False)
        with database.connect(url) as connection:
            assert database.init(connection)
            first = database.read_anchor(connection)
            assert not database.init(connection)
            assert database.read_anchor(connection) == first
            database.check_tables(connection)

    def test_missing_tables_are_named(self, cluster: Cluster) -> None:
        connection = database.connect(cluster.database(with_store=False))
        with connection, pytest.raises(UnusableStore, match="run `taskyard store init`"):
            database.check_tables(connection)

    def test_newer_and_damaged_formats_are_refused(self, url: str) -> None:
        with database.connect(url) as connection:
            for written, error in ((b"9", UnknownFormat), (b"x", JournalDamaged)):
                connection.execute(
                    "UPDATE taskyard.meta SET value = %b WHERE key = 'format'", (written,)
                )
                for use in (database.check_tables, database.init):
                    with pytest.raises(error):
                        use(connection)

    @pytest.mark.parametrize(("written", "error"), [(b"2", UnknownFormat), (b"1", JournalDamaged)])
    def test_unreadable_anchor_may_be_of_a_newer_version(
        self, url: str, written: bytes, error: type[Exception]
    ) -> None:
        with database.connect(url) as connection:
            for key, value in (("format", written), ("anchor", b"sealed in another way")):
                query = "UPDATE taskyard.meta SET value = %b WHERE key = %s"
                connection.execute(query, (value, key))
            with pytest.raises(error):
                database.check_tables(connection)


class TestCommands:
    def test_init_can_be_repeated(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = cluster.database(with_store=False)
        assert [run_command(taskyard, ["store", "init", url]) for _ in range(2)] == [0, 0]
        place = database.describe(url)
        assert capsys.readouterr().out.splitlines() == [
            f"{place}: created a store",
            f"{place}: has a store already",
        ]

    def test_refused_statement_is_one_line(
        self, cluster: Cluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = cluster.database(with_store=False)
        run(url, "CREATE ROLE plain LOGIN")
        for options, text in (([], "permission denied"), (["--outbox"], "has no store")):
            words = ["store", "init", *options, url.replace(f"{ROLE}@", "plain@")]
            assert run_command(taskyard, words) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("taskyard: ")
            assert text in line


class TestSecrets:
    def test_description_has_no_password(self) -> None:
        url = "postgresql://me:secret@db.example:6432/jobs?sslmode=require"
        assert database.describe(url) == "postgresql://me@db.example:6432/jobs"

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://me:secret@127.0.0.1:1/jobs",
            "postgresql://me:secret@127.0.0.1:1/jobs?secret",
            "postgresql://me:secret@[::1/jobs",
            "secret",
        ],
    )
    def test_errors_have_no_password(self, url: str) -> None:
        with pytest.raises(UnusableStore) as raised:
            database.open_database(url)
        assert "secret" not in str(raised.value)
