"""Tight links keep their order and report breaks. Loose links do neither."""

from random import Random

from simulator.clock import Timeline
from simulator.network import Link, Message, Network
from simulator.plan import Faults


class End:
    """Both ends of a network: a broker that keeps its messages, and a peer."""

    def __init__(self, faults: Faults, *, reports_breaks: bool) -> None:
        self.up = True
        self.parcels: list[Message] = []
        self.answers: list[tuple[bytes, ...]] = []
        self.broken = 0
        self.timeline = Timeline()
        self.network = Network(self.timeline, Random(1), faults, self)
        self.link = self.network.connect(self, 3, reports_breaks=reports_breaks)
        self.route = self.link.route

    def on_message(self, message: Message | tuple[bytes, ...]) -> None:
        if isinstance(message, Message):
            self.parcels.append(message)
        else:
            self.answers.append(message)

    def link_broke(self, link: Link) -> None:
        assert link is self.link
        self.broken += 1

    def ask(self, *counts: int) -> list[int]:
        for count in counts:
            self.network.to_broker(self.link, [b"", b"%d" % count])
        self.pass_time()
        return [int(parcel.frames[1]) for parcel in self.parcels]

    def pass_time(self) -> None:
        self.timeline.run_until(self.timeline.now_ns + 60_000_000_000)


MESSY = Faults(reorder=True, duplicate=0.5, delay=0.5, delay_ns_max=1_000_000_000)


def test_tight_link_keeps_order_and_doubles_nothing() -> None:
    assert End(MESSY, reports_breaks=True).ask(*range(50)) == list(range(50))


def test_loose_link_reorders_and_doubles() -> None:
    got = End(MESSY, reports_breaks=False).ask(*range(50))
    assert got != sorted(got)
    assert len(got) > 50
    assert sorted(dict.fromkeys(got)) == list(range(50))


def test_loose_link_without_reordering_keeps_order() -> None:
    got = End(Faults(delay=0.5, delay_ns_max=10**9), reports_breaks=False).ask(*range(50))
    assert got == list(range(50))


def test_drop_breaks_a_tight_link_and_tells_the_peer() -> None:
    reports_breaks, loose = (
        End(Faults(drop=1.0), reports_breaks=True),
        End(Faults(drop=1.0), reports_breaks=False),
    )
    assert (reports_breaks.ask(1, 2), reports_breaks.broken) == ([], 1)
    assert (loose.ask(1, 2), loose.broken) == ([], 0)


def test_cut_link_lets_nothing_pass_that_way_until_it_is_mended() -> None:
    end = End(Faults(), reports_breaks=False)
    end.network.cut(end.route, to_broker=True, to_peer=False)
    assert end.ask(1) == []
    assert end.network.to_peer(end.route, [b"", b"PONG"], 0)
    end.pass_time()
    assert end.answers == [(b"", b"PONG")]
    end.network.reconnect(end.route)
    assert end.ask(2) == [2]


def test_mended_tight_link_is_broken_because_something_may_be_lost() -> None:
    end = End(Faults(), reports_breaks=True)
    end.network.cut(end.route, to_broker=True, to_peer=True)
    end.network.reconnect(end.route)
    end.pass_time()
    assert end.broken == 1


def test_message_to_a_missing_peer_is_reported_or_lost() -> None:
    for probability in (0.0, 1.0):
        end = End(Faults(undeliverable_reported=probability), reports_breaks=False)
        end.network.disconnect(end.link)
        assert end.network.to_peer(end.route, [b"", b"PONG"], 0) is not bool(probability)


def test_messages_that_wait_for_a_dead_broker_arrive_later() -> None:
    end = End(Faults(queued_while_down=True), reports_breaks=False)
    end.up = False
    assert end.ask(1) == []
    end.up = True
    end.network.broker_came_up()
    assert end.ask() == [1]


def test_route_is_the_door_and_the_id_that_was_chosen_or_given() -> None:
    end = End(Faults(), reports_breaks=False)
    chosen = end.network.connect(end, 4, b"tcp://sim:w", reports_breaks=True)
    assert (end.route[:2], chosen.route) == (b"\x03\0", b"\x04tcp://sim:w")
    assert end.network.connect(end, 3, reports_breaks=False).route != end.route
