"""Progress of running tasks: the latest is shown until the lease ends."""

from taskyard.core.effects import ExplanationReply, TaskDetails
from taskyard.core.events import ExplainRequested, LookupRequested, TasksProgressed, TasksReturned
from taskyard.core.limits import PROGRESS_BYTES_MAX
from tests.core.kit import Yard


def running() -> Yard:
    """Return a yard whose worker runs a task."""
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a")
    yard.take(b"w")
    return yard


def progress(
    yard: Yard,
    percent: int | None = None,
    text: bytes | None = None,
    worker: bytes = b"w",
    attempt: int = 1,
) -> tuple[int, bytes]:
    """Report progress, and return what users see."""
    event = TasksProgressed(0, worker, [b"a"], [attempt])
    event.percents = None if percent is None else [percent]
    event.texts = None if text is None else [text]
    yard.handle(event)
    return seen(yard)


def seen(yard: Yard) -> tuple[int, bytes]:
    (details,) = yard.handle(LookupRequested(0, b"client", [b"a"], 1))
    assert isinstance(details, TaskDetails)
    return details.views[0].percent, details.views[0].progress


def why(yard: Yard) -> str:
    (reply,) = yard.handle(ExplainRequested(0, b"client", b"a", 1))
    assert isinstance(reply, ExplanationReply)
    return reply.explanation.sentence


def test_percent_and_text_are_kept_apart() -> None:
    yard = running()
    assert seen(yard) == (-1, b"")
    assert progress(yard, 0) == (0, b"")
    assert progress(yard, text=b"first\nsecond \n") == (0, b"second")
    assert progress(yard, 250) == (100, b"second")
    assert progress(yard, text=b"\n \n") == (100, b"second")


def test_long_line_is_cut_to_its_end() -> None:
    text = b"x" * 500 + b"end"
    assert progress(running(), text=text) == (-1, text[-PROGRESS_BYTES_MAX:])


def test_sentence_has_the_progress() -> None:
    yard = running()
    assert why(yard).endswith("(attempt 1)")
    progress(yard, 40)
    assert why(yard).endswith("(attempt 1); its progress: 40 %")
    progress(yard, text=b"copying")
    assert why(yard).endswith("; its progress: 40 %, copying")


def test_progress_of_another_worker_or_attempt_is_ignored() -> None:
    yard = running()
    yard.join(b"other")
    assert progress(yard, 40, worker=b"other") == (-1, b"")
    assert progress(yard, 40, attempt=2) == (-1, b"")


def test_next_attempt_begins_without_progress() -> None:
    yard = running()
    progress(yard, 40, b"copying")
    yard.handle(TasksReturned(0, b"w", [b"a"]))
    assert seen(yard) == (-1, b"")
    yard.take(b"w")
    assert seen(yard) == (-1, b"")
