"""Rules: the lanes that they match, their limits, and a reload."""

import pytest

from taskyard.core.effects import Effect, RuleList
from taskyard.core.events import RulesRequested, TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import LaneOptions, Rule, RuleTable, first_match
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from tests.core.kit import Yard, assigned


def rule_of(rules: list[tuple[bytes, bytes]], service: bytes, lane: bytes) -> bytes:
    """Return the name of the rule that applies to a lane."""
    made = tuple(Rule(name, match) for name, match in rules)
    matchers = RuleTable(made).for_service(service)
    return first_match(matchers, service, lane).rule.name


@pytest.mark.parametrize(
    ("rules", "service", "lane", "expected"),
    [
        ([(b"a", b"smtp/*")], b"smtp", b"example.org", b"a"),
        ([(b"a", b"smtp/*")], b"smtp", b"", b"a"),
        ([(b"a", b"smtp/")], b"smtp", b"", b"a"),
        ([(b"a", b"smtp/")], b"smtp", b"x", b""),
        ([(b"a", b"smtp/*")], b"smtps", b"x", b""),
        ([(b"a", b"smtp/*")], b"SMTP", b"x", b""),
        ([(b"a", b"smtp/*.ORG")], b"smtp", b"example.org", b""),
        ([(b"a", b"*/x"), (b"b", b"smtp/*")], b"smtp", b"x", b"a"),
        ([(b"a", b"*/x"), (b"b", b"smtp/*")], b"smtp", b"y", b"b"),
        ([(b"a", b"smtp/*"), (b"b", b"smtp/x")], b"smtp", b"x", b"a"),
        ([(b"a", b"*x")], b"smtp", b"a/b/x", b"a"),
        ([(b"a", b"s?tp/[xy]")], b"smtp", b"y", b"a"),
        ([(b"a", b"s?tp/[!xy]")], b"smtp", b"y", b""),
        ([(b"a", b"*"), (b"b", b"smtp/*")], b"smtp", b"x", b"a"),
        ([(b"a", b"*/\xff*")], b"smtp", b"\xff\xfe", b"a"),
        ([(b"a", b"")], b"smtp", b"x", b""),
    ],
)
def test_first_rule_that_matches_service_and_lane_applies(
    rules: list[tuple[bytes, bytes]], service: bytes, lane: bytes, expected: bytes
) -> None:
    assert rule_of(rules, service, lane) == expected


def mail(yard: Yard) -> None:
    """Two services with two lanes each, and a worker for both."""
    yard.submit(b"a1", b"a2", b"b1", lanes=[b"a", b"a", b"b"], service=b"smtp")
    yard.submit(b"c1", b"d1", lanes=[b"a", b"d"], service=b"uucp")
    for worker in (b"u", b"v", b"w"):
        yard.join(worker, services=(b"smtp", b"uucp"), slots_total=1)


def test_limit_of_a_rule_is_counted_over_lanes_of_all_services() -> None:
    yard = Yard()
    yard.set_rules(Rule(b"a", b"*/a", LaneOptions(workers_max=1)))
    mail(yard)
    taken = [name for worker in (b"u", b"v", b"w") for name in yard.take(worker)]
    assert sorted(taken) == [b"a1", b"b1", b"d1"]
    yard.finish(b"u", b"a1")
    assert yard.take(b"u") in ([b"a2"], [b"c1"])


def test_worker_may_get_more_of_a_lane_that_it_serves_when_its_rule_is_full() -> None:
    yard = Yard()
    yard.set_rules(Rule(b"all", b"*", LaneOptions(workers_max=1)))
    yard.submit(b"a", b"b", b"c")
    yard.join(b"u")
    yard.join(b"v")
    assert yard.take(b"u") == [b"a"]
    assert yard.take(b"v") == []
    assert yard.take(b"u", 9) == [b"b", b"c"]


def test_freed_limit_wakes_a_worker_of_another_service() -> None:
    yard = Yard()
    yard.set_rules(Rule(b"all", b"*", LaneOptions(workers_max=1)))
    yard.submit(b"a", service=b"x")
    yard.submit(b"b", service=b"y")
    yard.join(b"u", services=(b"x",))
    yard.join(b"v", services=(b"y",))
    assert yard.take(b"u") == [b"a"]
    assert assigned(yard.ask(b"v", parks=True)) == []
    assert assigned(yard.finish(b"u", b"a")) == [b"b"]


