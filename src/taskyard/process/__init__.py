"""Broker, relay and worker as child processes of `up`, `run`, an executor, the demo and tests."""
