"""One task as a user writes it: its keys, and the one place that checks them.

Whatever the file, the command line or Python gave, it becomes a dict with these keys and goes
through `check_task`. Nothing here knows of files, or of the broker's columns.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.campaign import lanes
from taskyard.campaign.values import (
    InvalidValue,
    TimeSpec,
    duration_text,
    format_time,
    read_arguments,
    read_call,
    read_command,
    read_directory,
    read_duration,
    read_environment,
    read_keywords,
    read_lane,
    read_multiples,
    read_name,
    read_names,
    read_payload,
    read_positive_duration,
    read_priority,
    read_recipients,
    read_slots,
    read_time,
    shown,
)
from taskyard.core.limits import NUMBER_MAX, SECOND_NS
from taskyard.errors import UserError
from taskyard.wire import payloads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: The interval of a retry schedule that does not say its own.
BACKOFF_NS: Final = SECOND_NS


class InvalidTask(UserError):
    """A task can't be taken as it is written. The text says why, not where."""

    def __init__(self, text: str, offset: int | None = None) -> None:
        """Of a bundle it may be one of its recipients that is wrong, by its offset."""
        super().__init__(text)
        self.offset = offset


class BundleRef(Struct, frozen=True, gc=False):
    """Which part of a bundle a task is."""

    bundle: str
    #: The place of its recipient, from 0 on.
    offset: int
    #: A text, or an object of fields.
    recipient: str | dict[str, object]
    #: The lane as it was written, for all of them; "" where it was not.
    template: str = ""


class TaskSpec(Struct, kw_only=True, gc=False, omit_defaults=True):
    """A task as a user wrote it, checked. It has one of `argv`, `call` and `payload`."""

    name: str
    #: A program and its arguments; never passes through a shell.
    argv: list[str] | None = None
    #: A function by import path, with its arguments.
    call: str | None = None
    args: list[object] | None = None
    kwargs: dict[str, object] | None = None
    #: Bytes for a worker that knows what to do with them.
    payload: bytes | None = None
    #: The tasks that it waits for, each once.
    after: tuple[str, ...] = ()
    #: None: `exec` for a command, `call` for a call, `default` for a payload.
    service: str | None = None
    #: "" for the service's open lane.
    lane: str = ""
    priority: int = 0
    due: TimeSpec | None = None
    expiry: TimeSpec | None = None
    #: When to try again after a failure, in multiples of the backoff; None: as the service says.
    retries: tuple[float, ...] | None = None
    backoff_ns: int = BACKOFF_NS
    #: 0 for no limit.
    time_limit_ns: int = 0
    slots: int = 1
    env: dict[str, str] | None = None
    cwd: str | None = None
    #: Of a bundle's task: all of them have the same payload, the very same object.
    bundle_ref: BundleRef | None = None


#: Each key of a file: the field that it fills, and who reads its value.
KEYS: Final[dict[str, tuple[str, Callable[[object], object]]]] = {
    "name": ("name", read_name),
    "argv": ("argv", read_command),
    "call": ("call", read_call),
    "args": ("args", read_arguments),
    "kwargs": ("kwargs", read_keywords),
    "payload": ("payload", read_payload),
    "recipients": ("recipients", read_recipients),
    "after": ("after", read_names),
    "service": ("service", read_name),
    "lane": ("lane", read_lane),
    "priority": ("priority", read_priority),
    "due": ("due", read_time),
    "expiry": ("expiry", read_time),
    "retries": ("retries", read_multiples),
    "backoff": ("backoff_ns", read_duration),
    "time_limit": ("time_limit_ns", read_positive_duration),
    "slots": ("slots", read_slots),
    "env": ("env", read_environment),
    "cwd": ("cwd", read_directory),
}

#: What other systems call our keys.
ALIASES: Final = {
    "id": "name",
    "task": "name",
    "cmd": "argv",
    "command": "argv",
    "depends_on": "after",
    "dependencies": "after",
    "deps": "after",
    "parents": "after",
    "to": "recipients",
    "function": "call",
    "queue": "service",
    "delay": "due",
    "eta": "due",
    "deadline": "expiry",
    "expires": "expiry",
    "timeout": "time_limit",
    "cores": "slots",
    "cpus": "slots",
    "environment": "env",
    "dir": "cwd",
}


def check_task(raw: object, campaign: str = "") -> TaskSpec:
    """The task that a file, a command or a program describes, in the lane that its template makes
    of it. Raises `InvalidTask`."""
    if not isinstance(raw, dict):
        raise InvalidTask(f'must be an object with "name" and more, not {shown(raw)}')
    given: dict[str, Any] = {}
    key = ""
    try:
        for key, value in raw.items():  # the handler below says which key it was
            known = KEYS.get(key)
            if known is None:
                raise InvalidTask(unknown_key_text(key))
            if value is not None:
                given[known[0]] = known[1](value)
    except InvalidValue as bad:
        raise key_error_text(key, bad) from None
    if "name" not in given:
        raise InvalidTask('has no "name"; give it one of its own')
    if "recipients" in given:
        raise InvalidTask('has "recipients", which make many tasks of it; submit it as a bundle')
    spec = TaskSpec(**given)
    _check_work(spec)
    if len(given) > _PLAIN_TASK_KEYS:
        _check_terms(spec, given)
        if lanes.is_template(spec.lane):
            spec.lane = lane_of(spec, campaign, spec.lane)
    return spec


