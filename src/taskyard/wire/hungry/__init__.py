"""The hungry dialect of ZMailer's transport agents: lines, and the broker's end without I/O."""
