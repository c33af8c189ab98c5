"""The simulated world: network, disk, clock, faults and checkers in one thread on virtual time.

Owns luck: everything is drawn from the seed, and the same seed gives the same digest. It runs the
very loops and machines that the product runs; its checkers share no code with what they check.

    python -m simulator 7                  one schedule, a line an event, the digest last
    python -m simulator --schedules 2000   many, counted; seeds that broke a promise are named
    python -m simulator --bugs             plant each bug and say which schedule caught it

A schedule is a broker (`broker.turn.Broker` itself, on a simulated port, disk and clock, behind the
adapters of `wire/`), a few clients that submit and wish, and workers of every kind of dialect. The
workers that we ship run their own loops (`shipped`, `programs`) over a model of ZeroMQ (`sockets`);
`decoders` says what they mean by their bytes. Beside them are workers that a stranger may write
from the dialects' pages (`workers`). What goes over the network is bytes: `doors` says which
dialect is spoken where, `tongues` and `dwork_tongue` how these peers speak. `plan` draws how big
the world is and what goes wrong in it, `scenario` lets it happen. After some seconds everything
heals: no more faults, new workers, what was paused goes on. Then all tasks must come to their end.
In a last round every connection is reset, or the broker killed, once more, and every worker of ours
must be given work within a bounded time. `story` reads the journal as it becomes
durable with a second machine of its own, `checkers` compare it with what peers meant and were told,
never with what the adapters made of it.

To read a run: the first lines are what was drawn. Then come lines of virtual seconds and what
happened: `says` is what a peer means by a message that leaves, `sends` an effect as the broker
tells it, `hears` what a peer makes of what arrives. The bytes themselves are part of the digest. If
a promise was broken, the line before the digest names the checker, and tells the story of the task.
`-q` runs the same schedule with only the verdict.

Not simulated: hungry agents, who are children of a worker and have no network; two brokers on one
database.
"""
