"""Hand results on to other calls, without waiting for them."""

from taskyard import Client


def square(x):
    return x**2


def neg(x):
    return -x


with Client() as client:
    squares = client.map(square, range(10))
    negatives = client.map(neg, squares)
    total = client.submit(sum, negatives)
    print(total.result())
