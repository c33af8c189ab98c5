"""`taskyard demo`: run every part of Taskyard once, and count what it guarantees.

Uses all other packages. The command line above it provides output and a progress bar.
"""
