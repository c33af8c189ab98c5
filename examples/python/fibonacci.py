"""Tasks that submit tasks. One that waits for others gives its slot to them."""

import taskyard


def fib(n):
    if n < 2:
        return n
    client = taskyard.current().client
    return sum(client.gather(client.map(fib, [n - 1, n - 2])))


with taskyard.Client() as client:
    print(client.submit(fib, 5).result())
