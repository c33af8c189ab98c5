"""The journal in PostgreSQL. Needs the extra `postgres`, so it is imported only by its users."""
