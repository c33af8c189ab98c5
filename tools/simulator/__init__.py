"""The simulator: network, disk, clock, faults and checkers in one thread on virtual time.

Owns randomness: every choice is drawn from the seed, and one seed always gives the same digest. It
runs the product's own loops and state machines. The checkers share no code with them.

    python -m simulator 7                  run one schedule, print each event and the digest
    python -m simulator --schedules 2000   run many, print the seeds that broke a promise
    python -m simulator --bugs             plant each bug, print the schedule that caught it
    python -m simulator 7 --pair           run one with two brokers over one database

A schedule has a broker, a few clients, and workers of every dialect. The broker is
`broker.turn.Broker` itself, on a simulated transport, disk and clock (`broker_host`, `disk`,
`clock`), behind the adapters of `wire/` (`listeners`). Product workers and clients run their own
loops (`product_workers`, `product_clients`, `processes`) over a model of ZeroMQ (`sockets`), and
`decoders` reads the events out of their bytes. Model workers and clients (`workers`, `clients`)
are peers that a stranger could write from the dialects' pages. They encode with `codecs`.

`plan` draws the size of the world and its faults, `scenario` makes them happen. After some seconds
all faults end, new workers start, paused lanes resume, and every task must end. In a last round
every connection is reset, or the broker is killed, and every product worker must get a task within
a bounded time. `reference_model` replays the journal as it becomes durable. `checkers` compares it
with the events that peers sent and received, never with the adapters' decoded events.

The output of a run starts with the plan. Each further line has the virtual time in seconds and an
event: `peer sends` and `peer receives` are messages at a peer, `broker sends` an effect. The bytes
are part of the digest and not shown. If a promise was broken, the line before the digest names the
checker and lists the states of the task. `-q` prints only the verdict.

With `--pair` there are two brokers, each on its own machine (`pair_host`, `pair_broker`). They run
the product's lease, store and exports in simulated threads (`threads`), over a PostgreSQL that
executes their statements, delays them and cuts connections (`postgres`).

In some schedules programs print, and calls have large arguments and results (`outputs`, `calls`,
`values`). The blobs are then the product's own files on a disk that loses what was not synced
(`blob_disk`, `blob_host`), or rows of the database of a pair (`blob_tables`). The product sweeps
them. `checkers.blobs` knows from the records alone which of them must be there.

Not simulated: hungry agents, which are children of a worker and have no network.
"""
