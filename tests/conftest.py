"""Settings of hypothesis for every test: the same examples each run, and no clock that judges.

`derandomize` makes a failure come back; `deadline` is off because a shared machine has no steady
speed. HYPOTHESIS_PROFILE=search looks for new examples instead.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
