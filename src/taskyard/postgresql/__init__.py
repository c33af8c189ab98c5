"""A journal in PostgreSQL, for a pair of brokers. Importing it needs the extra `postgres`."""

from taskyard.errors import NotInstalled

try:
    import psycopg as _psycopg  # noqa: F401
except ImportError as error:
    raise NotInstalled(f"store: needs {error.name} (`pip install 'taskyard[postgres]'`)") from error
