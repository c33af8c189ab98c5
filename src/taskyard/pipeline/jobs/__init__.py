"""Jobs read, call transforms and write. One module for each command of `taskyard pipeline`."""
