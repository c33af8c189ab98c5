"""The ping-pong dialect: frames, and both ends without I/O."""
