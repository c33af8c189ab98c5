"""Precedence, invalid values, and unknown names."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskyard.core.limits import NUMBER_MAX, SECOND_NS
from taskyard.settings.files import InvalidSettings
from taskyard.settings.keys import ServiceSection
from taskyard.settings.loader import Source, load, to_rules_set
from taskyard.settings.values import Rate
from tests.settings.kit import loaded, written, wrong


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find only files that are given."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


def test_flag_goes_before_variable_before_file_before_default(tmp_path: Path) -> None:
    file = written(tmp_path, '[broker]\nstate = "/of-file"\n')
    variables = {"TASKYARD_STATE": "of-variable"}
    flags = {"broker.state": ("--state", "of-flag")}
    found = [
        load(environment={}),
        load(file, environment={}),
        load(file, environment=variables),
        load(file, flags, variables),
    ]
    assert [(str(one.broker.state), one.source("broker.state")) for one in found] == [
        (".taskyard", Source.DEFAULT),
        ("/of-file", Source.FILE),
        ("of-variable", Source.ENVIRONMENT),
        ("of-flag", Source.FLAG),
    ]
    assert [str(one.all["broker.state"].origin) for one in found] == [
        "default",
        f"{file}:2",
        "TASKYARD_STATE",
        "--state",
    ]


def test_without_anything_all_is_as_ever() -> None:
    settings = loaded()
    assert (settings.broker.url, settings.broker.state) == (None, Path(".taskyard"))
    assert (settings.lease.heartbeat_ns, settings.lease.expire_ns) == (0, 15 * SECOND_NS)
    assert (settings.worker.processes, settings.worker.slots) == (1, None)
    assert (settings.worker.services, settings.worker.allow) == (("exec", "call"), ())
    assert (settings.listen, settings.services, settings.file) == ({}, {}, None)
    assert settings.defaults == ServiceSection()


def test_empty_variable_is_as_good_as_none() -> None:
    assert loaded(TASKYARD_STATE="", TASKYARD_CONFIG="").broker.state == Path(".taskyard")


def test_paths_begin_at_the_directory_of_the_file_and_those_of_variables_here(
    tmp_path: Path,
) -> None:
    text = '[broker]\nstate = "yard"\nurl = "ipc://b.sock"\n[listen]\ndwork = "ipc://d.sock"\n'
    file = written(tmp_path, text + 'wmp = "tcp://127.0.0.1:1"\n')
    settings = loaded(file)
    assert settings.broker.state == tmp_path / "yard"
    assert settings.broker.url == (f"ipc://{tmp_path}/b.sock",)
    assert settings.listen["dwork"] == (f"ipc://{tmp_path}/d.sock",)
    assert settings.listen["wmp"] == ("tcp://127.0.0.1:1",)
    assert loaded(file, TASKYARD_STATE="here").broker.state == Path("here")


def test_services_and_their_defaults_are_read(tmp_path: Path) -> None:
    text = '[defaults]\nretries = 2\n[service."smtp.out"]\nmatch = "smtp/*"\nrate = "10/s"\n'
    settings = loaded(written(tmp_path, text), TASKYARD_SERVICE_SMTP_OUT_HOLD="true")
    assert settings.defaults == ServiceSection(retries=(1, 1))
    assert settings.services == {
        "smtp.out": ServiceSection(match="smtp/*", rate=Rate(10, "s"), hold=True)
    }
    set_for_services = [path for path in settings.all if path.startswith(("defaults", "service"))]
    assert set_for_services == [
        "defaults.retries",
        "service.smtp.out.match",
        "service.smtp.out.hold",
        "service.smtp.out.rate",
    ]


def test_rate_has_an_interval() -> None:
    assert Rate(10, "s").interval_ns == SECOND_NS // 10
    assert Rate(1, "h").interval_ns == 3600 * SECOND_NS


# Invalid values.


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("broker", "url = 3", "broker.url must be an endpoint, such as tcp://127.0.0.1:6125"),
        ("broker", 'url = "localhost:1"', "broker.url must be an endpoint, such as tcp"),
        ("broker", 'state = ""', "broker.state must be a directory, such as ./.taskyard, not ''"),
        ("broker", "state = true", "broker.state must be text, not True"),
        ("broker", 'state = "postgresql://h/d"', "broker.state must be a directory, such as"),
        ("blobs", 'directory = "s3://b/p"', "blobs.directory must be a directory, such as"),
        ("listen", 'dwork = ["tcp://127.0.0.1:1", 2]', "listen.dwork must be an endpoint, such"),
        ("listen", 'ping-pong = "tcp://h:1"', "listen.ping-pong must be a list of two endpoints"),
        ("listen", 'ping-pong = ["ipc://a"]', "listen.ping-pong must be a list of two endpoints"),
        ("lease", 'heartbeat = "soon"', "lease.heartbeat must be a duration, such as 90s, 5m or"),
        ("lease", "heartbeat = 0", "lease.heartbeat must be longer than 0 (or auto)"),
        ("lease", "expire = -1", "lease.expire must be from 0 seconds to 292 years, not -1"),
        ("lease", 'store = "0.9s"', "lease.store must be from 1s to 1h"),
        ("lease", 'store = "2h"', "lease.store must be from 1s to 1h"),
        ("lease", "expire = inf", "lease.expire must be a duration"),
        ("lease", "expire = 2031-05-04", "lease.expire must be a duration"),
        ("worker", "processes = 1001", "worker.processes must be a whole number from 0 to 1000"),
        ("worker", 'slots = "4"', "worker.slots must be a whole number from 1 to 100000, not '4'"),
        ("worker", "cpus = -1", "worker.cpus must be a number of 0 or more"),
        ("worker", "memory = true", "worker.memory must be a size, such as 512M"),
        ("worker", 'gpus = ["0", "0"]', "worker.gpus must not have an id twice"),
        ("worker", "gpus = 1.5", "worker.gpus must be a number from 0 to 10000, or a list of ids"),
        ("worker", 'resources = ["cpus=1"]', 'worker.resources must not have "cpus"'),
        ("worker", 'resources = ["a=1", "a=2"]', "worker.resources must not have a name twice"),
        ("worker", "resources = 2", "worker.resources must be a list, such as"),
        ("worker", "slots = true", "worker.slots must be a whole number from 1 to 100000"),
        ("worker", 'allow = "imaging"', 'worker.allow must be a list, such as ["imaging"], not'),
        (
            "worker",
            'allow = ["a b"]',
            'worker.allow must be a list, such as ["imaging"], but an item',
        ),
        ("worker", "services = []", "worker.services must have at least one name"),
        ("worker", 'services = ["a\\nb"]', "worker.services must be a list, such as"),
        ("service.s", 'rate = "10"', "service.s.rate must be tasks per time, such as 10/s, 5/m"),
        ("service.s", 'rate = "0/s"', "service.s.rate must be tasks per time"),
        ("service.s", "lane_rate = 5", "service.s.lane_rate must be tasks per time"),
        (
            "service.s",
            "weight = 0",
            "service.s.weight must be a whole number from 1 to 1000, not 0",
        ),
        (
            "service.s",
            "weight = 1001",
            "service.s.weight must be a whole number from 1 to 1000, not 1001",
        ),
        ("service.s", 'rate = "1/ms"', "service.s.rate must be tasks per time"),
        ("service.s", 'match = "a[b"', "service.s.match must be a pattern, such as smtp/*, but"),
        ("service.s", 'match = ""', "service.s.match must not be empty"),
        ("service.s", 'command = "a \'b"', "service.s.command must be a command: No closing"),
        ("service.s", 'command = ""', "service.s.command must be a command, such as 'agents/smtp"),
        ("service.s", 'command = [""]', "service.s.command must start with a program and have no"),
        ("service.s", 'lane = "{host"', "service.s.lane must have field names in braces"),
        ("service.s", 'lane = "a}"', "service.s.lane must have field names in braces"),
        ("service.s", 'lane = "{}"', "service.s.lane must have field names in braces"),
        ("service.s", "jitter = 101", "service.s.jitter must be from 0% to 100%, not 101"),
        ("service.s", "hold = 1", "service.s.hold must be true or false, not 1"),
        ("service.s", 'order = "size"', "service.s.order must be random or age, not 'size'"),
        ("service.s", "retries = [-1]", "service.s.retries must have numbers of 0 or more"),
        ("service.s", 'idle_max = "3"\nidle_max = 1', "invalid TOML: Cannot overwrite a value"),
        ("defaults", 'interval = ""', "defaults.interval must be a duration"),
    ],
)
def test_invalid_value_is_reported_with_its_line(
    section: str, line: str, message: str, tmp_path: Path
) -> None:
    (found,) = wrong(written(tmp_path, f"[{section}]\n{line}\n"))
    place, _, reason = found.partition(": ")
    assert place == f"taskyard.toml:{1 + len(line.splitlines())}"
    assert reason.startswith(message)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("TASKYARD_WORKER_SLOTS", "many", "worker.slots must be a whole number from 1 to 100000"),
        ("TASKYARD_LEASE_EXPIRE", "soon", "lease.expire must be a duration"),
        ("TASKYARD_BROKER", "here", "broker.url must be an endpoint"),
        ("TASKYARD_LISTEN_PING_PONG", "ipc://a", "listen.ping-pong must be a list of two"),
        ("TASKYARD_DEFAULTS_RETRIES", "1,two", "defaults.retries must have numbers of 0 or"),
        ("TASKYARD_DEFAULTS_HOLD", "yes", "defaults.hold must be true or false, not 'yes'"),
    ],
)
def test_invalid_variable_is_reported_with_its_name(variable: str, text: str, message: str) -> None:
    (found,) = wrong(None, **{variable: text})
    assert found.startswith(f"{variable}: {message}")


def test_lists_are_written_with_commas_in_a_variable() -> None:
    settings = loaded(
        TASKYARD_WORKER_ALLOW="imaging, math",
        TASKYARD_LISTEN_PING_PONG="ipc:///b,ipc:///f",
        TASKYARD_DEFAULTS_RETRIES="1, 2.5",
    )
    assert settings.worker.allow == ("imaging", "math")
    assert settings.listen == {"ping-pong": ("ipc:///b", "ipc:///f")}
    assert settings.defaults == ServiceSection(retries=(1, 2.5))
    assert loaded(TASKYARD_DEFAULTS_RETRIES="3").defaults == ServiceSection(retries=(1, 1, 1))
    assert loaded(TASKYARD_DEFAULTS_RETRIES="[3]").defaults == ServiceSection(retries=(3,))


def test_invalid_value_is_reported_even_if_overridden(tmp_path: Path) -> None:
    file = written(tmp_path, "[worker]\nslots = 0\n")
    assert wrong(file, TASKYARD_WORKER_SLOTS="2") == [
        "taskyard.toml:2: worker.slots must be a whole number from 1 to 100000, not 0"
    ]


def test_lease_that_is_too_short_for_its_heartbeat_is_reported(tmp_path: Path) -> None:
    file = written(tmp_path, '[lease]\nheartbeat = "6s"\n')
    (message,) = wrong(file)
    assert message == (
        "taskyard.toml:2: lease.expire, 15s (default), must be at least three times "
        f"lease.heartbeat, 6s ({file}:2), or one lost message expires a worker"
    )
    assert loaded(file, TASKYARD_LEASE_EXPIRE="18s").lease.expire_ns == 18 * SECOND_NS


def test_lease_is_checked_despite_other_problems(tmp_path: Path) -> None:
    file = written(tmp_path, '[worker]\nslots = 0\n[lease]\nheartbeat = "6s"\n')
    assert [one.partition(": ")[0] for one in wrong(file)] == [
        "taskyard.toml:2",
        "taskyard.toml:4",
    ]
    file = written(tmp_path, '[lease]\nheartbeat = "soon"\nexpire = "1s"\n')
    (message,) = wrong(file)  # an invalid value is not compared
    assert message.startswith("taskyard.toml:2: lease.heartbeat must be a duration")


def test_schedule_beyond_the_clock_ends_with_it(tmp_path: Path) -> None:
    text = '[defaults]\ninterval = "1000d"\n[service.s]\nretries = [1, 200000000]\n'
    (rule,) = to_rules_set(loaded(written(tmp_path, text))).rules
    assert rule.options.retry_delays_ns == (1000 * 86_400 * SECOND_NS, NUMBER_MAX)


def test_second_service_for_the_same_lanes_is_reported(tmp_path: Path) -> None:
    text = '[service.s]\n[service.t]\nmatch = "s/*"\n[service.u]\nmatch = "s/a"\n'
    (message,) = wrong(written(tmp_path, text))
    assert message == (
        "taskyard.toml:2: [service.t] matches s/*, as does [service.s] before it, which is "
        "used (remove one)"
    )


# Unknown names.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[broker]\nsate = "x"',
            "2: unknown setting broker.sate (did you mean state?)",
        ),
        ("[lease]\n\nbeat = 1", "3: unknown setting lease.beat (did you mean heartbeat?)"),
        ("[lease]\nslots = 1", "2: unknown setting lease.slots (did you mean worker.slots?)"),
        (
            "[lease]\nx = 1",
            "2: unknown setting lease.x (settings of [lease]: heartbeat, expire",
        ),
        ("[brokr]\nstate = 1", "1: unknown section [brokr] (did you mean [broker]?)"),
        ("[services.smtp]", "1: unknown section [services] (did you mean [service.NAME]?)"),
        ('state = "x"', "1: state belongs in a section: [broker]"),
        ("zzz = 1", "1: unknown setting zzz (sections: [broker], [listen], [lease], "),
        ("[zzz]", "1: unknown section [zzz] (sections: [broker], [listen], [lease], "),
        ("broker = 3", "1: broker must be a section: [broker]"),
        ("[[broker]]", "1: broker must be a section: [broker]"),
        ("service = 3", "1: service must be a section: [service]"),
        ("[service]\nrate = 3", "2: service.rate must be a section: [service.rate]"),
        ('[service.""]\nrate = 3', "1: a service's name must not be empty"),
        (
            "[service.smtp]\nrates = 3",
            "2: unknown setting service.smtp.rates (did you mean rate?)",
        ),
        (
            '[defaults]\nmatch = "x"',
            "2: unknown setting defaults.match (settings of [defaults]: workers_max, ",
        ),
        ("[lease]\nexpire =", "2: invalid TOML: Invalid value"),
        ("[lease", "1: invalid TOML: Expected ']' at the end of a table declaration"),
        ("broker.sate = 1", "1: unknown setting broker.sate (did you mean state?)"),
        ("broker = {sate = 1}", "1: unknown setting broker.sate (did you mean state?)"),
    ],
)
def test_unknown_and_misplaced_names_are_reported_with_a_suggestion(
    text: str, message: str, tmp_path: Path
) -> None:
    found, *_ = wrong(written(tmp_path, text))
    assert found.startswith(f"taskyard.toml:{message}")


def test_all_problems_are_reported_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "[worker]\nslots = 0\nslot = 1\n[brokr]\n[service.s]\nhold = 2\n[lease]\nexpire = 0\n"
    found = wrong(written(tmp_path, text), TASKYARD_STATE="a://b")
    assert [one.partition(": ")[0] for one in found] == [
        "taskyard.toml:2",
        "taskyard.toml:3",
        "taskyard.toml:4",
        "taskyard.toml:6",
        "taskyard.toml:8",
        "TASKYARD_STATE",
    ]


def test_first_problem_is_raised_with_the_number_of_others(tmp_path: Path) -> None:
    file = written(tmp_path, "[worker]\nslots = 0\nslot = 1\nallow = 3\n")
    with pytest.raises(InvalidSettings) as raised:
        load(file, environment={})
    assert str(raised.value) == (
        f"{file}:2: worker.slots must be a whole number from 1 to 100000, not 0 "
        "(and 2 more, see `taskyard config --check`)"
    )


def test_unknown_variables_are_reported_and_ignored() -> None:
    settings = loaded(
        TASKYARD_SATE="x",
        TASKYARD_ZZZ="x",
        TASKYARD_TASK="a",
        TASKYARD_ATTEMPT="1",
        TASKYARD_BENCH_PROFILE="f",
        TASKYARD_SERVICE_SMTP_RATE="10/s",
        TASK="x",
    )
    assert settings.broker.state == Path(".taskyard")
    assert settings.unknown_variables == (
        "unknown variable TASKYARD_SATE (did you mean TASKYARD_STATE?)",
        "unknown variable TASKYARD_ZZZ (ignored)",
        "unknown variable TASKYARD_SERVICE_SMTP_RATE (ignored)",
    )
