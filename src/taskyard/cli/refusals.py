"""What a broker refuses, in the words of a command line.

A broker speaks to all kinds of clients, of payloads and batches; who types a command knows commands
and options. What is not known here is passed on as it was said.
"""

from __future__ import annotations

from typing import Any, Final

from taskyard.errors import Refused

#: How a broker says that a name is taken, and that a task to wait for is not there.
_CONFLICT_TEXT: Final = " is known with another payload"
_SAME_BATCH_TEXT: Final = ", or in the same batch"


def explain_refusal(refused: Refused, options: dict[str, Any], conflict: str) -> Refused:
    """The refusal of a task with the options `options`; `conflict` tells that its name is taken,
    with {} where the kind of work stands."""
    text = str(refused)
    if _CONFLICT_TEXT in text:
        work = next((kind for kind in ("call", "payload") if options[kind] is not None), "command")
        return Refused(conflict.replace("{}", work))
    return Refused(text.replace(_SAME_BATCH_TEXT, ", or give --wait-for-unknown"))
