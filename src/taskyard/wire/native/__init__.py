"""The native dialect, a superset of dwork: protobuf messages, and both ends without I/O."""
