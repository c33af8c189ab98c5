"""The relay: forwards both ways and holds nothing.

Owns the way between two sides and how much may be under way. It keeps no task, so that its loss
costs nothing but time, and takes its transport and clock as arguments.
"""