def test_rate_is_shared_by_all_lanes_of_a_rule() -> None:
    yard = Yard()
    yard.set_rules(Rule(b"a", b"*/a", LaneOptions(rate_interval_ns=SECOND_NS)))
    mail(yard)
    taken = [name for worker in (b"u", b"v", b"w") for name in yard.take(worker)]
    assert len([name for name in taken if name in (b"a1", b"c1")]) == 1
    assert len(taken) == 3
    yard.finish(b"w", *taken[2:])
    assert yard.take(b"w") == []
    yard.later(1)
    assert yard.take(b"w") in ([b"c1"], [b"a1"])


@pytest.mark.slow
def test_lanes_of_several_rules_take_turns_by_their_number() -> None:
    yard = Yard()
    yard.set_rules(Rule(b"one", b"*/big", LaneOptions(lane_workers_max=0)))
    yard.submit(*[b"big%d" % number for number in range(100)], lanes=[b"big"] * 100)
    small = [b"small%d" % number for number in range(40)]
    yard.submit(*small, lanes=[b"s%d" % (number % 8) for number in range(40)])
    order: list[bytes] = []
    while small[-1] not in order:
        worker = b"w%d" % len(order)  # another each time, so that none stays with a lane
        yard.join(worker, slots_total=1)
        order += yard.take(worker)
        yard.finish(worker, order[-1])
        yard.leave(worker)
    assert len([name for name in order if name in small]) == 40
    assert 3 <= len([name for name in order if name not in small]) <= 8


# Other settings.


def out(yard: Yard) -> list[bytes]:
    tasks = yard.scheduler.ledger.tasks.values()
    return sorted(task.name for task in tasks if task.state is TaskState.LEASED)


def test_lower_limit_takes_nothing_away_and_lets_nothing_new_begin() -> None:
    yard = Yard()
    mail(yard)
    taken = [name for worker in (b"u", b"v", b"w") for name in yard.take(worker)]
    yard.set_rules(Rule(b"all", b"*", LaneOptions(workers_max=1)))
    assert out(yard) == sorted(taken)
    assert yard.records == []
    yard.finish(b"u", taken[0])
    yard.finish(b"v", taken[1])
    assert yard.take(b"u") == []
    yard.finish(b"w", taken[2])
    assert len(yard.take(b"u")) == 1


def test_higher_limit_is_used_at_once() -> None:
    yard = Yard()
    yard.set_rules(Rule(b"all", b"*", LaneOptions(workers_max=1)))
    mail(yard)
    for worker in (b"u", b"v", b"w"):
        yard.ask(worker, parks=True)
    assert len(out(yard)) == 1
    assert len(assigned(yard.set_rules(Rule(b"all", b"*", LaneOptions(workers_max=3))))) == 2


def test_used_up_rate_survives_a_reload_but_no_longer_than_its_new_interval() -> None:
    yard = Yard()
    slow = Rule(b"all", b"*", LaneOptions(rate_interval_ns=100 * SECOND_NS))
    yard.set_rules(slow)
    yard.submit(b"a", b"b", b"c")
    yard.join(b"w")
    assert yard.take(b"w") == [b"a"]
    yard.set_rules(slow)
    yard.ask(b"w", parks=True)
    assert out(yard) == [b"a"]
    yard.set_rules(Rule(b"all", b"*", LaneOptions(rate_interval_ns=2 * SECOND_NS)))
    yard.later(1)
    assert out(yard) == [b"a"]
    yard.later(1)
    assert out(yard) == [b"a", b"b"]


def test_lane_with_leased_tasks_gets_another_rule() -> None:
    yard = Yard()
    mail(yard)
    yard.take(b"u")
    yard.set_rules(
        Rule(b"smtp", b"smtp/*", LaneOptions(workers_max=1)),
        Rule(b"uucp", b"uucp/*", LaneOptions(workers_max=1)),
    )
    held = [active_rule.lane_worker_pairs for active_rule in yard.scheduler.ledger.rule_table]
    assert held == [1, 0, 0]


