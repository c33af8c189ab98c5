"""The work of tasks as bytes: commands, functions with their arguments, and their environment.

Owns the formats of payloads and results. Knows no scheduler and no messages.
"""
