"""Templates in the command, the payload and some options of `map`, and the tasks made with them.

`{}` is the text of the row, `{#}` its number, `{column}` a field and `{1}` a numbered column. `{.}`
`{/}` `{//}` `{/.}` are parts of the text as a path, and `{1.}` or `{column/}` parts of a column.
Other braces are left alone, because they may belong to another language. So is a shell's `${name}`.

In the script of a shell values are quoted, and a template that can't be quoted is refused: a row
must not become code. Numbers are no code, so `{#}` may be anywhere.

Also owns the names of these tasks, their submission, and the dry run.
"""

from __future__ import annotations

import os.path
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec
from msgspec import Struct, structs

from taskyard.calls import scripts
from taskyard.calls.payloads import encode_call, encode_command, encode_value
from taskyard.campaign import lanes
from taskyard.campaign.batches import encode_batch, encode_text
from taskyard.campaign.shell_lines import LineNames
from taskyard.campaign.task_spec import check_task, service_of
from taskyard.campaign.values import InvalidValue, shown
from taskyard.cli.documents import DOCUMENT_VERSION, MapPlannedTask
from taskyard.cli.format import escape_line
from taskyard.cli.output import encode_json, text_or_base64
from taskyard.cli.task_options import check_one_work, read_payload_option, task_keys
from taskyard.core.identity import spelling, split
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, UnknownName, UserError
from taskyard.wire.views import resources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.calls.scripts import Script
    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.cli.options import CliContext
    from taskyard.cli.run_report import EndedRows, TaskGroup
    from taskyard.client.futures import Future
    from taskyard.client.internal import InternalClient

#: Doubled braces stand for literal single ones. A column name may contain spaces.
_PLACEHOLDER: Final = re.compile(
    r"(?<!\$)(?:\{\{(?P<literal>[\w./#-]*)\}\}|\{(?P<key>[\w./#-]*|[\w.-]+(?: [\w.-]+)+)\})"
)

#: A column and a part of its value as a path. A negative number counts from the last column.
_COLUMN: Final = re.compile(r"(?P<number>-?[1-9]\d{0,5})(?P<part>//|/\.|/|\.|)", re.ASCII)
_FIELD_PART: Final = re.compile(r"(?P<name>.+?)(?P<part>//|/\.|/|\.)")

#: Parts of a path, named as in GNU parallel.
_PATH_PARTS: Final[dict[str, Callable[[str], str]]] = {
    ".": lambda path: os.path.splitext(path)[0],  # noqa: PTH122  # pathlib would normalize the rest
    "/": os.path.basename,
    "//": lambda path: os.path.dirname(path.rstrip("/") or path) or ".",  # noqa: PTH120  # as above
    "/.": lambda path: os.path.splitext(os.path.basename(path))[0],  # noqa: PTH119, PTH122
}

#: The templates of a whole row. With several columns they stand for several words.
_WHOLE: Final = ("", *_PATH_PARTS)

#: The value of a template that a row does not have.
_MISSING: Final = object()


class InputRow(Struct):
    """The input of one task."""

    #: Counts from 1, without blank lines.
    number: int
    #: `FILE:LINE`, for messages.
    place: str
    text: str
    #: The argument of a function: the text, or a decoded value.
    value: object
    #: The fields of a table row or JSON object. None for plain lines.
    fields: dict[str, object] | None = None
    #: The numbered columns. Then the value is the list of their values. None: not numbered.
    cells: Sequence[str] | None = None
    #: The cells of a table row, which have numbers beside the names of their columns.
    table_cells: Sequence[str] | None = None
    #: A block of input that becomes stdin.
    block: bytes | None = None
    #: Variables of this task.
    env: dict[str, str] | None = None

    def identity(self) -> str:
        """Return the text by which a task is recognised. Equal values give equal texts."""
        if self.block is not None:
            return f"block {blake2b(self.block, digest_size=16).hexdigest()}"
        if self.fields is not None:
            return msgspec.json.encode(self.fields, order="sorted").decode()
        return self.text if self.cells is None else "\0".join(self.cells)


