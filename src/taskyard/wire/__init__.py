"""The dialects: bytes to events, effects to bytes, one file each.

Owns every wire format and its limits. A decoder returns a value or raises one error type, whatever
it is fed. It has no sockets, no clock and no state beyond the message at hand.
"""
