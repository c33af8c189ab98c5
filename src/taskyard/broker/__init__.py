"""The broker: the loop that moves messages between peers, the scheduler and the journal.

Owns the order of a turn: a reply leaves only after the commit that holds its records. It decides
nothing itself, and takes its transport, store and clock as arguments.
"""
