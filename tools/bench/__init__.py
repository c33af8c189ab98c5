"""The benchmarks: costs, and how they grow with the number of tasks.

Owns measurement: CPU as well as wall time, the best of several runs, with their spread. Nothing
else imports it, and no test asserts a time.
"""
