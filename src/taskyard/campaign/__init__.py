"""Campaigns as users write them: files become tasks, checked before any of them is submitted.

`values` reads one value, `tasks` one task, `lines` a stream; a file each for the formats (`jsonl`,
`table`, `parquet`, `wfcommons`, `commas`), between which `formats` chooses. `survey` looks at the
graph, `read` puts it all together, `submitting` makes the broker's columns of it. Nobody here talks
to a broker or prints.
"""