def test_order_of_lanes_survives_a_reload() -> None:
    yard = Yard()
    names = [b"%d" % number for number in range(6)]
    yard.submit(*names, lanes=names)
    yard.join(b"w", slots_total=0)
    taken = yard.take(b"w", 2)
    yard.rules(overfeed=1)
    assert taken + yard.take(b"w", 4) == names


# Replies to RulesRequested.


def rule_list(effects: list[Effect]) -> RuleList:
    (reply,) = effects
    assert isinstance(reply, RuleList)
    return reply


def test_rule_list_has_rules_that_may_match_a_service_and_the_defaults() -> None:
    yard = Yard()
    smtp = Rule(b"smtp", b"smtp/*", LaneOptions(command=b"agents/smtp -v", overfeed=3))
    uucp = Rule(b"uucp", b"uucp/*", LaneOptions())
    slow = Rule(
        b"slow", b"*/slow", LaneOptions(idle_ns_max=7, hunger_ns_max=8, lane_template=b"{h}")
    )
    yard.set_rules(slow, smtp, uucp)
    reply = rule_list(yard.handle(RulesRequested(0, b"host", 5, (b"smtp",))))
    assert reply.client == b"host"
    assert reply.request == 5
    assert reply.rules == (slow, smtp, Rule(b"", b"*", LaneOptions()))
    reply = rule_list(yard.handle(RulesRequested(0, b"host", 5, (b"other",))))
    assert [rule.name for rule in reply.rules] == [b"slow", b""]


def test_version_of_rules_changes_with_them_and_not_by_a_restart() -> None:
    versions = []
    for interval_ns in (1, 1, 2):
        yard = Yard()
        yard.set_rules(Rule(b"a", b"*", LaneOptions(interval_ns=interval_ns)))
        versions.append(rule_list(yard.handle(RulesRequested(0, b"host"))).version)
    assert versions[0] == versions[1] != versions[2]


# Ages.


def test_expiry_is_set_by_the_rule_of_each_lane_at_submission() -> None:
    yard = Yard()
    yard.clock(100 * SECOND_NS)
    yard.set_rules(
        Rule(b"x", b"*/x", LaneOptions(expiry_ns=2 * SECOND_NS, expiry_hard_ns=3 * SECOND_NS)),
        Rule(b"rest", b"*", LaneOptions(report_after_ns=9 * SECOND_NS)),
    )
    yard.submit(b"a", b"b", b"c", lanes=[b"x", b"y", b"x"])
    yard.submit(b"own", lanes=[b"x"], expires_ns=1, expires_hard_ns=10**15)
    yard.submit(b"later", lanes=[b"x"], due_ns=200 * SECOND_NS)
    terms = {name: yard[name].terms for name in (b"a", b"b", b"c", b"own", b"later")}
    ages = {
        name: (one.expires_ns, one.expires_hard_ns, one.report_ns) for name, one in terms.items()
    }
    assert ages == {
        b"a": (102 * SECOND_NS, 103 * SECOND_NS, 0),
        b"b": (0, 0, 109 * SECOND_NS),
        b"c": (102 * SECOND_NS, 103 * SECOND_NS, 0),
        b"own": (1, 10**15, 0),
        b"later": (202 * SECOND_NS, 203 * SECOND_NS, 0),
    }
    yard.rules()
    yard.later(2.5)
    assert yard.state(b"a") is TaskState.READY  # never tried
    yard.later(0.5)
    assert yard.states(b"a", b"b", b"c") == [TaskState.FAILED, TaskState.READY, TaskState.FAILED]


def test_alarm_is_set_for_whatever_the_rules_bring() -> None:
    yard = Yard()
    yard.rules(report_after_ns=5 * SECOND_NS)
    yard.submit(b"a")
    assert yard.scheduler.wake_at_ns() == 5 * SECOND_NS
    yard.rules(debounce_ns=2 * SECOND_NS)
    yard.submit(b"b", lanes=[b"x"])
    assert yard.scheduler.wake_at_ns() == 2 * SECOND_NS
    yard.now_ns = 5 * SECOND_NS
    yard.handle(TimePassed(0))
    assert yard.scheduler.wake_at_ns() == NEVER_NS
