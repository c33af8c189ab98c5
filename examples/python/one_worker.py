"""Wait in a call for another call, with one worker. A pool would wait for ever."""

import taskyard


def wait_for_another():
    return taskyard.current().client.submit(pow, 5, 2).result()


with taskyard.Executor(max_workers=1) as executor:
    print(executor.submit(wait_for_another).result())
