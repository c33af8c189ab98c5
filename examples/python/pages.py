"""Retrieve the pages that are given as arguments, and report each as it arrives."""

import sys
import urllib.request
from concurrent.futures import as_completed

from taskyard import Executor


def load_url(url, timeout):
    with urllib.request.urlopen(url, timeout=timeout) as connection:
        return connection.read()


with Executor(max_workers=2) as executor:
    url_of = {executor.submit(load_url, url, 60): url for url in sys.argv[1:]}
    for future in as_completed(url_of):
        try:
            print(f"{url_of[future]}: {len(future.result())} bytes")
        except OSError as error:
            print(f"{url_of[future]}: {error}")
