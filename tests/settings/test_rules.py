"""The scheduler's rules from sections of the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.events import RulesSet
from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import LaneOptions, Rule
from taskyard.settings.loader import to_rules_set
from tests.settings.kit import loaded, written

if TYPE_CHECKING:
    from pathlib import Path

MINUTE_NS = 60 * SECOND_NS


def made(directory: Path, text: str, **variables: str) -> RulesSet:
    return to_rules_set(loaded(written(directory, text), **variables))


def test_without_a_word_in_the_file_all_is_as_the_scheduler_has_it(tmp_path: Path) -> None:
    rules = made(tmp_path, "")
    assert (rules.rules, rules.workers_max) == ((), 0)
    assert rules.defaults == LaneOptions(interval_ns=SECOND_NS)


def test_every_key_of_a_service_has_its_rule(tmp_path: Path) -> None:
    text = """
[broker]
workers_max = 100
[service.smtp]
match = "smtp/*.org"
lane = "{host}"
command = "agents/smtp 'two words'"
workers_max = 20
lane_workers_max = 2
interval = "1m"
retries = [1, 2.5]
jitter = "20%"
expiry = "5d"
expiry_hard = "10d"
order = "random"
overfeed = 10
idle_max = "3m"
hunger_max = "10m"
lines = "zmailer"
hold = true
debounce = "5s"
rate = "10/s"
lane_rate = "5/m"
weight = 3
report_after = "4h"
"""
    assert made(tmp_path, text) == RulesSet(
        now_ns=0,
        workers_max=100,
        defaults=LaneOptions(interval_ns=SECOND_NS),
        rules=(
            Rule(
                name=b"smtp",
                match=b"smtp/*.org",
                options=LaneOptions(
                    workers_max=20,
                    lane_workers_max=2,
                    overfeed=10,
                    rate_interval_ns=SECOND_NS // 10,
                    lane_rate_interval_ns=MINUTE_NS // 5,
                    weight=3,
                    retry_delays_ns=(MINUTE_NS, 150 * SECOND_NS),
                    jitter_percent=20,
                    expiry_ns=5 * 1440 * MINUTE_NS,
                    expiry_hard_ns=10 * 1440 * MINUTE_NS,
                    is_random=True,
                    is_held=True,
                    debounce_ns=5 * SECOND_NS,
                    report_after_ns=240 * MINUTE_NS,
                    interval_ns=MINUTE_NS,
                    command=b"agents/smtp 'two words'",
                    idle_ns_max=3 * MINUTE_NS,
                    hunger_ns_max=10 * MINUTE_NS,
                    lines=b"zmailer",
                    lane_template=b"{host}",
                ),
            ),
        ),
    )


def test_unset_values_of_a_service_come_from_the_defaults(tmp_path: Path) -> None:
    text = '[defaults]\ninterval = "1m"\noverfeed = 3\nhold = true\n'
    rules = made(tmp_path, f"{text}[service.a]\nretries = 2\nhold = false\noverfeed = 0\n")
    (rule,) = rules.rules
    assert rule.options == LaneOptions(
        interval_ns=MINUTE_NS, retry_delays_ns=(MINUTE_NS, MINUTE_NS)
    )
    assert rules.defaults == LaneOptions(interval_ns=MINUTE_NS, overfeed=3, is_held=True)


def test_variables_set_unset_values_of_sections(tmp_path: Path) -> None:
    variables = {"TASKYARD_SERVICE_A_RATE": "2/m", "TASKYARD_DEFAULTS_RETRIES": "1,2"}
    rules = made(tmp_path, "[service.a]\n", TASKYARD_BROKER_WORKERS_MAX="7", **variables)
    (rule,) = rules.rules
    assert rule.options.rate_interval_ns == MINUTE_NS // 2
    assert rule.options.retry_delays_ns == (SECOND_NS, 2 * SECOND_NS)
    assert rules.workers_max == 7


def test_rules_stand_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = '[service.z]\n[service.a]\nmatch = "z/*.org"\n[service.m]\n'
    assert [(one.name, one.match) for one in made(tmp_path, text).rules] == [
        (b"z", b"z/*"),
        (b"a", b"z/*.org"),
        (b"m", b"m/*"),
    ]


def test_name_of_a_service_is_no_pattern(tmp_path: Path) -> None:
    (rule,) = made(tmp_path, '[service."a[1]*?"]\n').rules
    assert rule.match == b"a[[]1][*][?]/*"
