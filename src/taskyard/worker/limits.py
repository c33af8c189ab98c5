"""Every limit of the worker has a name and a reason, and stands here."""

from typing import Final

from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS

#: What a task gives back travels in a message and is kept in the journal; more belongs in a file.
RESULT_BYTES_MAX: Final = 1 << 20

#: What a pickled call gives back may be as much as it may be given: values that are handed from one
#: call to the next, as Python's own executors do it.
PICKLED_BYTES_MAX: Final = PAYLOAD_BYTES_MAX

#: The end of what a task printed is enough to see what went wrong.
OUTPUT_TAIL_BYTES: Final = 16 << 10

#: A last line of output that is quoted in a reason; the rest is in the output.
LAST_LINE_BYTES_MAX: Final = 500

#: One read from a pipe: its usual capacity, so that no task holds up the others.
READ_BYTES_MAX: Final = 64 << 10

#: What is read of a process that has ended: the largest pipe that an ordinary user can have. A
#: stranger that still holds the pipe could go on for ever.
DRAIN_BYTES_MAX: Final = 1 << 20

#: Between SIGTERM and SIGKILL, to put things in order.
KILL_GRACE_NS: Final = 2 * SECOND_NS

#: A Python process that is not ready for its first call by then will never be.
CHILD_START_NS_MAX: Final = 60 * SECOND_NS

#: How often to look whether a process has ended, where the kernel does not tell.
REAP_INTERVAL_NS: Final = SECOND_NS // 100
