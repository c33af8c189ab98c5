"""The marks of recipients in ZMailer's control files, for tasks that an agent passed over.

The agent marks each recipient in the file, and locks it while it delivers. So a recipient that was
delivered for another task of its line, or whose report was lost, is found here. The lock of an
agent that was killed is removed, as the original scheduler does.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.process.locks import is_running
from taskyard.wire.hungry import zmailer
from taskyard.wire.hungry.frames import Report

if TYPE_CHECKING:
    from taskyard.wire.hungry.frames import Key


def report_of(key: Key, payload: bytes, interval_ns: int) -> Report:
    """Return the report that a recipient's mark stands for: by default, to try it again later."""
    path = zmailer.path_of(payload)
    text = b"the agent reported nothing"
    try:
        mark = _mark_of(path, int(key[0].rpartition(b"/")[2]))
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "not a transport control file"
        text = b"%s: %s" % (path, problem.encode())
    else:
        if mark == zmailer.DELIVERED:
            return Report(key, Outcome.DONE, text=b"marked as delivered")
        if mark == zmailer.REFUSED:
            return Report(key, Outcome.FAILED_FINAL, text=b"marked as failed")
    retry_ns = max(interval_ns, SECOND_NS)
    return Report(key, Outcome.RETRY_AT, text=text, retry_ns=retry_ns, is_from_now=True)


def _mark_of(path: bytes, offset: int) -> bytes:
    """Return the mark of a recipient, and remove the lock of a process that has ended.

    Raises `OSError` or `ValueError`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        line = os.pread(descriptor, 2 + zmailer.LOCK_BYTES, offset)
        mark, process = line[1:2], line[2:]
        if line[:1] != zmailer.RECIPIENT or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError
        if mark == zmailer.LOCKED and not is_running(int(process)):
            os.pwrite(descriptor, zmailer.WAITING * (1 + zmailer.LOCK_BYTES), offset + 1)
        return mark
    finally:
        os.close(descriptor)
