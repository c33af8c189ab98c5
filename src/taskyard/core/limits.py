"""The limits of the core, each with its reason.

Limits are checked before anything changes. A request beyond a limit is refused as a whole.
"""

from typing import Final

SECOND_NS: Final = 1_000_000_000

#: Names become dict keys, table columns and, hashed, file names. Longer names are mistakes.
NAME_BYTES_MAX: Final = 1024

#: A message is one record and one turn. A larger message would delay the replies to other peers.
TASKS_PER_MESSAGE_MAX: Final = 100_000

#: Campaigns searched for a name given without one: about 100 µs, to print a hint.
CAMPAIGNS_SEARCHED_MAX: Final = 1000

#: Payloads stay in memory while their task waits. Put larger data in a file and name it.
PAYLOAD_BYTES_MAX: Final = 16 * 1024 * 1024

#: A submitter's directory and variables are kept once per submission, and sent with every lease.
ENVIRONMENT_BYTES_MAX: Final = 256 * 1024

#: About 4 GB at 400 bytes a task. Beyond it submissions are refused, and workers continue.
TASKS_MAX: Final = 10_000_000

#: Predecessors of one task. A join over more needs tasks in between.
AFTER_MAX: Final = 100_000

#: Predecessors of all tasks of one message. It is one turn, and each costs a microsecond or two.
AFTER_A_MESSAGE_MAX: Final = 150_000

#: A task that lost its worker this many times is assumed to have killed it.
CRASHES_MAX: Final = 5

#: The highest isolation of a task that lost workers: it runs alone in its worker. A task goes
#: through the lower steps first, however many workers it may lose.
EXCLUSIVE: Final = 4

#: Delay before the next attempt of a task whose program died, unless a retry schedule is set.
CRASH_DELAY_NS: Final = SECOND_NS

#: A worker that stays with its lane turns to another lane after this many tasks, so that a lane
#: which is never empty can't keep a worker forever.
LANE_RUN_TASKS_MAX: Final = 100

#: Subscribers of tasks behind a failure are notified within this time. Finding such tasks is a walk
#: over everything behind failures, too slow for every event.
STUCK_CHECK_NS: Final = SECOND_NS // 5

#: Time for a woken worker to request tasks before the next worker is woken.
WAKE_NS_MAX: Final = SECOND_NS

#: Numbers in terms must fit the journal's encoding, and any other reader's.
NUMBER_MAX: Final = (1 << 63) - 1

#: Priorities run from -1000 to 1000, because a lane has a queue for each one in use.
PRIORITY_MAX: Final = 1000

#: Numbers of lines that are kept, in bytes and in files. Beyond it those of the oldest load go.
NUMBERS_BYTES_MAX: Final = 32 * 1024 * 1024
NUMBERED_FILES_MAX: Final = 10_000

#: Bytes of a part of the numbers of a file, and parts in one message.
NUMBERS_PART_BYTES_MAX: Final = 160 * 1024
NUMBERS_PARTS_MAX: Final = 16

#: Files with one name that a reply lists.
NUMBERED_FILES_SHOWN_MAX: Final = 20

#: Steps of a retry schedule, which is kept with the task.
RETRIES_MAX: Final = 1000

#: Services of one worker. Each of them lists the worker.
SERVICES_MAX: Final = 1000

#: Tasks in one lease, which is one message and one record.
LEASE_TASKS_MAX: Final = 10_000

#: Failure texts stay in memory as long as their task. The tail usually has the error.
REASON_BYTES_MAX: Final = 2048

#: A worker's remark on an attempt: one line.
NOTE_BYTES_MAX: Final = 512

#: The latest line of a task's progress is kept in memory while it runs.
PROGRESS_BYTES_MAX: Final = 200

#: Every update of a task's output goes through the journal, so only the tail is kept.
OUTPUT_BYTES_MAX: Final = 65_536

#: From this length on bytes are a blob, outside the record. Below it the journal is quicker.
BLOB_BYTES_MIN: Final = 64 * 1024

#: Bytes that a record keeps of the head of a blob, and of its tail.
STREAM_END_BYTES: Final = 8 * 1024

