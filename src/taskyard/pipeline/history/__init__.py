"""The steps of `pipeline history`: from history files to data files of tables, without Spark.

    inputs      copies history files into the tables of events and edges, divided by task if large
    fold_files  folds the events of some tasks, and writes their attempts
    walk        places tasks in the graph, and writes tasks and critical paths
    stays       folds joins, exits and attempts into workers
    days        adds up buckets, and writes the metrics of the days that changed
    scratch     tables that wait for a later step of the same run
    memory      what the next run needs of this one, in tables whose names begin with `_`

Every step reads files, calls `fold`, writes new files and returns their names. No file is ever
changed, so Spark can place and retry each step. `jobs.history` commits what they return.
"""
