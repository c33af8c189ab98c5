"""Settings: the table of keys, the file and the environment they come from, and their origins.

Beside wire and journal: it knows values and files, and nothing of brokers, workers or sockets.
"""