#: Bytes of a blob or stream in one message: one turn, in which they are read from or written to the
#: disk.
PART_BYTES_MAX: Final = 1024 * 1024

#: Heartbeats in the time of a lease. With fewer, one lost message would expire a worker.
HEARTBEATS_PER_LEASE_MIN: Final = 3

#: A lease that a live worker does not list for this many heartbeats was lost on its way.
HEARTBEATS_UNLISTED_MAX: Final = 2

#: Heartbeats that the holder of a name misses before a newcomer gets the name. The last heartbeat
#: counts as missed when the next is due.
HEARTBEATS_MISSED_MAX: Final = 2

#: Processes that lost their name and are refused for good. Beyond it the oldest is forgotten and
#: waits for its name like any newcomer.
REPLACED_MAX: Final = 1000

#: Tasks lost with replaced processes, by name. Their charges are refunded if the process returns.
REPLACED_TASKS_MAX: Final = 100_000

#: Warnings that wait to be logged. Older warnings are dropped.
WARNINGS_MAX: Final = 100

#: Tasks that come due by one `TimePassed`. More follow with the next event. Expired tasks leave
#: at once, with so many in a record.
TIMER_TASKS_MAX: Final = 10_000

#: Tasks on one page of a listing: one message and about a millisecond.
LIST_TASKS_MAX: Final = 1000

#: Tasks on one page with the measurements of their latest attempts, which are read from the
#: journal: about 20 milliseconds.
LIST_MEASURED_MAX: Final = 250

#: Lanes on one page, and how many of each lane's next tasks are read.
LIST_LANES_MAX: Final = 1000
LANE_SCAN_MAX: Final = 100

#: Tasks searched for one page, so that a rare match delays no other reply.
LIST_SCAN_MAX: Final = 200_000

#: Tasks that a listing filters at once, column by column.
LIST_BATCH: Final = 512

#: Predecessors shown of one blocked task.
AFTER_SHOWN_MAX: Final = 100

#: The latest unsuccessful attempts kept of a task. The history has all of them.
ATTEMPTS_SHOWN_MAX: Final = 20

#: The reason kept with each of these attempts, beside the whole reason of the latest failure.
ATTEMPT_REASON_BYTES_MAX: Final = 200

#: Tasks that a refusal names: all of a batch that our clients send, so that they send all other
#: tasks in one further message. The reply stays below 10 MB with the longest names.
REFUSED_TASKS_MAX: Final = 2000

#: Names of refused tasks that `status` shows, enough to find the line of a file.
REFUSED_NAMES_MAX: Final = 5

#: Campaigns and services in one reply. Longer pages are not read.
STATS_ROWS_MAX: Final = 1000

#: Stale entries that a service's list of parked workers may hold, beyond two per worker.
PARKED_STALE_MAX: Final = 16

#: How many tasks too wide for a worker are skipped at first, and how many are considered for a
#: reservation.
WIDE_LOOKAHEAD: Final = 64

#: Different demands for slots and resources that a queue tells apart. Each is compared with a
#: worker's room at a request: a quarter of a microsecond. Beyond it similar demands are taken as
#: equal.
DEMANDS_MAX: Final = 256

#: Unused rate accumulates for this long, so that a high rate is reached although events arrive
#: only every few milliseconds.
RATE_BURST_NS_MAX: Final = SECOND_NS // 10

#: Used-up rates of deleted lanes that are kept for a rule in a service: 170 MB. Beyond that the
#: oldest rates are forgotten, so that their lanes may get a task too early.
LANE_RATES_MAX: Final = 1_000_000

#: The largest weight of a lane. A turn of 1,000,000 such lanes still has a cost in virtual time.
WEIGHT_MAX: Final = 1000

#: How far compaction may lag before producers are slowed, before clients that retry are refused,
#: and before all submissions are, in percent of the work that makes a compaction due. Tasks stay
#: in memory until they are compacted.
LAG_SLOW_PERCENT: Final = 200
LAG_REFUSE_PERCENT: Final = 300
LAG_REFUSE_ALL_PERCENT: Final = 450
