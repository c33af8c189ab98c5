"""The parts of the soak: its processes and faults, its load, and its audit."""
