"""An agent that passes lines between its pipes and a socket of the test.

python relay_agent.py SOCKET
"""

import os
import selectors
import socket
import sys


def main(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as test, selectors.DefaultSelector() as selector:
        test.connect(path)
        selector.register(0, selectors.EVENT_READ, test.fileno())
        selector.register(test, selectors.EVENT_READ, 1)
        while True:
            for key, _ in selector.select():
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    return
                hand_on(key.data, chunk)


def hand_on(descriptor: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


if __name__ == "__main__":
    main(sys.argv[1])
