"""The input and output files of commands, checked before and after a run, and notes for users.

Owns the decisions: a missing input or output fails a command, and one whose outputs are up to date
does not run. Starts no processes.
"""

from msgspec import structs

from taskyard.calls.payloads import Command
from taskyard.campaign.file_times import TaskFiles
from taskyard.core.blobs import Blob, length_of
from taskyard.core.events import Outcome
from taskyard.core.limits import NOTE_BYTES_MAX
from taskyard.worker.jobs import Job, JobResult, cut_reason
from taskyard.worker.limits import OUTPUT_TAIL_BYTES


class CommandFiles:
    """Files of the commands that a runner has started, and notes on them."""

    def __init__(self) -> None:
        self._notes: dict[tuple[bytes, int], bytes] = {}
        #: Those of commands with outputs.
        self._files: dict[tuple[bytes, int], TaskFiles] = {}

    def start(self, job: Job, command: Command, note: bytes = b"") -> JobResult | None:
        """Check the files of a command. Return its result if it must not run.

        `note` is for users. An attempt before this one may have left incomplete outputs, so only a
        first attempt is skipped.
        """
        if note:
            self._notes[job.key] = note
        if not command.inputs and not command.outputs:
            return None
        files = TaskFiles(command.inputs or (), command.outputs or (), command.cwd or "")
        if missing := files.missing_input():
            return JobResult(job, Outcome.FAILED, _reason("input missing", missing))
        if not files.outputs:
            return None
        stale = files.why_stale()
        if not stale and job.attempt == 1:
            self._add_note(job, f"up to date: {_summary(files)}")
            return JobResult(job, Outcome.DONE)
        self._add_note(job, f"ran because {stale or 'this is not its first attempt'}")
        self._files[job.key] = files
        return None

    def finish(self, done: JobResult) -> JobResult:
        """Return the result of a command with its note. It has failed if an output is missing."""
        files = self._files.pop(done.job.key, None)
        is_done = done.outcome is Outcome.DONE
        if files is not None and is_done and (missing := files.missing_output()):
            done = _failed(done, _reason("output missing", missing))
        note = self._notes.pop(done.job.key, b"")
        if note and done.run is not None:
            done.run = structs.replace(done.run, note=note)
        return done

    def drop(self, key: tuple[bytes, int]) -> None:
        """Forget a command that was stopped."""
        self._notes.pop(key, None)
        self._files.pop(key, None)

    def _add_note(self, job: Job, text: str) -> None:
        before = self._notes.get(job.key)
        note = _encoded(text) if before is None else before + b"; " + _encoded(text)
        self._notes[job.key] = note[:NOTE_BYTES_MAX].decode(errors="ignore").encode()


def _summary(files: TaskFiles) -> str:
    if len(files.outputs) > 1:
        made = f"all {len(files.outputs)} outputs"
        return f"{made} are newer than all inputs" if files.inputs else f"{made} exist"
    made = files.outputs[0]
    return f"{made} is newer than all inputs" if files.inputs else f"{made} exists"


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _reason(problem: str, path: str) -> bytes:
    return cut_reason(_encoded(f"{problem}: {path}"))


def _failed(done: JobResult, reason: bytes) -> JobResult:
    """Return the failure of a command that succeeded. Its result was stdout, and is output now."""
    printed = done.printed
    if not printed and done.streams is None:
        end, bytes_total = done.text[-OUTPUT_TAIL_BYTES:], length_of(done.content)
        printed = Blob(b"", bytes_total, end) if len(end) < bytes_total else end
    return JobResult(done.job, Outcome.FAILED, reason, printed, run=done.run, streams=done.streams)
