"""`taskyard demo`: everything once, with its own campaign, and a count of what it proves.

It stands on all the rest and right below the command line, which gives it words and a bar.
"""
