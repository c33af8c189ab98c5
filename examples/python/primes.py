"""Test large numbers for primality, in several processes."""

import math

from taskyard import Executor

NUMBERS = [112272535095293, 115797848077099, 1099726899285419]


def is_prime(number):
    if number < 2 or (number > 2 and number % 2 == 0):
        return False
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


if __name__ == "__main__":
    with Executor() as executor:
        for number, prime in zip(NUMBERS, executor.map(is_prime, NUMBERS), strict=True):
            print(f"{number} is prime: {prime}")
