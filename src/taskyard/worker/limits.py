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

#: An agent that holds tasks and has said nothing for so long hangs. Who works longer says so.
AGENT_HUNGER_NS_MAX: Final = 3600 * SECOND_NS

#: An agent that has nothing to do for so long is let go; there will be another one when need be.
AGENT_IDLE_NS_MAX: Final = 180 * SECOND_NS

#: A hungry agent is told that there is nothing for it after so long: the next task takes a moment
#: to come from the broker.
AGENT_IDLE_NOTICE_NS: Final = SECOND_NS // 10

#: From being told to finish until it is ended, so that an agent can close what it has open.
AGENT_FINISH_NS_MAX: Final = 10 * SECOND_NS

#: From the end of an agent's output until it is ended: it can't report any more.
AGENT_CLOSED_NS_MAX: Final = SECOND_NS

#: Lines without a sense between two reports of an agent. A few are a library that prints; more are
#: a program that does not speak the language, and its task would never end.
AGENT_MALFORMED_LINES_MAX: Final = 100

#: After an agent that came to nothing the next one waits so long, and twice as long each time, up
#: to the maximum: a program that can't work must not be started a thousand times a second.
AGENT_RESTART_NS: Final = SECOND_NS // 10
AGENT_RESTART_NS_MAX: Final = 10 * SECOND_NS

#: Lines of an agent that are logged in a second: the log is for people.
AGENT_LOG_LINES_MAX: Final = 20

#: Comments are told to the broker while a task runs, and journalled each time: the newest will do.
PROGRESS_BYTES_MAX: Final = 2048

#: How often to look whether a process has ended, where the kernel does not tell.
REAP_INTERVAL_NS: Final = SECOND_NS // 100