class RowShape(NamedTuple):
    """The templates that the rows of an input have."""

    #: `lines`, `columns`, `fields`, `indexes` or `blocks`.
    kind: str
    #: The number of columns. None: it differs from row to row.
    columns: int | None = 0
    #: Whether a command must use the row.
    must_be_used: bool = True

    def has(self, key: str) -> bool:
        """Return whether a template may be used. Fields are checked row by row."""
        if key == "#" or self.kind == "fields":
            return True
        if self.kind in ("blocks", "indexes"):
            return not key and self.kind == "indexes"
        found = _COLUMN.fullmatch(key)
        if self.kind == "columns" and found:
            return self.columns is None or abs(int(found["number"])) <= self.columns
        return key in _WHOLE

    def hint(self) -> str:
        """Return the templates that there are."""
        if self.kind == "blocks":
            return "a block has no text, use {#}"
        if self.kind == "indexes":
            return "an index has no parts, use {} or {#}"
        if self.kind == "lines":
            return "lines have no columns without --colsep, use {} {#} {.} {/} {//} or {/.}"
        last = "" if self.columns == 1 else f" to {{{self.columns}}}" if self.columns else " {2} …"
        return f"columns are numbered, use {{}} {{#}} {{1}}{last} or parts such as {{.}} and {{1/}}"


class MapInput(NamedTuple):
    """The input of a map."""

    #: The command or the arguments of a call, with templates.
    words: tuple[str, ...]
    shape: RowShape
    #: Opens the input and yields the rows.
    rows: Callable[[], Iterator[InputRow]]
    #: Whether the rows come from stdin.
    is_stdin: bool = False
    #: The most tasks in flight. None: the default.
    tasks_max: int | None = None
    #: Whether the line or the values are appended to a command without templates.
    is_appended: bool = False


class Template:
    """A word of a command, parsed once."""

    def __init__(
        self, word: str, script: Script | None = None, numbers: Sequence[str] = ()
    ) -> None:
        """Parse a word. Raise `UserError` for a template that would become code of a script.

        The templates in `numbers` are numbers.
        """
        self._pieces: list[str | _Key] = []
        end, before = 0, ""
        for found in _PLACEHOLDER.finditer(word):
            piece = _piece(found)
            before += word[end : found.start()]
            if script and isinstance(piece, _Key) and piece.key not in numbers:
                piece = _script_piece(piece, script, before, word)
            self._pieces += [word[end : found.start()], piece]
            before += piece if isinstance(piece, str) else scripts.VALUE
            end = found.end()
        self._pieces = [piece for piece in (*self._pieces, word[end:]) if piece != ""]
        #: The names of its templates.
        self.keys = [piece.key for piece in self._pieces if isinstance(piece, _Key)]
        #: The key of a word that is a single template.
        self.single = self.keys[0] if len(self._pieces) == len(self.keys) == 1 else None

    def fill(self, row: InputRow) -> str:
        """Return the word with the values of a row."""
        return "".join(
            [piece if isinstance(piece, str) else piece.text(row) for piece in self._pieces]
        )

    def words(self, row: InputRow) -> list[str]:
        """Return the words for a row. `{}` alone is a word for each column."""
        if row.cells is None or self.single not in _WHOLE:
            return [self.fill(row)]
        part = _PATH_PARTS.get(self.single or "", str)
        return [part(cell) for cell in row.cells]

    def values(self, row: InputRow) -> list[object]:
        """Return the arguments of a call for a row, for a word that is a single template."""
        if row.cells is None or self.single not in _WHOLE:
            return [self._pieces[0].value(row)]  # type: ignore[union-attr]  # it is a `_Key`
        return [*row.value] if not self.single else [*self.words(row)]  # type: ignore[misc]  # a list


class _Key(NamedTuple):
    """A template: its name, and the text that it was written as."""

    key: str
    written: str
    #: Whether its value is quoted for a shell.
    is_quoted: bool = False

    def text(self, row: InputRow) -> str:
        if not self.is_quoted:
            return self._text(row)
        if row.cells is None or self.key not in _WHOLE:
            return scripts.quote(self._text(row))
        part = _PATH_PARTS.get(self.key, str)
        return " ".join([scripts.quote(part(cell)) for cell in row.cells])

    def _text(self, row: InputRow) -> str:
        if not self.key:
            return row.text
        if " " in self.key and self.key not in (row.fields or {}):  # awk's {print x}
            return self.written
        value = self.value(row)
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()

    def value(self, row: InputRow) -> object:
        if not self.key:
            return row.value
        value = _value_of(self.key, row)
        if value is _MISSING:
            raise UserError(f"{row.place}: unknown column {shown(self.key)} ({_columns_text(row)})")
        return value


