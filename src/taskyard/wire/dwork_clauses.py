"""The clauses in dwork's messages: what workers and clients are told of the broker's rules.

The rest of a clause is the broker's own business, and has its default at whoever is told.
"""

from __future__ import annotations

from typing import Final

from taskyard.core.rules import LaneOptions, Rule
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native.frames import parse

#: What is told of rules.
SENT_OPTIONS: Final = (
    "command",
    "lane_workers_max",
    "overfeed",
    "idle_ns_max",
    "hunger_ns_max",
    "lane_template",
)


def encode_rule(clause: Rule) -> bytes:
    told = {field: getattr(clause.options, field) for field in SENT_OPTIONS}
    return pb.ClauseMsg(name=clause.name, match=clause.match, **told).SerializeToString()


def decode_rule(raw: bytes) -> Rule:
    """Raises Malformed."""
    message = parse(pb.ClauseMsg, raw)
    rules = LaneOptions(
        **{field: getattr(message, field) for field in SENT_OPTIONS if message.HasField(field)}
    )
    return Rule(message.name, message.match, rules)
