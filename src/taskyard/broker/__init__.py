"""The broker: the loop that carries bytes between the peers, the scheduler and the journal.

Owns the order of a turn: an answer leaves only after the commit that holds its records. It decides
nothing itself, and takes its transport, store and clock as arguments.
"""
