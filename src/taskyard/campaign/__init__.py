"""Campaigns as users write them: files become tasks, checked before any of them is submitted.

`values` reads one value, `task_spec` one task, `lines` a stream of bytes, `formats` a file of any
format, which `detection` chooses. `tables` and `other_systems` read formats of their own, and
`shell_lines` commands, named by their text. `graph` finds levels and cycles, and `reader` puts
it all together. `batches` makes the broker's columns, and `submitter` submits them through a client
that its caller passes. Nothing here opens a connection or prints.
"""