def _piece(found: re.Match[str]) -> str | _Key:
    key = found["key"]
    if key is None:
        return f"{{{found['literal']}}}"
    return found[0] if ".." in key else _Key(key, found[0])  # a shell's {1..9}


def _script_piece(key: _Key, script: Script, before: str, word: str) -> str | _Key:
    """Return a template in a script, quoted. Raise `UserError` if it can't be quoted there."""
    if not script.is_shell:
        problem = f"a part of the script of {script.program}"
    elif word == key.written:
        problem = f"the whole script of {script.program}"
    elif reason := scripts.problem_after(before):
        problem = f"{reason} in the script of {script.program}, where it can't be quoted"
    else:
        return key._replace(is_quoted=True)
    if " " in key.key:  # of awk
        return key.written
    raise UserError(f"template {key.written}: {problem} ({script.hint})")


def _value_of(key: str, row: InputRow) -> object:
    """Return the value of a template other than `{}`."""
    if key == "#":
        return row.number
    if key in _PATH_PARTS:
        part = _PATH_PARTS[key]
        return part(row.text) if row.cells is None else " ".join([part(one) for one in row.cells])
    fields = row.fields or {}
    if key in fields:
        return fields[key]
    cells = row.table_cells if row.cells is None else row.cells
    if cells is not None and (found := _COLUMN.fullmatch(key)) and found["number"] not in fields:
        return _cell(int(found["number"]), found["part"], cells)
    if (found := _FIELD_PART.fullmatch(key)) and isinstance(fields.get(found["name"]), str):
        return _PATH_PARTS[found["part"]](str(fields[found["name"]]))
    return _MISSING


def _cell(number: int, part: str, cells: Sequence[str]) -> object:
    """Return a part of a numbered column."""
    if abs(number) > len(cells):
        return _MISSING
    return _PATH_PARTS.get(part, str)(cells[number - 1 if number > 0 else number])


def _columns_text(row: InputRow) -> str:
    if row.cells is not None:
        return f"it has {len(row.cells)} columns"
    return f"columns: {', '.join(map(shown, row.fields or {})) or 'none, lines have no columns'}"


class CommandOptions(NamedTuple):
    """Options that all tasks of a map share."""

    env: dict[str, str] | None
    cwd: str | None
    #: Whether the text of a row is the file that is fed to stdin.
    is_stdin_file: bool = False
    #: Files that the command needs, and files that it makes.
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    #: Exit statuses after which a command is not retried.
    final_exit_status: Sequence[int] = ()

    def place_function(self) -> Callable[[InputRow], tuple[dict[str, str] | None, str | None]]:
        """Return a function from a row to the variables and the directory of its task."""
        cwd = None if self.cwd is None else Template(self.cwd)
        env = {name: Template(value) for name, value in (self.env or {}).items()}

        def place_of(row: InputRow) -> tuple[dict[str, str] | None, str | None]:
            variables = {name: value.fill(row) for name, value in env.items()}
            variables |= row.env or {}
            return variables or None, None if cwd is None else cwd.fill(row)

        return place_of


def command_function(words: Sequence[str], shape: RowShape) -> Callable[[InputRow], list[str]]:
    """Return a function from a row to the words of a command.

    Raises `UserError` for a template that would become code of a script.
    """
    found = scripts.scripts_in(words)
    numbers = ("#", "") if shape.kind == "indexes" else ("#",)
    templates = [Template(word, found.get(place), numbers) for place, word in enumerate(words)]

    def argv_of(row: InputRow) -> list[str]:
        argv = [word for template in templates for word in template.words(row)]
        if not argv or not argv[0] or "\0" in "".join(argv):
            raise UserError(
                f"{row.place}: can't run {shown(argv)} (empty program or NUL character)"
            )
        return argv

    return argv_of


