"""Which tasks name a blob: in the records of the journal, and in the index of ended tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core import identity
from taskyard.core.blobs import PICKLE_MARK, Blob, blobs_of, results_needed, text_of
from taskyard.core.records import Finished, Progressed, Submitted
from taskyard.journal.recovery import records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.entities import Task
    from taskyard.core.records import AnyRecord
    from taskyard.journal.archive import Archive
    from taskyard.journal.store import StoreReader

#: The records that may name blobs.
NAMING: Final[frozenset[type]] = frozenset((Submitted, Finished, Progressed))


def blobs_named(record: AnyRecord) -> Iterator[tuple[str, Sequence[bytes]]]:
    """Yield the blobs that a record names, each with the tasks that it is of."""
    if type(record) is Submitted:
        submission = record.submission
        if len(submission.payloads) == 1:
            for name in blobs_of(submission.payloads[0]):
                yield name, submission.names
        else:
            yield from _of_contents(submission.names, submission.payloads)
    elif type(record) is Finished and record.results is not None:
        yield from _of_contents(record.names, record.results)
    elif type(record) is Progressed:
        yield from _of_contents(record.names, record.texts)
        yield from _of_contents(record.names, record.stderrs or ())


def _of_contents(
    names: Sequence[bytes], contents: Sequence[Content]
) -> Iterator[tuple[str, Sequence[bytes]]]:
    try:
        if PICKLE_MARK not in b"".join(contents):  # type: ignore[arg-type]  # nearly always
            return
    except TypeError:  # some are blobs
        pass
    for index, content in enumerate(contents):
        if isinstance(content, Blob) or content.startswith(PICKLE_MARK):  # few of many
            for blob in blobs_of(content):
                yield blob, names[index : index + 1]


def blobs_needed(task: Task, result_of: Callable[[bytes], Content | None]) -> set[str]:
    """Return the blobs that a task needs: of its payload, and of results that its payload needs.

    `result_of` returns the result of a task that is done.
    """
    found = {*blobs_of(task.payload)}
    for name in results_needed(text_of(task.payload)):
        key = name.encode()
        content = result_of(identity.spelling(task.terms.campaign, key))
        if content is None:  # it is outside the task's campaign
            content = result_of(key)
        found.update(blobs_of(content or b""))
    return found


def tasks_by_blob(rows: StoreReader, index: Archive) -> dict[str, set[bytes]]:
    """Return the tasks that name each blob, but unfinished tasks whose rows are trimmed."""
    found: dict[str, set[bytes]] = {}
    for row in rows.rows(rows.anchor.sequence):
        for record in records_of(row, row.record_first - 1):
            for blob, tasks in blobs_named(record):
                found.setdefault(blob, set()).update(tasks)
    for blob, task in index.all_blobs():
        found.setdefault(blob, set()).add(task)
    return found
