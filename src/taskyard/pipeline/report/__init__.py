"""Pages with pictures: the report of what happened, and that of a sweep.

Owns how a page looks (`page`), its words (`words`) and its pictures (`figures`, `pictures`). What
is drawn are aggregates, a few thousand points a picture at most: however large a campaign, its page
opens at once. Nothing here asks Spark or reads files.
"""
