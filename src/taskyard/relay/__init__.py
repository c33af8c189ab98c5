"""The relay: forwards WMP messages both ways and keeps no tasks.

Owns the routing between two sides and the limit on messages in transit. Losing a relay costs only
time. It takes its transports and clock as arguments.
"""
