"""How starting a program went of late, and when it may be started again."""

import logging

from taskyard.core.limits import SECOND_NS
from taskyard.worker.limits import AGENT_RESTART_NS, AGENT_RESTART_NS_MAX
from taskyard.worker.output import cut_reason

logger = logging.getLogger("taskyard.worker")


class StartBackoff:
    """Of one command."""

    def __init__(self) -> None:
        #: No agent is started before.
        self.next_ns = 0
        #: Why none can be started; b"" as soon as one asks for a task.
        self.agent_error = b""
        #: The agents of late that came to nothing.
        self._failures = 0

    def failed(self, reason: bytes, now_ns: int, *, is_error: bool) -> None:
        """An agent came to nothing: wait before the next one, longer each time. It is trouble if
        not even a task was to blame."""
        if now_ns - self.next_ns > AGENT_RESTART_NS_MAX:
            self._failures = 0
        delay_ns = min(AGENT_RESTART_NS << self._failures, AGENT_RESTART_NS_MAX)
        if delay_ns < AGENT_RESTART_NS_MAX:
            self._failures += 1
        self.next_ns = now_ns + delay_ns
        if is_error:
            self.agent_error = cut_reason(reason)
        text = reason.decode(errors="replace")
        logger.warning("%s; the next one is started in %g s", text, delay_ns / SECOND_NS)
