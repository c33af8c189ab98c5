"""Store data once, and use it in many calls."""

from taskyard import Client


def count(text, letter):
    return text.count(letter)


with Client() as client:
    text = client.submit(str, "the quick brown fox jumps over the lazy dog" * 1000)
    futures = [client.submit(count, text, letter) for letter in "aeiou"]
    print(client.gather(futures))
