"""A task as a user writes it: its keys, and the only check of them.

Files, the command line and Python all make a dict with these keys and pass it to `check_task`. A
row with recipients is a bundle (fan-out): one payload, and a task for each recipient. The format of
that payload is in `wire.payloads`. Does not import file formats or the broker's columns.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, structs

from taskyard.calls import inputs, payloads
from taskyard.calls.payloads import encode_value
from taskyard.campaign import lanes, values
from taskyard.campaign.values import InvalidValue, TimeSpec, duration_text, format_time, shown
from taskyard.core.limits import NAME_BYTES_MAX, NUMBER_MAX, SECOND_NS, TASKS_PER_MESSAGE_MAX
from taskyard.core.resources import CPUS, GPUS, MEMORY, UNIT, Resources
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

#: Default backoff of a retry schedule.
BACKOFF_NS: Final = SECOND_NS


class InvalidTask(UserError):
    """A task is invalid. The text has the reason, not the task."""

    code = "invalid-task"

    def __init__(self, text: str, offset: int | None = None) -> None:
        """`offset` is the invalid recipient of a bundle, if it is one."""
        super().__init__(text)
        self.offset = offset


class BundleRef(Struct, frozen=True, gc=False):
    """A task's part of its bundle."""

    bundle: str
    #: Index of its recipient, from 0 on.
    offset: int
    #: A text, or a dict of fields.
    recipient: str | dict[str, object]
    #: The lane template of the bundle. Empty: none was given.
    template: str = ""


class TaskSpec(Struct, kw_only=True, gc=False, omit_defaults=True):
    """A checked task. It has one of `argv`, `call` and `payload`."""

    name: str
    #: A program and its arguments. Never passes through a shell.
    argv: list[str] | None = None
    #: A function by import path, with its arguments.
    call: str | None = None
    args: list[object] | None = None
    kwargs: dict[str, object] | None = None
    #: Bytes for a worker's own code.
    payload: bytes | None = None
    #: The tasks that it waits for, without duplicates.
    after: tuple[str, ...] = ()
    #: None means `exec` for a command, `call` for a call, `default` for a payload.
    service: str | None = None
    #: "" for the service's open lane.
    lane: str = ""
    priority: int = 0
    due: TimeSpec | None = None
    expiry: TimeSpec | None = None
    #: Delays before each retry, in multiples of the backoff. None: the service's setting.
    retries: tuple[float, ...] | None = None
    backoff_ns: int = BACKOFF_NS
    #: 0 for no limit.
    time_limit_ns: int = 0
    slots: int = 1
    #: Named resources: ten-thousandths of all but memory, which is in bytes.
    cpus: int = 0
    memory: int = 0
    gpus: int = 0
    resources: Resources = ()
    env: dict[str, str] | None = None
    cwd: str | None = None
    #: Files that a command needs, and files that it makes.
    inputs: list[str] | None = None
    outputs: list[str] | None = None
    #: Exit statuses of a command after which it is not retried.
    final_exit_status: list[int] | None = None
    #: Set for a task of a bundle. All tasks of a bundle share one payload object.
    bundle_ref: BundleRef | None = None


#: Each key of a row: the field that it sets, and the function that reads its value.
KEYS: Final[dict[str, tuple[str, Callable[[object], object]]]] = {
    "name": ("name", values.read_name),
    "argv": ("argv", values.read_command),
    "call": ("call", values.read_call),
    "args": ("args", values.read_arguments),
    "kwargs": ("kwargs", values.read_keywords),
    "payload": ("payload", values.read_payload),
    "recipients": ("recipients", values.read_recipients),
    "after": ("after", values.read_names),
    "service": ("service", values.read_name),
    "lane": ("lane", values.read_lane),
    "priority": ("priority", values.read_priority),
    "due": ("due", values.read_time),
    "expiry": ("expiry", values.read_time),
    "retries": ("retries", values.read_multiples),
    "backoff": ("backoff_ns", values.read_duration),
    "time_limit": ("time_limit_ns", values.read_positive_duration),
    "slots": ("slots", values.read_slots),
    "cpus": ("cpus", values.read_amount),
    "memory": ("memory", values.read_size),
    "gpus": ("gpus", values.read_amount),
    "resources": ("resources", values.read_resources),
    "env": ("env", values.read_environment),
    "cwd": ("cwd", values.read_directory),
    "inputs": ("inputs", values.read_paths),
    "outputs": ("outputs", values.read_paths),
    "final_exit_status": ("final_exit_status", values.read_exit_statuses),
}

#: Names of our keys in other systems, for hints.
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
    "cores": "cpus",
    "mem": "memory",
    "gpu": "gpus",
    "cpu": "cpus",
    "resource": "resources",
    "environment": "env",
    "dir": "cwd",
    "requires": "inputs",
    "produces": "outputs",
}


