"""The fold: events in, rows of attempts, tasks, workers and metrics out, in one pass over columns.

numpy and Arrow only. Nothing here imports Spark, reads a file or looks at a clock, so tests need no
session and any executor can call it. `docs/decisions/0073-one-fold.md` has the reasons.

A **share** is all events of some tasks of a campaign, in the order of the journal. A campaign is
divided into shares by the hash of the task's name. One stable sort by task brings the steps of each
task together. The step before and the step after are then a shift by one row.

Input of one share: the `Carried` state that the previous fold returned, and the new events. Output:

- **rows to append**, which never change again: attempts that ended, and generations of tasks that
  are DONE, CANCELLED, or replaced by a later generation of the same name.
- **rows that replace** all such rows of the share: open attempts, and tasks in any other state.
  FAILED is one of them, because a retry continues the same generation.
- **buckets to add** by key: changes in fixed intervals, see `buckets`. Only new events and attempts
  that ended now add to them. An open attempt adds nothing until it ends: `metrics` counts the open
  ones on top when it makes the table.
- **carried**: the steps of the generations that may still change, and the last record folded. The
  next fold skips older events, so the same files can be read twice.

So one fold of all events, and any number of folds of their parts, give the same rows.

Three steps need more than a share. `stays` takes the joins and exits of workers, and the attempts
of all campaigns. `graph` takes tasks and edges of all campaigns that are linked by an edge, as
integers: it finds levels, states that depend on other tasks, and critical paths. `metrics` turns
buckets into the table of a chart, of any multiple of the interval.

Every row has the name of its `broker`, so tables of several brokers can be read as one.
"""
