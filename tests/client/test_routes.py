"""Routes to several brokers: the hash, homes, locations, and brokers that do not answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import pytest

from taskyard.client import discovery, fan_out
from taskyard.client.aio import AsyncClient
from taskyard.client.async_broker_set import AsyncBrokerSet
from taskyard.client.broker_set import BrokerSet
from taskyard.client.client import Client
from taskyard.client.record_stream import BrokerIdentity
from taskyard.client.routes import RETRY_SECONDS, Routes, Routine, choose
from taskyard.errors import NoBroker, UnknownName, UnusableKey, UserError

_T = TypeVar("_T")

NAMES = [f"campaign-{number}" for number in range(300)]
IDENTITIES = {number: BrokerIdentity(bytes([number]) * 16, number) for number in range(3)}
IDENTITIES_OF_TWO = {number: IDENTITIES[number] for number in (0, 1)}


class FakeBrokers:
    """Answers the fans of routines. `silent` brokers do not answer."""

    def __init__(self, count: int) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        self.silent: set[int] = set()
        #: The numbers of the brokers in each fan.
        self.asked: list[list[int]] = []
        endpoints = [f"tcp://10.0.0.{number}:1" for number in range(count)]
        self.routes = Routes(endpoints, self.lines.append, lambda: self.now)
        self.run(self.routes.connect(), IDENTITIES.__getitem__)

    def run(self, routine: Routine[_T], *values: Callable[[int], Any]) -> _T:
        """Run a routine. Each fan gets the values of the next function."""
        left = [*values]
        try:
            fan = next(routine)
            while True:
                self.asked.append([*fan])
                fan = routine.send(self._answer(fan, left.pop(0)))
        except StopIteration as end:
            assert not left
            value: _T = end.value
            return value

    def _answer(self, fan: Mapping[int, Any], value_of: Callable[[int], Any]) -> dict[int, Any]:
        return {
            number: NoBroker("silent") if number in self.silent else value_of(number)
            for number in fan
        }


def at(*numbers: int) -> Callable[[int], bool]:
    """Return where a campaign is."""
    return lambda number: number in numbers


@pytest.mark.parametrize(("one", "several"), [(Client, BrokerSet), (AsyncClient, AsyncBrokerSet)])
def test_every_operation_of_a_client_goes_over_several_brokers(one: type, several: type) -> None:
    """An operation without a routine would ask a session that the set does not have."""
    made = {name for name, member in vars(one).items() if hasattr(member, "__signature__")}
    assert {name for name in made if name not in vars(several)} == set()
    assert {*fan_out.OPERATIONS} == made - {"create_bundle"}


def test_hash_ignores_the_order_of_brokers_and_moves_few_names_with_one_more() -> None:
    two = IDENTITIES_OF_TWO
    chosen = [choose(two, name) for name in NAMES]
    assert chosen == [choose(dict(reversed(two.items())), name) for name in NAMES]
    assert 100 < chosen.count(0) < 200
    moved = [choose(IDENTITIES, name) for name in NAMES]
    assert all(new in (old, 2) for old, new in zip(chosen, moved, strict=True))
    assert 60 < moved.count(2) < 140


def test_campaign_is_where_it_exists_and_is_asked_for_once() -> None:
    brokers = FakeBrokers(3)
    name = next(name for name in NAMES if choose(IDENTITIES, name) != 1)
    assert brokers.run(brokers.routes.home(name), at(1)) == 1
    assert brokers.run(brokers.routes.home(name)) == 1


def test_new_campaign_is_placed_by_the_hash_if_all_brokers_answer() -> None:
    brokers = FakeBrokers(3)
    assert brokers.run(brokers.routes.home("new"), at()) == choose(IDENTITIES, "new")
    brokers.silent = {2}
    assert brokers.run(brokers.routes.home("known"), at(0)) == 0
    with pytest.raises(NoBroker, match=r"^campaign 'next': not created, because the broker at "):
        brokers.run(brokers.routes.home("next"), at(), at())
    assert brokers.asked[-2:] == [[0, 1], [2]]  # the answer of the last one is needed


def test_campaign_at_two_brokers_is_refused() -> None:
    brokers = FakeBrokers(3)
    with pytest.raises(UserError, match=r"exists at the brokers at .*0:1, .*2:1 \(give one"):
        brokers.run(brokers.routes.home("twice"), at(0, 2))


def test_silent_broker_is_reported_once_and_asked_again_after_a_while() -> None:
    brokers = FakeBrokers(2)
    brokers.silent = {1}
    brokers.run(fan_out.workers(brokers.routes), lambda _: [{"name": "w"}])
    seen = brokers.run(fan_out.workers(brokers.routes), lambda _: [{"name": "w"}])
    assert seen == [{"name": "w", "broker": "tcp://10.0.0.0:1"}]
    assert brokers.lines == ["broker at tcp://10.0.0.1:1: no answer, left out"]
    brokers.silent, brokers.now = set(), RETRY_SECONDS
    assert len(brokers.run(fan_out.workers(brokers.routes), lambda _: [{"name": "w"}])) == 2
    assert brokers.asked[1:] == [[0, 1], [0], [0, 1]]


def test_unknown_task_is_undecided_while_a_broker_is_silent() -> None:
    brokers = FakeBrokers(2)
    with pytest.raises(UnknownName, match="unknown task 'x'"):
        brokers.run(brokers.routes.location("x"), lambda _: {})
    brokers.silent = {0}
    with pytest.raises(NoBroker, match=r"unknown task 'x' .* but the broker at .* does not answer"):
        brokers.run(brokers.routes.location("x"), lambda _: {}, lambda _: {})
    assert brokers.asked[-2:] == [[0, 1], [0]]
    assert brokers.run(brokers.routes.location("y"), lambda _: {"y": {}}) == 1


def test_unknown_dependency_is_undecided_while_a_broker_is_silent() -> None:
    brokers = FakeBrokers(2)
    brokers.silent = {1}
    known = partial(fan_out.known_predecessors, brokers.routes, "e1", home=0)
    assert brokers.run(known(names=["x"]), lambda _: {"x": None}) == {"x": None}
    with pytest.raises(NoBroker, match=r"'e2/a' .* but the broker at .*1:1 does not answer"):
        brokers.run(known(names=["x", "e2/a"]), lambda _: {"x": None}, lambda _: {})
    assert brokers.run(known(names=["y"], may_wait=True), lambda _: {}) == {}


def test_name_in_a_campaign_is_resolved_over_all_brokers() -> None:
    brokers = FakeBrokers(2)
    found = {0: {"x": ["a/x"], "y": ["a/y"]}, 1: {"x": ["b/x"], "y": []}}
    with pytest.raises(UnknownName, match=r"unknown task 'x' \(did you mean a/x or b/x\?\)"):
        brokers.run(brokers.routes.resolve(["x", "y"]), found.__getitem__)
    assert brokers.run(brokers.routes.resolve(["y"]), found.__getitem__) == ["a/y"]
    exact = {0: {"x": ["x"]}, 1: {"x": ["b/x"]}}
    assert brokers.run(brokers.routes.resolve(["x"]), exact.__getitem__) == ["x"]


def test_command_on_a_scope_changes_nothing_unless_all_brokers_answer() -> None:
    brokers = FakeBrokers(2)
    retry = fan_out.command(lambda *_args, **_options: iter(()))  # type: ignore[arg-type]
    assert brokers.run(retry(brokers.routes), lambda _: None, lambda number: number + 1) == 3
    brokers.silent = {1}
    with pytest.raises(NoBroker, match="the request is for all brokers"):
        brokers.run(retry(brokers.routes), lambda _: None)


@pytest.mark.parametrize(
    ("process", "text"),
    [
        (1, "the same as ipc:///a"),
        (2, "left out, because its state is a copy of that of ipc:///a (use one of them)"),
    ],
)
def test_broker_with_a_journal_of_another_one_is_left_out(process: int, text: str) -> None:
    lines: list[str] = []
    brokers = FakeBrokers(1)
    brokers.routes = Routes(["ipc:///a", "tcp://127.0.0.1:1"], lines.append)
    found = [BrokerIdentity(b"same", 1), BrokerIdentity(b"same", process)]
    brokers.run(brokers.routes.connect(), found.__getitem__)
    assert brokers.routes.numbers == [0]
    assert lines == [f"broker at tcp://127.0.0.1:1: {text}"]


def test_broker_that_was_left_out_of_a_read_is_asked_where_its_answer_is_needed() -> None:
    """It may restart, and a new campaign waits for it."""
    brokers = FakeBrokers(2)
    brokers.silent = {1}
    for _ in range(2):
        brokers.run(fan_out.workers(brokers.routes), lambda _: [])
    assert brokers.asked[-1] == [0]  # not again so soon
    brokers.silent = set()
    home = brokers.run(brokers.routes.home("new"), at(), at())
    assert (home, brokers.asked[-2:]) == (choose(IDENTITIES_OF_TWO, "new"), [[0], [1]])


def test_random_name_goes_to_a_broker_that_answers() -> None:
    brokers = FakeBrokers(2)
    brokers.silent = {1}
    brokers.run(fan_out.workers(brokers.routes), lambda _: [])
    assert {brokers.routes.any_home(name) for name in NAMES} == {0}


def test_each_broker_has_its_own_key() -> None:
    remote = ["tcp://127.0.0.1:1", "ipc:///a", "tcp://127.0.0.1:2"]
    assert discovery.keys_for(remote, environment={}) == [None, None, None]
    with pytest.raises(UnusableKey, match="1 key, but 2 brokers over TCP"):
        discovery.keys_for(remote, ["one.key"])
    with pytest.raises(UnusableKey, match=r"first\.key"):
        discovery.keys_for(remote, ["first.key", "second.key"])


def test_list_of_brokers_may_have_commas_and_repetitions() -> None:
    given = ["tcp://127.0.0.1:1,tcp://127.0.0.1:2", "ipc:///a,b", "tcp://127.0.0.1:1"]
    found = discovery.find(given)
    assert found.endpoints() == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "ipc:///a,b")
    with pytest.raises(UserError, match="this takes one broker"):
        found.endpoint()
