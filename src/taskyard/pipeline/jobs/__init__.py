"""Jobs: read, call transforms, write. One file a verb of `taskyard pipeline`."""