def command_encoder(
    argv_of: Callable[[InputRow], list[str]], options: CommandOptions
) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a command."""
    place_of = options.place_function()
    inputs, outputs = ([*map(Template, paths)] for paths in (options.inputs, options.outputs))

    def encode(row: InputRow) -> bytes:
        return encode_command(
            argv_of(row),
            *place_of(row),
            [path.fill(row) for path in inputs],
            [path.fill(row) for path in outputs],
            stdin=row.block,
            stdin_file=row.text if options.is_stdin_file else None,
            final_exit_status=options.final_exit_status,
        )

    return encode


def arguments_function(words: Sequence[str]) -> Callable[[InputRow], list[Any]]:
    """Return a function from a row to the arguments of a call.

    An argument that is a single template keeps the type of its value. Other arguments are JSON.
    """
    templates = [Template(word) for word in words or ["{}"]]
    constants = [
        None if template.single is not None else [_constant(word)]
        for word, template in zip(words or ["{}"], templates, strict=True)
    ]

    def arguments_of(row: InputRow) -> list[Any]:
        return [
            value
            for template, constant in zip(templates, constants, strict=True)
            for value in (constant or template.values(row))
        ]

    return arguments_of


def call_encoder(
    call: str, words: Sequence[str], options: CommandOptions
) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a call."""
    arguments_of, place_of = arguments_function(words), options.place_function()
    return lambda row: encode_call(call, arguments_of(row), None, *place_of(row))


def payload_encoder(payload: str) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a payload."""
    template = Template(payload)
    return lambda row: template.fill(row).encode(errors="surrogateescape")


def lane_function(
    template: str, campaign: str, service: str
) -> Callable[[str, InputRow, bytes], str]:
    """Return a function from a task's name, row and payload to its lane."""
    if not lanes.is_template(template):
        return lambda _name, _row, _payload: template

    own = ("", "name", "campaign", "service")
    keys = [key for key in lanes.template_keys(template) if key not in own]

    def lane_of(name: str, row: InputRow, payload: bytes) -> str:
        always = {"name": name, "campaign": campaign, "service": service}
        # A column wins over a word of the command with the same number.
        values = {key: _value_of(key, row) for key in keys}
        line = {key: value for key, value in values.items() if value is not _MISSING}
        work = {**lanes.payload_keys(payload), **(row.fields or {})}
        try:
            return lanes.expand(template, lanes.fields_of(work, always | line | {"": row.text}))
        except InvalidValue as bad:
            raise UserError(f"{row.place}: the lane {bad}") from None

    return lane_of


def template_keys(words: Sequence[str], shape: RowShape) -> list[str]:
    """Return the names of all templates in words. Only fields may have spaces in their names."""
    keys = [key for word in words for key in Template(word).keys]
    return [key for key in keys if shape.kind == "fields" or " " not in key]


def check_templates(words: Sequence[str], shape: RowShape, subject: str = "command") -> list[str]:
    """Return the names of the templates. Raise `UserError` if there is none, or an unknown one."""
    keys = template_keys(words, shape)
    if not keys and shape.must_be_used:
        raise UserError(
            f"{subject}: does not use the input (add {{}} for the line, {{#}} for its number or "
            "{column} for a field)"
        )
    unknown = [key for key in keys if not shape.has(key)]
    if unknown:
        raise UserError(
            f"unknown template {{{unknown[0]}}}: {shape.hint()} (write {{{{{unknown[0]}}}}} for "
            "literal braces)"
        )
    return keys


def _constant(word: str) -> object:
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        raise UserError(
            f"argument {shown(word)} of the call: neither valid JSON nor a single template"
        ) from None


#: Characters that would end a line or be invisible. A shell reads them as `$'\n'`.
_CONTROL: Final = re.compile(r"[\0-\x1f\x7f'\\]")


