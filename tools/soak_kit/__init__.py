"""The parts of the soak: its processes and faults, its load, and the audit of what came of it."""
