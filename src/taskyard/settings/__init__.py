"""Settings: the table of keys, the file and environment that set them, and their origins.

Handles values and files. Independent of brokers, workers and sockets.
"""