def check_task(raw: object, campaign: str = "") -> TaskSpec:
    """Return the checked task of a row, with its lane template expanded. Raises `InvalidTask`."""
    if not isinstance(raw, dict):
        raise InvalidTask(f'must be an object with "name" and more, not {shown(raw)}')
    given: dict[str, Any] = {}
    key = ""
    try:
        for key, value in raw.items():  # the handler below uses `key`
            known = KEYS.get(key)
            if known is None:
                raise InvalidTask(unknown_key_text(key))
            if value is not None:
                given[known[0]] = known[1](value)
    except InvalidValue as bad:
        raise key_error_text(key, bad) from None
    if "name" not in given:
        raise InvalidTask('has no "name"')
    if "recipients" in given:
        raise InvalidTask('has "recipients" (submit it as a bundle)')
    spec = TaskSpec(**given)
    _check_work(spec)
    if _adds_results(spec) or len(given) > _PLAIN_TASK_KEYS:
        _check_terms(spec, given)
        if lanes.is_template(spec.lane):
            spec.lane = lane_of(spec, campaign, spec.lane)
    return spec


def _adds_results(spec: TaskSpec) -> bool:
    """Add the tasks whose results a command needs to its dependencies. Return whether it does."""
    if spec.argv is None:
        return False
    try:
        names = inputs.names_in(spec.argv)
    except UserError as error:
        raise InvalidTask(f'"argv" has {error}') from None
    if names:
        spec.after = tuple(dict.fromkeys([*spec.after, *names]))
    return bool(names)


def key_error_text(key: str, bad: InvalidValue) -> InvalidTask:
    """Return the error for a bad value of a key."""
    return InvalidTask(f'"{key}" {bad}')


#: A name and its work. A task with only these keys can't contradict itself.
_PLAIN_TASK_KEYS: Final = 2


def unknown_key_text(key: object) -> str:
    """Return the message on an unknown key, with a suggestion."""
    if key == "campaign":
        return 'has "campaign", which is an option of loading, not a key of a task'
    word = str(key).strip().lower().replace("-", "_").replace(" ", "_")
    close = [word] if word in KEYS else difflib.get_close_matches(word, KEYS, n=1)
    meant = ALIASES.get(word) or next(iter(close), None)
    advice = f'did you mean "{meant}"?' if meant else f"known keys: {', '.join(KEYS)}"
    return f"has an unknown key {shown(key)} ({advice})"


def _check_work(spec: TaskSpec) -> None:
    """Raise `InvalidTask` unless there is exactly one kind of work, with only its own keys."""
    ways = (spec.argv is not None) + (spec.call is not None) + (spec.payload is not None)
    if not ways:
        raise InvalidTask('has no work (give "argv", "call" or "payload")')
    if ways > 1:
        raise InvalidTask('must have only one of "argv", "call" and "payload"')
    if spec.call is None and (spec.args is not None or spec.kwargs is not None):
        raise InvalidTask('has "args" or "kwargs" without "call"')
    if spec.payload is not None and (spec.env is not None or spec.cwd is not None):
        raise InvalidTask('has "env" or "cwd", which are for "argv" and "call" only')
    if spec.argv is None and (spec.inputs is not None or spec.outputs is not None):
        raise InvalidTask('has "inputs" or "outputs", which are for "argv" only')
    if spec.argv is None and spec.final_exit_status is not None:
        raise InvalidTask('has "final_exit_status", which is for "argv" only')


def _check_terms(spec: TaskSpec, given: dict[str, Any]) -> None:
    """Raise `InvalidTask` for values that contradict each other."""
    if spec.name in spec.after:
        raise InvalidTask(f'waits for itself: {shown(spec.name)} is in its own "after"')
    if spec.retries is None:
        if "backoff_ns" in given:
            raise InvalidTask('has "backoff" without "retries"')
    elif spec.retries and max(spec.retries) * spec.backoff_ns > NUMBER_MAX:
        raise InvalidTask('"retries" times "backoff" must be less than 292 years')
    due, expiry = spec.due, spec.expiry
    if due and expiry and due.from_now == expiry.from_now and expiry.ns <= due.ns:
        raise InvalidTask('"expiry" must be later than "due"')


def resources_of(spec: TaskSpec) -> Resources:
    """Return all named resources of a task, sorted."""
    own = ((CPUS, spec.cpus), (MEMORY, spec.memory), (GPUS, spec.gpus))
    return tuple(sorted([*spec.resources, *((name, amount) for name, amount in own if amount)]))


def service_of(spec: TaskSpec) -> str:
    """Return the service of a task."""
    if spec.service is not None:
        return spec.service
    if spec.argv is not None:
        return "exec"
    return "call" if spec.call is not None else "default"


def lane_of(spec: TaskSpec, campaign: str, template: str) -> str:
    """Return the lane that a template gives for a task. Raises `InvalidTask`."""
    always = {"name": spec.name, "campaign": campaign, "service": service_of(spec)}
    try:
        return lanes.expand(template, lanes.fields_of(_work_fields(spec), always))
    except InvalidValue as bad:
        if spec.bundle_ref is None:
            raise key_error_text("lane", bad) from None
        offset = spec.bundle_ref.offset
        raise InvalidTask(f'"lane" of recipient {offset} {bad}', offset) from None


