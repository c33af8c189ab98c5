"""Every limit of the core has a name and a reason, and stands here.

Limits are checked before anything changes: what goes beyond one is refused whole.
"""

from typing import Final

SECOND_NS: Final = 1_000_000_000

#: Names become keys of dicts, columns of tables and file names by hash; longer ones are mistakes.
NAME_BYTES_MAX: Final = 1024

#: One message is one record and one turn: a larger one would hold up everybody else's answer.
TASKS_PER_MESSAGE_MAX: Final = 100_000

#: Campaigns that are searched for a name that none was given for: some 100 µs, for a hint.
CAMPAIGNS_SEARCHED_MAX: Final = 1000

#: Payloads are kept in memory while their task waits; larger ones belong in a file that it names.
PAYLOAD_BYTES_MAX: Final = 16 * 1024 * 1024

#: About 4 GB at 400 bytes a task. Beyond it producers are told, and workers keep completing.
TASKS_MAX: Final = 10_000_000

#: Predecessors of one task; a join over more wants a task in between.
AFTER_MAX: Final = 100_000

#: Predecessors of all tasks of one message: it is one turn, and each costs a microsecond or two.
AFTER_A_MESSAGE_MAX: Final = 150_000

#: A task that was lost with its worker this many times is held to have killed it.
CRASHES_MAX: Final = 5

#: The highest isolation of a task that lost workers: it is the only one in its worker. Each lower
#: one is a step towards it, and a task's last steps are these, however many workers it may cost.
EXCLUSIVE: Final = 4

#: And one that its program died with has this long until it is tried again, where no schedule says.
CRASH_DELAY_NS: Final = SECOND_NS

#: A worker that goes on with its lane lets another lane have its turn after this many tasks, so
#: that a lane which is never empty can't keep a worker for ever.
LANE_RUN_TASKS_MAX: Final = 100

#: Who watches tasks that end up behind a failure is told within this time: to find them is a
#: walk over all that is behind failures, too dear for every event.
STUCK_CHECK_NS: Final = SECOND_NS // 5

#: How long a called worker may take to ask, before the next one is called.
WAKE_NS_MAX: Final = SECOND_NS

#: Numbers in terms must fit the journal's encoding, and any other reader's.
NUMBER_MAX: Final = (1 << 63) - 1

#: Priorities run from -1000 to 1000: a lane has a queue for each one in use. A time is no priority.
PRIORITY_MAX: Final = 1000

#: Steps of a retry schedule: it is kept with the task, and nobody plans further.
RETRIES_MAX: Final = 1000

#: Services that one worker may offer: each of them lists it.
SERVICES_MAX: Final = 1000

#: Tasks in one lease: a larger one is a message and a record of that size.
LEASE_TASKS_MAX: Final = 10_000

#: Failure texts are kept in memory for as long as the task is: the tail says what went wrong.
REASON_BYTES_MAX: Final = 2048

#: The end of what a task prints goes through the journal each time: the tail says how it goes.
OUTPUT_BYTES_MAX: Final = 65_536

#: A lease that a live worker does not list in this many heartbeats was lost on the way to it.
HEARTBEATS_UNLISTED_MAX: Final = 2

#: Heartbeats that the holder of a name misses before a newcomer gets the name. That the last of
#: them is missed is certain when the next one is due.
HEARTBEATS_MISSED_MAX: Final = 2

#: Processes that lost their name and are refused for good. Beyond it the oldest is forgotten: it
#: would wait for its name like any newcomer.
REPLACED_MAX: Final = 1000

#: Tasks lost with them, whose charges are refunded if the process returns. Each is kept by name.
REPLACED_TASKS_MAX: Final = 100_000

#: Warnings for the log that nobody has taken yet: older ones are dropped.
WARNINGS_MAX: Final = 100

#: What one turn of the clock moves at most; the rest follows in the next turn.
TIMER_TASKS_MAX: Final = 10_000

#: A page of a listing: one message, and a millisecond of the broker's time.
LIST_TASKS_MAX: Final = 1000

#: A page of lanes, likewise; and how many of a lane's next tasks it looks at.
LIST_LANES_MAX: Final = 1000
LANE_SCAN_MAX: Final = 100

#: How far one page looks for tasks that fit, so that a rare one holds up nobody else's answer.
LIST_SCAN_MAX: Final = 200_000

#: A listing looks at so many tasks at once, column by column.
LIST_BATCH: Final = 512

#: Tasks that hold one up, in an answer about it: who wants all of them walks the graph.
AFTER_SHOWN_MAX: Final = 100

#: Unfinished attempts of a task that are remembered to be shown: the latest. The history has all.
ATTEMPTS_SHOWN_MAX: Final = 20

#: Names of refused tasks that `status` shows: enough to find the line of a file.
REFUSED_NAMES_MAX: Final = 5

#: Campaigns and services in one answer: more make a page that nobody reads.
STATS_ROWS_MAX: Final = 1000

#: Void entries that a service's list of parked workers may hold, beside two a worker.
PARKED_STALE_MAX: Final = 16

#: How far a worker looks at first past tasks that take more slots than it has free, and how far
#: for one to reserve a worker for.
WIDE_LOOKAHEAD: Final = 64

#: Rate that was not used is saved up for this long, so that a high rate is reached with one
#: look at the clock every few milliseconds.
RATE_BURST_NS_MAX: Final = SECOND_NS // 10

#: How far compaction may lag behind before producers are slowed, before clients that repeat a
#: submission are refused, and before everybody is: in percent of the work that makes one due. What
#: is not compacted stays in memory.
LAG_SLOW_PERCENT: Final = 200
LAG_REFUSE_PERCENT: Final = 300
LAG_REFUSE_ALL_PERCENT: Final = 450
