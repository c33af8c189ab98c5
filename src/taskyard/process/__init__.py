"""Processes that one command starts and watches: restart them when they end, stop them together."""
