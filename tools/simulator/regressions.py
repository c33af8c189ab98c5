"""Seeds that once failed. Every test run repeats them.

A seed draws other choices when the simulator grows, so it need not show its bug any more. Each bug
has a test of its own in the core.
"""

from typing import Final

#: Seeds of two brokers, with the bug that each found.
PAIR_REGRESSIONS: Final[dict[int, str]] = {
    2501394: "a trim that was executed late set the anchor back, and no broker could start",
    2000665: "a broker that was stopped past its lease while it started took the journal for lost",
    3013372: "a renewed heartbeat whose Steal was lost did not count, and its worker was lost",
    3005816: "a renewed heartbeat whose Steal was lost did not count, and its worker was lost",
    3018020: "the model missed a woken worker that was drained in the same turn",
    3004731: "the model missed that a lost worker returns leases of an old connection",
    5009804: "the model forgot an Exit to a broker that was replaced, and its task was stuck",
    2000508: "the model lost a watch that was sent while no broker led",
    2000967: "the model expected a new leader to know the interval of a worker's heartbeats",
}

#: Seeds, with the bug that each found.
REGRESSIONS: Final[dict[int, str]] = {
    4: "two workers of one name in the heap of parked workers could not be compared",
    6: "a worker that left while it was parked was leased a task",
    0: "the broker turned without rest while a rate had room and another limit had none",
    52: "going on with a lane was not counted for the service's limit",
    126: "going on with a lane was not counted for the service's limit",
    143: "going on with a lane was not counted for the service's limit",
    84: "a lane that was gone on with was looked at again, and its task leased twice",
    125: "a lane that was gone on with was looked at again, and its task leased twice",
    265: "a lane that was gone on with was looked at again, and its task leased twice",
    580: "a task from a snapshot never ended by its hard expiry",
    709: "a retried task that was too old waited for ever",
    171: "a worker of another dialect could not be drained by its name",
    575: "a lost worker got no refusal of its Complete with a Steal",
    268: "a worker of round-robin whose message was cancelled got more than it has slots for",
    554: "a round-robin worker without a message since a restart lost its tasks",
    1296: "a cancelled message of a long lease let its worker be silent for as long",
    702597: "a void entry of a queue was taken for the live one, and a moved task stayed behind",
    709039: "the same void entry, in another lane",
    800031: "a clock that was set back let a task outlive its hard expiry",
    700317: "the model expected an answer on a job that waits for a task never submitted",
    704886: "the model expected an answer on a job that waits for a task never submitted",
    709231: "the model expected an answer on a job that waits for a task never submitted",
    168: "a task that was put off waited for a task of more slots than any worker has",
    910920: "a look for work that was not leased raised the bound on a lane's slots",
    910217: "the model took an INCREMENT of before a restart for one of a later message",
    910458: "the invariant counted tasks of full lanes as work to call workers for",
    920919: "a rate that opened before another event was not noticed",
    941003: "a worker that was called for one service took a task of another, and none was called",
    900306: "the model expected an answer that waits, in order, for one before it",
    900429: "the model took slots of answers since a restart for those of before it",
    900273: "a worker that was called twice at once counted twice, and another was not woken",
    5328: "the model counted a WAKE that a repeated READY had cancelled",
    61000001: "the last round expected work for a woken worker when quicker ones had taken all",
    61000004: "the last round expected work for a woken worker when quicker ones had taken all",
    61000075: "the last round expected work for a woken worker when quicker ones had taken all",
    61002100: "a worker that stands by was leased its reserved task twice in one turn",
    61001163: "the model counted the WAKE of a worker that was sent away in the same turn",
    61100019: "the model took an unknown name for one outside the campaign of its task",
    61110361: "a READY that had crossed a cancelled job brought its worker the next one too early",
    70000803: "a worker lost before a restart answered after it, and its client got two answers",
    71003623: "a worker of WMP whose freed slot was locked at once did not send READY after a NO",
    71014574: "a worker of a full lane was kept free for a task whose rate was used up",
    71016150: "the model missed a newcomer that came in the turn in which its name was taken",
    71016924: "a task that was put off took the place that its lane keeps for a wide one",
    71011903: "the model took a name that its peer writes without its campaign for a full one",
    70005776: "a worker of round-robin that nothing reaches was leased one task again and again",
    61100401: "the model took an unknown name for one outside the campaign of its task",
}
