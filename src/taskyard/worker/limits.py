"""The worker's limits, each with its reason."""

from typing import Final

from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS

#: A result travels in a message and stays in the journal. Larger results belong in a file.
RESULT_BYTES_MAX: Final = 1 << 20

#: A pickled result may be as large as a pickled call: executors pass values from call to call.
PICKLED_BYTES_MAX: Final = PAYLOAD_BYTES_MAX

#: Output of running programs that the broker has not acknowledged, of all tasks together. Beyond
#: it the worker stops reading, and the programs wait as behind a slow pipe.
SPOOL_BYTES_MAX: Final = 4 << 20

#: Output in one message.
APPEND_BYTES_MAX: Final = 1 << 20

#: A program that runs for this long gets its output sent while it runs, and then this often. Short
#: ones cost no message of their own.
SPOOL_START_NS: Final = SECOND_NS
SPOOL_INTERVAL_NS: Final = SECOND_NS // 2

#: More unsent output than this is sent at once.
SPOOL_BYTES_DUE: Final = 256 << 10

#: The end of a task's output, which mostly shows the problem.
OUTPUT_TAIL_BYTES: Final = 16 << 10

#: The last line of output in a reason. The rest is in the output.
LAST_LINE_BYTES_MAX: Final = 500

#: One read from a pipe: its usual capacity, so that no task delays the others.
READ_BYTES_MAX: Final = 64 << 10

#: Output is read while a program runs, but not before this time. Most short programs have ended by
#: then, and need no turn of their own for their output. A pipe holds it meanwhile.
UNWATCHED_NS: Final = SECOND_NS // 100

#: Read from the pipe of an ended process: the largest pipe of an ordinary user. Another process
#: that still holds the pipe could write for ever.
DRAIN_BYTES_MAX: Final = 1 << 20

#: Between SIGTERM and SIGKILL, for cleanup.
KILL_GRACE_NS: Final = 2 * SECOND_NS

#: How long idle Python children may take to exit with their worker. Less than its supervisor waits.
EXIT_NS_MAX: Final = 2 * SECOND_NS

#: Calls that wait for other tasks without their slots, at most. Each is a Python process of some
#: 30 MB. Tasks that submit tasks run depth first, so this is about the depth of a recursion.
CALLS_WAITING_MAX: Final = 100

#: Python processes beyond the slots, which replaced those of waiting calls, end after this idle
#: time.
CHILD_IDLE_NS_MAX: Final = 10 * SECOND_NS

#: A Python process must be ready for its first call within this time.
CHILD_START_NS_MAX: Final = 60 * SECOND_NS

#: The end of a running program's output that a worker without a spool sends as progress.
PROGRESS_TAIL_BYTES: Final = 4096

#: An agent that holds tasks and sends nothing for this time hangs. Longer tasks send comments.
AGENT_HUNGER_NS_MAX: Final = 3600 * SECOND_NS

#: An idle agent exits after this time. A new one starts when needed.
AGENT_IDLE_NS_MAX: Final = 180 * SECOND_NS

#: A hungry agent is notified after this time that no task waits: the next one takes a moment to
#: come from the broker.
AGENT_IDLE_NOTICE_NS: Final = SECOND_NS // 10

#: Between `finish` and SIGTERM, so that an agent can close its files.
AGENT_FINISH_NS_MAX: Final = 10 * SECOND_NS

#: Between the end of an agent's output and SIGTERM: it can't report any more.
AGENT_CLOSED_NS_MAX: Final = SECOND_NS

#: Malformed lines between two reports. A few come from a library that prints. More come from a
#: program of another protocol, whose task would never end.
AGENT_MALFORMED_LINES_MAX: Final = 100

#: Delay after a failed agent. It doubles each time up to the maximum, so that a broken program is
#: not started a thousand times a second.
AGENT_RESTART_NS: Final = SECOND_NS // 10
AGENT_RESTART_NS_MAX: Final = 10 * SECOND_NS

#: Log lines of an agent per second: people read the log.
AGENT_LOG_LINES_MAX: Final = 20

#: Comments sent to the broker while a task runs. Each is journalled, so only the newest are sent.
PROGRESS_BYTES_MAX: Final = 2048

#: Interval at which the memory of tasks with a limit is measured. A program can allocate about a
#: gigabyte meanwhile.
MEMORY_CHECK_NS: Final = SECOND_NS // 5

#: When a task is due again whose output or result the broker has no room for, for each attempt so
#: far, as it may never fit. While the broker's disk is full, the broker waits longer.
NO_ROOM_RETRY_NS: Final = 10 * SECOND_NS
NO_ROOM_RETRIES_MAX: Final = 60

#: How soon to send output again that the broker has no room for, and that can wait.
NO_ROOM_PAUSE_NS: Final = SECOND_NS

#: Polling interval for the end of a process on kernels without pidfds.
REAP_INTERVAL_NS: Final = SECOND_NS // 100