class MapWork:
    """The command, call or payload of a map, with its templates."""

    #: Encodes a row as a payload.
    encode: Callable[[InputRow], bytes]

    def __init__(self, source: MapInput, values: dict[str, Any]) -> None:
        words = source.words
        check_one_work(words, values)
        self._call, self._is_stdin_file = values["call"], values["stdin"]
        files = (values["inputs"], values["outputs"])
        statuses = [one for given in values["final_exit_status"] for one in given]
        options = CommandOptions(
            values["env"] or None, values["cwd"], values["stdin"], *files, statuses
        )
        if values["payload"] is not None:
            payload = read_payload_option(values["payload"]).decode(errors="surrogateescape")
            self._keys = check_templates([payload], source.shape, "payload")
            self.encode = payload_encoder(payload)
        elif self._call is not None:
            self._keys = check_templates(words or ["{}"], source.shape)
            self.encode = call_encoder(self._call, words, options)
            self._arguments_of = arguments_function(words)
        else:
            if source.is_appended and not template_keys(words, source.shape):
                words = (*words, "{}")
            _check_is_no_shell_line(words)
            self._keys = check_templates(words, source.shape)
            self._argv_of = command_function(words, source.shape)
            self.encode = command_encoder(self._argv_of, options)
        self._is_payload = values["payload"] is not None
        place = (*(values["env"] or {}).values(), values["cwd"] or "")
        texts = [*files[0], *files[1], *place, *values["after"]]
        self._keys += check_templates(texts, source.shape._replace(must_be_used=False))

    def uses_number(self) -> bool:
        """Return whether the number of a row is part of its work."""
        return "#" in self._keys

    def shell_line(self, row: InputRow) -> str:
        """Return the work of a row for people: a command as a shell reads it, in one line."""
        if self._is_payload:
            return escape_line(self.encode(row).decode(errors="backslashreplace"))
        if self._call is not None:
            arguments = [encode_value(one).decode() for one in self._arguments_of(row)]
            return quote_line([self._call, *arguments])
        line = quote_line(self._argv_of(row))
        return f"{line} < {quote_line([row.text])}" if self._is_stdin_file else line

    def json_fields(self, row: InputRow) -> dict[str, Any]:
        """Return the work of a row as fields of a document."""
        if self._is_payload:
            return text_or_base64("payload", self.encode(row))
        if self._call is not None:
            return {"call": self._call, "args": self._arguments_of(row)}
        fields: dict[str, Any] = {"argv": self._argv_of(row)}
        if self._is_stdin_file:
            fields["stdin_file"] = row.text
        if row.block is not None:
            fields["stdin_bytes"] = len(row.block)
        return fields


def _check_is_no_shell_line(words: Sequence[str]) -> None:
    """Raise `UserError` for a whole command line in one word, as GNU parallel takes it."""
    program, space, _ = words[0].partition(" ")
    if space and "/" not in program and all(word == "{}" for word in words[1:]):
        raise UserError(
            f"command {shown(words[0])}: one word, and no shell splits it (write the words without "
            f"quotes, or sh -c {shlex.quote(words[0])})"
        )


def quote_line(words: Sequence[str]) -> str:
    """Quote words for a shell, in one line."""
    return " ".join(_quote(word) for word in words)


