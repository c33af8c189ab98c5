"""Call one function in another process."""

from taskyard import Executor

with Executor(max_workers=1) as executor:
    future = executor.submit(pow, 323, 1235)
    print(future.result())