def _work_fields(spec: TaskSpec) -> Mapping[str, object]:
    """Return the fields of a task's work, for lane templates."""
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
    """Return the row of this task, or of its bundle, for a line of JSON."""
    raw: dict[str, object] = {"name": spec.name}
    work = ("argv", "call", "args", "kwargs", "service", "env", "cwd")
    plain = (*work, "inputs", "outputs", "final_exit_status")
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
    return raw | _resources_row(spec)


def _resources_row(spec: TaskSpec) -> dict[str, object]:
    """Return the keys of a task's resources."""
    raw: dict[str, object] = {"memory": spec.memory} if spec.memory else {}
    raw |= {key: getattr(spec, key) / UNIT for key in ("cpus", "gpus") if getattr(spec, key)}
    if spec.resources:
        raw["resources"] = {name.decode(): amount / UNIT for name, amount in spec.resources}
    return raw


def _bundle_row(spec: TaskSpec, bundle_ref: BundleRef) -> dict[str, object]:
    """Return the keys of a bundle's row that differ from its task's."""
    whole = payloads.decode_bundle(spec.payload or b"")
    lane = {"lane": bundle_ref.template} if bundle_ref.template else {}
    return lane | {"name": bundle_ref.bundle, "payload": whole.body, "recipients": whole.recipients}


#: The default lane template of a bundle, where its service has none.
RECIPIENT_LANE: Final = "{recipient}"

#: A bundle is accepted or refused as a whole, so it is one message.
RECIPIENTS_MAX: Final = TASKS_PER_MESSAGE_MAX


def expand_row(raw: object, campaign: str = "") -> Sequence[TaskSpec]:
    """Return the checked tasks of a row: one, or those of a bundle. Raises `InvalidTask`."""
    if not isinstance(raw, dict) or raw.get("recipients") is None:
        return (check_task(raw, campaign),)
    return _bundle_tasks(raw, campaign)


def _bundle_tasks(raw: dict[str, Any], campaign: str) -> list[TaskSpec]:
    if raw.get("payload") is None:
        raise InvalidTask('has "recipients" but no "payload"')
    try:
        recipients = values.read_recipients(raw["recipients"])
    except InvalidValue as bad:
        raise key_error_text("recipients", bad) from None
    _check_count(len(recipients))
    own = {key: value for key, value in raw.items() if key not in ("recipients", "lane")}
    whole = check_task(own | {"payload": _payload(raw["payload"], recipients)}, campaign)
    template = _template(raw.get("lane"))
    _check_name(whole.name, len(recipients))
    parts = [
        structs.replace(
            whole,
            name=payloads.task_name(whole.name, offset),
            bundle_ref=BundleRef(whole.name, offset, one, template),
        )
        for offset, one in enumerate(recipients)
    ]
    if template:
        for bundle_ref in parts:
            bundle_ref.lane = lane_of(bundle_ref, campaign, template)
    return parts


def _check_count(count: int) -> None:
    if count > RECIPIENTS_MAX:
        raise InvalidTask(
            f'"recipients" must be at most {RECIPIENTS_MAX:,}, not {count:,} (split the bundle)'
        )


def _check_name(name: str, count: int) -> None:
    length = len(payloads.task_name(name, count - 1).encode())
    if length > NAME_BYTES_MAX:
        raise InvalidTask(
            f'"name" must leave room for /{count - 1}: at most {NAME_BYTES_MAX} bytes with it, not '
            f"{length}"
        )


def _payload(body: object, recipients: Sequence[object]) -> bytes:
    """Return the payload of a bundle: the body and the recipients as JSON."""
    if isinstance(body, bytes):
        try:
            body = body.decode()
        except UnicodeDecodeError:
            raise InvalidTask(
                '"payload" of a bundle must be text or JSON, not bytes (put them in a file)'
            ) from None
    try:
        encoded = encode_value(body, "payload")
        return payloads.encode_bundle(encoded, encode_value(list(recipients), "list of recipients"))
    except UserError as wrong:
        raise InvalidTask(str(wrong)) from None


def _template(lane: object) -> str:
    """Return the lane template of a bundle. Empty: none was given."""
    if lane is None or lane == "":
        return ""
    try:
        return values.read_name(lane)
    except InvalidValue as bad:
        raise key_error_text("lane", bad) from None


def assign_lanes(specs: Iterable[TaskSpec], campaign: str, template: str) -> None:
    """Set the lanes of a bundle's tasks that give none, by the template of their service.

    Without a template, a task's lane is its recipient. Raises `InvalidTask`.
    """
    for spec in specs:
        if not spec.lane:
            spec.lane = lane_of(spec, campaign, template or RECIPIENT_LANE)
