"""Sockets and clocks: the only package that imports zmq or reads real time.

Owns how a socket is made, with every option stated, access control (ZAP, and CURVE where there are
keys), polling, and the clocks. It carries frames and does not decode them.
"""
