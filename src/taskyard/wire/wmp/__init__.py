"""The Worker-Manager Protocol: frames, and both ends without I/O."""