def key_error_text(key: str, bad: InvalidValue) -> InvalidTask:
    """What to say about a value, with the key that it is of."""
    return InvalidTask(f'"{key}" {bad}')


#: A name and what to do; a task with no more than that can't contradict itself.
_PLAIN_TASK_KEYS: Final = 2


def unknown_key_text(key: object) -> str:
    """What to say about a key that we don't know, with what may have been meant."""
    if key == "campaign":
        return '"campaign" is given when the file is loaded, not in it'
    word = str(key).strip().lower().replace("-", "_").replace(" ", "_")
    close = [word] if word in KEYS else difflib.get_close_matches(word, KEYS, n=1)
    meant = ALIASES.get(word) or next(iter(close), None)
    advice = f'did you mean "{meant}"?' if meant else f"known are: {', '.join(KEYS)}"
    return f"has an unknown key {shown(key)}; {advice}"


def _check_work(spec: TaskSpec) -> None:
    """Exactly one thing to do, with what belongs to it."""
    ways = (spec.argv is not None) + (spec.call is not None) + (spec.payload is not None)
    if not ways:
        raise InvalidTask('says nothing to do; give "argv", "call" or "payload"')
    if ways > 1:
        raise InvalidTask('must have one of "argv", "call" and "payload", not several')
    if spec.call is None and (spec.args is not None or spec.kwargs is not None):
        raise InvalidTask('has "args" or "kwargs" without a "call"; say what to call')
    if spec.payload is not None and (spec.env is not None or spec.cwd is not None):
        raise InvalidTask('has "env" or "cwd", which only "argv" and "call" can use')


def _check_terms(spec: TaskSpec, given: dict[str, Any]) -> None:
    """Values that are good alone may contradict each other."""
    if spec.name in spec.after:
        raise InvalidTask(
            f'waits for itself: {shown(spec.name)} is in its own "after"; leave it out'
        )
    if spec.retries is None:
        if "backoff_ns" in given:
            raise InvalidTask('has "backoff" without "retries"; say how often to try again')
    elif spec.retries and max(spec.retries) * spec.backoff_ns > NUMBER_MAX:
        raise InvalidTask('"retries" times "backoff" must be less than 292 years')
    due, expiry = spec.due, spec.expiry
    if due and expiry and due.from_now == expiry.from_now and expiry.ns <= due.ns:
        raise InvalidTask('"expiry" must be later than "due", or it could never run')


def service_of(spec: TaskSpec) -> str:
    """The service that a task goes to."""
    if spec.service is not None:
        return spec.service
    if spec.argv is not None:
        return "exec"
    return "call" if spec.call is not None else "default"


def lane_of(spec: TaskSpec, campaign: str, template: str) -> str:
    """The lane that a template makes of a task. Raises `InvalidTask`."""
    always = {"name": spec.name, "campaign": campaign, "service": service_of(spec)}
    try:
        return lanes.expand(template, lanes.fields_of(_work_fields(spec), always))
    except InvalidValue as bad:
        if spec.bundle_ref is None:
            raise key_error_text("lane", bad) from None
        offset = spec.bundle_ref.offset
        raise InvalidTask(f'"lane" of recipient {offset} {bad}', offset) from None


def _work_fields(spec: TaskSpec) -> Mapping[str, object]:
    """What tells a task from others of its kind."""
    if spec.bundle_ref is not None:
        recipient = spec.bundle_ref.recipient
        own = recipient if isinstance(recipient, dict) else {"recipient": recipient}
        return own | {"bundle": spec.bundle_ref.bundle, "offset": spec.bundle_ref.offset}
    if spec.argv is not None:
        return {"argv": spec.argv}
    if spec.call is not None:
        return {"call": spec.call, "args": spec.args or (), "kwargs": spec.kwargs or {}}
    return lanes.payload_keys(spec.payload or b"")


def to_row(spec: TaskSpec) -> dict[str, object]:
    """The keys and values that make this task, or its bundle, for a line of JSON."""
    raw: dict[str, object] = {"name": spec.name}
    plain = ("argv", "call", "args", "kwargs", "service", "env", "cwd")
    raw |= {key: getattr(spec, key) for key in plain if getattr(spec, key) is not None}
    if spec.payload is not None:
        raw["payload"] = spec.payload.decode(errors="backslashreplace")
    if spec.after:
        raw["after"] = list(spec.after)
    if spec.lane:
        raw["lane"] = lanes.escape_template(spec.lane)
    if spec.bundle_ref is not None:
        raw |= _bundle_row(spec, spec.bundle_ref)
    if spec.priority:
        raw["priority"] = spec.priority
    raw |= {
        key: format_time(when)
        for key, when in (("due", spec.due), ("expiry", spec.expiry))
        if when is not None
    }
    if spec.retries is not None:
        raw["retries"] = list(spec.retries)
        raw["backoff"] = duration_text(spec.backoff_ns)
    if spec.time_limit_ns:
        raw["time_limit"] = duration_text(spec.time_limit_ns)
    if spec.slots != 1:
        raw["slots"] = spec.slots
    return raw


def _bundle_row(spec: TaskSpec, bundle_ref: BundleRef) -> dict[str, object]:
    """The keys that differ where a task is part of a bundle: those of the whole of it."""
    whole = payloads.decode_bundle(spec.payload or b"")
    lane = {"lane": bundle_ref.template} if bundle_ref.template else {}
    return lane | {"name": bundle_ref.bundle, "payload": whole.body, "recipients": whole.recipients}
