"""The page: a view folded from records, served over HTTP.

Owns what a browser sees. It reads records and sends requests as any client does; it holds no truth
of its own.
"""
