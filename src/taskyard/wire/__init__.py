"""The dialects: frames to events, effects to frames, one folder each.

Owns every wire format and its limits. A decoder returns a value or raises `Malformed`, for any
input. Has no sockets and no clock: time and randomness are arguments.
"""
