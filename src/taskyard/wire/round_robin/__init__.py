"""The round-robin dialect: frames, and both ends without I/O."""
