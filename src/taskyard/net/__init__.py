"""Sockets and the clock: the only importer of zmq, the only reader of real time.

Owns how a socket is made, with every option stated, who may connect (ZAP, and CURVE when there are
keys), what wakes a loop, and what time it is. It carries frames and does not look inside them.
"""