def _quote(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    escaped = _CONTROL.sub(
        lambda found: f"\\{found[0]}" if found[0] in "'\\" else f"\\{ord(found[0]):03o}", word
    )
    return f"$'{escaped}'"


def print_commands(
    cli_context: CliContext, source: MapInput, work: MapWork, values: dict[str, Any]
) -> ExitCode:
    """Print the work of each row as it is read. Needs no broker."""
    task_pattern("", values)  # checks the options of tasks
    names = LineNames()
    lane_of = _lane_function(work, values)
    is_named = values["campaign"] is not None

    def planned() -> Iterator[tuple[InputRow, str, str]]:
        for row in source.rows():
            name = names.next_name(row.identity()) if is_named else f"map-{row.number}"
            yield row, name, lane_of(row, name)

    if cli_context.as_json:
        _print_json(values["campaign"], planned(), work)
        return ExitCode.OK
    for row, _, _ in planned():
        sys.stdout.write(work.shell_line(row) + "\n")
    return ExitCode.OK


def _print_json(
    campaign: str | None, planned: Iterable[tuple[InputRow, str, str]], work: MapWork
) -> None:
    """Print the document `MapDryRunDocument`, task by task."""
    start = {"document": "map", "campaign": campaign}
    click.echo(f'{encode_json(start).decode()[:-1]},"tasks":[', nl=False)
    number = 0
    for number, (row, name, lane) in enumerate(planned, start=1):
        task = MapPlannedTask(
            name=None if campaign is None else name, lane=lane, **work.json_fields(row)
        )
        click.echo((b",\n" if number > 1 else b"\n") + encode_json(task), nl=False)
    end = {"planned": number, "version": DOCUMENT_VERSION}
    click.echo(f"\n],{encode_json(end).decode()[1:]}")


def _lane_function(work: MapWork, values: dict[str, Any]) -> Callable[[InputRow, str], str]:
    """Return a function from a row and its name to the lane of --lane.

    The lane templates of services are in the broker's settings, and not read here.
    """
    if not values["lane"]:
        return lambda _row, _name: ""
    campaign = values["campaign"] or ""
    service = service_of(task_pattern(campaign, values))
    lane_of = lane_function(values["lane"], campaign, service)
    return lambda row, name: lane_of(name, row, work.encode(row))


def task_pattern(campaign: str, values: dict[str, Any]) -> TaskSpec:
    """Return a task with the options of all tasks of a map. Raises `InvalidTask`."""
    call, is_payload = values["call"], values["payload"] is not None
    work = {"call": call} if call else {"payload": ""} if is_payload else {"argv": ["true"]}
    return check_task({"name": campaign or "map", **task_keys(values), "lane": None, **work})


#: Resources with an option of their own.
_NAMED_RESOURCES: Final = ("cpus", "memory", "gpus")


def row_submitter(
    client: InternalClient,
    group: TaskGroup,
    values: dict[str, Any],
    ended: EndedRows | None,
    *,
    watch: bool,
) -> Callable[[InputRow, bytes], Future]:
    """Return a function that submits tasks which differ in name, payload, lane and predecessors.

    It retries tasks in `ended`.
    """
    campaign = group.campaign
    pattern = task_pattern(campaign, values)
    submission = encode_batch([pattern], campaign.encode(), time.time_ns())
    terms, unknown = submission.terms[0], values["wait_for_unknown"]
    service = service_of(pattern)
    lane = values["lane"] or client.lane_templates([service]).get(service, "")
    lane_of = lane_function(lane, campaign, service)
    templates = [Template(name) for name in pattern.after]
    name_of = _name_function(client, group, is_new=not values["campaign"])
    retries = ended if ended and not values["no_retry_failed"] else None

    def send(row: InputRow, payload: bytes) -> Future:
        name = name_of(row)
        lane, after = lane_of(name, row, payload), [one.fill(row) for one in templates]
        if retries and (full_name := spelling(campaign, name)) in retries:
            task = structs.replace(
                submission,
                names=[name.encode()],
                payloads=[payload],
                lanes=[lane.encode()],
                after=[[*map(encode_text, after)]] if after else None,
            )
            retries.retry(full_name, task, wait_for_unknown=unknown)
        return client.submit_encoded(
            name,
            payload,
            terms,
            lane=lane,
            after=after,
            wait_for_unknown=unknown,
            watch=watch,
        )

    return send


def _name_function(
    client: InternalClient, group: TaskGroup, *, is_new: bool
) -> Callable[[InputRow], str]:
    """Return a function that names the task of a row.

    Tasks are numbered without a campaign of the user, or if its first task is. In a campaign that
    the user names, a row is recognised by its text, so that the input may be edited.
    """
    if group.name:
        return lambda _row: split(group.name, group.campaign)
    first = group.match or f"{group.campaign}-"
    if is_new or _exists(client, f"{group.campaign}/{first}1"):
        return lambda row: f"{first}{row.number}"
    names = LineNames()
    return lambda row: names.next_name(row.identity())


def _exists(client: InternalClient, full_name: str) -> bool:
    try:
        client.show(full_name)
    except UnknownName:
        return False
    return True


def kept_options(client: InternalClient, campaign: str, values: dict[str, Any]) -> list[str]:
    """Return the options that differ from the tasks which an earlier map has submitted.

    The first task that is not done stands for all. A task keeps the terms of its submission.
    """
    from taskyard.client.requests import scope_of  # noqa: PLC0415  # not for `--help`

    scope = scope_of(campaign=campaign, states=[one for one in TaskState if one != TaskState.DONE])
    former = next(iter(client.tasks(scope)), None)
    if former is None:
        return []
    submission = encode_batch([task_pattern(campaign, values)], campaign.encode(), time.time_ns())
    terms, shown = submission.terms[0], client.show(spelling(campaign, former["name"]))
    delays, amounts = terms.retry_delays_ns, resources(terms.resources)
    given: dict[str, tuple[object, object]] = {
        "--priority": (terms.priority, shown["priority"]),
        "--slots": (terms.slots, shown["slots"]),
        "--time-limit": (terms.time_limit_ns / SECOND_NS or None, shown["time_limit"]),
    }
    if delays is not None:  # else by the settings
        given["--retries"] = [delay / SECOND_NS for delay in delays], shown["retry_delays"]
    for name in sorted({*amounts, *shown["resources"]}):
        option = f"--{name}" if name in _NAMED_RESOURCES else f"--resource {name}"
        given[option] = amounts.get(name), shown["resources"].get(name)
    return [option for option, (new, kept) in given.items() if new != kept]
