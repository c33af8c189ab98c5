"""Rules of lanes in native messages, to and from the core's type."""

from __future__ import annotations

from typing import Final

from taskyard.core.rules import LaneOptions, Rule
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native.frames import parse

#: The options of a rule that are sent to peers. The others concern only the broker.
SENT_OPTIONS: Final = (
    "command",
    "lane_workers_max",
    "overfeed",
    "idle_ns_max",
    "hunger_ns_max",
    "lane_template",
    "lines",
    "interval_ns",
)


def encode_rule(rule: Rule) -> bytes:
    sent = {field: getattr(rule.options, field) for field in SENT_OPTIONS}
    return pb.ClauseMsg(name=rule.name, match=rule.match, **sent).SerializeToString()


def decode_rule(raw: bytes) -> Rule:
    """Decode a rule. Raise Malformed."""
    message = parse(pb.ClauseMsg, raw)
    rules = LaneOptions(
        **{field: getattr(message, field) for field in SENT_OPTIONS if message.HasField(field)}
    )
    return Rule(message.name, message.match, rules)
