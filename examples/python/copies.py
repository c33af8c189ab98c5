"""Copy files at once. The end of `with` waits for all of them."""

import shutil

from taskyard import Executor

with Executor(max_workers=4) as executor:
    for number in range(1, 5):
        executor.submit(shutil.copy, f"src{number}.txt", f"dest{number}.txt")
