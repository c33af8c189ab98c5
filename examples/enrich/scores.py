"""The function that workers call: asks the API about one row."""
# ruff: noqa: INP001  # it stands alone

import http.client
import json
import os
from typing import Any

import taskyard

#: One connection for each process, kept open.
_connections: dict[int, http.client.HTTPConnection] = {}


def score(id: int, host: str) -> dict[str, Any]:  # noqa: A002  # the names of the columns
    """Return the API's answer. Raises an error with the status for anything but 200.

    An id that the API does not know is not tried again.
    """
    port = int(os.environ["ENRICH_PORT"])
    connection = _connections.setdefault(port, http.client.HTTPConnection("127.0.0.1", port))
    try:
        connection.request("GET", f"/{host}/{id}")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException):
        connection.close()  # the next call connects again
        raise
    if response.status == http.client.NOT_FOUND:
        raise taskyard.Final(f"HTTP 404 {body.decode()}")
    if response.status != http.client.OK:
        raise RuntimeError(f"HTTP {response.status} {body.decode()}")
    answer: dict[str, Any] = json.loads(body)
    return answer
