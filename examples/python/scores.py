"""Look at results as they arrive."""

from taskyard import Client, as_completed


def score(x):
    return -((x - 3) ** 2)


with Client() as client:
    best = -100
    for _, y in as_completed(client.map(score, range(8)), with_results=True):
        best = max(best, y)
    print(best)
