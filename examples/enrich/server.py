"""A flaky API on this machine: python server.py [--rate N] [--log FILE].

`GET /HOST/ID` answers for a host of that name, at most `--rate` times a second for each host. More
requests get 429. Some of the others get 500, chosen at random. Ids that end in 999 always get 404.
The host down.example gets 503 until `GET /repair`. Every request is a line of the log: time in
seconds, host, id, status. Prints its port.
"""
# ruff: noqa: INP001, T201  # it stands alone, and prints

import argparse
import asyncio
import random
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import IO

#: The share of accepted requests that fail.
FAILURES = 0.05

#: Ids that the API does not know end in this.
INVALID = "999"

#: The host that is down until the repair.
DOWN = "down.example"

REASONS = {
    200: "OK",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Api:
    """Answers requests, and writes the log."""

    def __init__(self, rate: int, log: IO[str]) -> None:
        self._rate = rate
        self._log = log
        self._is_down = True
        self._random = random.Random(18)  # noqa: S311  # the same failures every time
        #: The times of the accepted requests of each host in the last second.
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)

    def answer(self, path: str) -> tuple[int, str]:
        """Return the status and the body for a path."""
        host, _, identity = path.strip("/").partition("/")
        if host == "repair":
            self._is_down = False
            return 200, ""
        status = self._status(host, identity)
        self._log.write(f"{time.monotonic():.6f} {host} {identity} {status}\n")
        score = int(identity) * 7919 % 1000 if identity.isdigit() else 0
        return status, f'{{"score": {score}}}' if status == 200 else REASONS[status]  # noqa: PLR2004

    def _status(self, host: str, identity: str) -> int:
        now, times = time.monotonic(), self._times[host]
        while times and times[0] <= now - 1:
            times.popleft()
        if len(times) >= self._rate:
            return 429
        times.append(now)
        if host == DOWN and self._is_down:
            return 503
        if identity.endswith(INVALID):
            return 404
        return 500 if self._random.random() < FAILURES else 200

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while line := await reader.readline():
                while (await reader.readline()).strip():
                    pass  # the headers
                status, body = self.answer(line.split()[1].decode())
                head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write((head + body).encode())
                await writer.drain()
        except (ConnectionError, IndexError, asyncio.CancelledError):
            pass  # the client is gone, sent no request, or the server stops
        finally:
            writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, default=30, help="requests per second and host")
    parser.add_argument("--log", type=Path, default=Path("requests.log"))
    options = parser.parse_args()
    with options.log.open("w", buffering=1) as log:
        api = Api(options.rate, log)
        server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        async with server:
            await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
