"""Campaigns as users write them: files become tasks, checked before any of them is submitted.

`values` reads one value, `task_spec` one task, `lines` a stream of bytes, `formats` a file of any
format, which `detection` chooses. `line_names` names tasks that are lines. `graph` finds levels and
cycles, `rejects` words and writes bad rows, `reader` puts it all together. `batches` makes the
broker's columns. `submitter` and, for whole files, `submit_campaign` submit them through a client
that their caller passes. Nothing here opens a connection or prints.
"""
