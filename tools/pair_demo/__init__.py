"""`./yard demo --pair`: two brokers on a throw-away PostgreSQL, and the leader is killed.

Also the cluster of the tests and benchmarks. Needs the extra `postgres` and PostgreSQL's programs.
"""
