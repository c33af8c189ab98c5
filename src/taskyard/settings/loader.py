"""Load the settings: for each key the flag, else the variable, else the file, else the default.

All problems are collected and reported together. An unknown key in a file is an error. An unknown
variable is only a warning: it may belong to another version or another program, and an error would
stop every command, those of tasks included. Also makes the rules of the scheduler, and compares two
versions for the log of a broker.
"""

from __future__ import annotations

import os
import re
import shlex
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from msgspec import Struct

from taskyard.core.events import RulesSet
from taskyard.core.limits import HEARTBEATS_PER_LEASE_MIN, NUMBER_MAX, SECOND_NS
from taskyard.core.rules import LaneOptions, Rule
from taskyard.settings import files, keys
from taskyard.settings.files import CONFIG_VARIABLE, Document, InvalidSettings
from taskyard.settings.keys import DEFAULTS, DIALECTS, KEYS, LISTEN, SERVICE, AnyKey, Section
from taskyard.settings.values import InvalidValue, read_duration, read_name, span_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

S = TypeVar("S", bound=Section)

#: Not settings: variables of tasks and benchmarks, and the accepted owner of a state directory,
#: which a file in some directory must not decide.
OTHER_VARIABLES: Final = (
    *map(keys.variable_of, ("TASK", "CAMPAIGN", "ATTEMPT", "PRIORITY", "TASK_BROKER", "WORKER")),
    *map(keys.variable_of, ("CPUS", "MEMORY", "GPUS", "BENCH_PROFILE", "STATE_OWNER")),
)

#: Services whose tasks are programs and functions, which only native workers run.
NATIVE_SERVICES: Final = ("exec", "call", "pickle")

#: Workers are pinged three times in it, at most ten times a second.
_EXPIRE_NS_MIN: Final = 3 * SECOND_NS // 10

#: A table's name is a part of workers' names, where a colon ends it. `native` is the socket in the
#: state directory.
_LISTENER: Final = re.compile(r"(?!native$)[A-Za-z0-9][A-Za-z0-9_-]{0,39}")

#: Problems without a line are sorted last.
_NO_LINE: Final = 1 << 31

_SECTIONS: Final = (*dict.fromkeys(key.section for key in KEYS), DEFAULTS)


#: The keys of each section, and of each named section in the file: `("service", "smtp")`.
Groups = dict[tuple[str, str], list[AnyKey]]


class Source(IntEnum):
    """Where a value comes from. A higher source overrides a lower source."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3


class Origin(Struct, frozen=True):
    """Where one value came from, with its location."""

    source: Source
    #: `taskyard.toml:3`, `TASKYARD_STATE`, `--state`. Empty for a default.
    location: str = ""

    def __str__(self) -> str:
        return self.location or self.source.name.lower()


class Setting(NamedTuple):
    """The effective value of a key."""

    key: AnyKey
    value: Any
    origin: Origin

    def describe(self) -> str:
        """Format the value for a message: `15s (default)`."""
        return f"{self.key.text(self.value)} ({self.origin})"


class Settings(Struct, frozen=True):
    """All settings."""

    broker: keys.BrokerSection
    #: Endpoints by dialect or table, where set.
    listen: dict[str, tuple[str, ...]]
    #: The tables of listeners, by name.
    listeners: dict[str, keys.ListenSection]
    lease: keys.LeaseSection
    blobs: keys.BlobsSection
    log: keys.LogSection
    worker: keys.WorkerSection
    defaults: keys.ServiceSection
    services: dict[str, keys.ServiceSection]
    #: Every setting by path, with its origin: the whole table, and the set keys of services.
    all: dict[str, Setting]
    #: The file that was read.
    file: Path | None
    #: Warnings about variables that look like settings.
    unknown_variables: tuple[str, ...]

    def value(self, path: str) -> Any:  # noqa: ANN401  # any value
        return self.all[path].value

    def source(self, path: str) -> Source:
        return self.all[path].origin.source


def load(
    config: Path | None = None,
    flags: Mapping[str, tuple[str, object]] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Load the settings. Raises `InvalidSettings`.

    `flags` maps paths to options and their values: `{"broker.state": ("--state", "there")}`.
    """
    reading = _Loader(files.read(files.find(config, environment)), environment, flags or {})
    settings = reading.settings()
    if reading.problems:
        more = len(reading.problems) - 1
        rest = f" (and {more} more, see `taskyard config --check`)" if more else ""
        raise InvalidSettings(reading.problems[0] + rest)
    return settings


def defaults() -> Settings:
    """Return the settings without a file, variables and flags."""
    return _Loader(Document(None, {}, {}), {}, {}).settings()


def problems(
    config: Path | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[list[str], Settings | None]:
    """Return all problems, in the order of the file, and the settings without them.

    The settings allow further checks. They are None if the file can't be read.
    """
    try:
        reading = _Loader(files.read(files.find(config, environment)), environment, {})
    except InvalidSettings as bad:
        return [str(bad)], None
    settings = reading.settings()
    return reading.problems, settings


class _Loader:
    """A pass over the file, the environment and the flags."""

    def __init__(
        self,
        document: Document,
        environment: Mapping[str, str],
        flags: Mapping[str, tuple[str, object]],
    ) -> None:
        self._document = document
        self._environment = environment
        self._flags = flags
        #: Problems with their lines in the file.
        self._problems: list[tuple[int, str]] = []
        #: Settings with an invalid value somewhere, whose loaded value was not intended.
        self._invalid_paths: set[str] = set()
        #: The effective values by path.
        self._found: dict[str, Setting] = {}

    @property
    def problems(self) -> list[str]:
        """The problems in the order of the file, then problems of variables and flags."""
        found = sorted(dict.fromkeys(self._problems), key=lambda one: one[0] or _NO_LINE)
        return [describe for _, describe in found]

    def settings(self) -> Settings:
        """Build the settings from all valid values."""
        groups = self._groups()
        self._check_names(groups)
        rows = [key for some in groups.values() for key in some]
        self._found = {key.path: self._setting(key) for key in rows}
        tables = {name: self._listener(name) for kind, name in groups if kind == LISTEN and name}
        services = [name for kind, name in groups if kind == SERVICE and name]
        self._check_lease()
        sections = {
            name: self._section(keys.ServiceSection, f"{SERVICE}.{name}") for name in services
        }
        self._check_matches(sections)
        listen = {key.name: self._found[key.path].value for key in groups[LISTEN, ""]}
        listen |= {name: section.endpoint for name, section in tables.items()}
        return Settings(
            broker=self._section(keys.BrokerSection, "broker"),
            listen={name: value for name, value in listen.items() if value is not None},
            listeners=tables,
            lease=self._section(keys.LeaseSection, "lease"),
            blobs=self._section(keys.BlobsSection, "blobs"),
            log=self._section(keys.LogSection, "log"),
            worker=self._section(keys.WorkerSection, "worker"),
            defaults=self._section(keys.ServiceSection, DEFAULTS),
            services=sections,
            all={path: one for path, one in self._found.items() if _is_listed(one)},
            file=self._document.file,
            unknown_variables=self._unknown_variables(rows),
        )

    def _section(self, kind: type[S], name: str, **more: object) -> S:
        """Return the values of a section that were given, or found."""
        found = [one for one in self._found.values() if one.key.section == name]
        given = {one.key.field: one.value for one in found if _is_given(one)}
        return kind(**given | more)

    # Sections and names in the file.

    def _groups(self) -> Groups:
        """Return the keys of each section, and of each named section in the file."""
        groups: Groups = {}
        for section in (*_SECTIONS, SERVICE):
            groups[section, ""] = [key for key in KEYS if key.section == section]
            table = self._raw(section)
            for name, inner in table.items() if isinstance(table, dict) else ():
                if section == SERVICE and self._is_service(name):
                    groups[SERVICE, name] = keys.service_keys(f"{SERVICE}.{name}")
                is_listener = section == LISTEN and isinstance(inner, dict)
                if is_listener and (dialect := self._dialect(name)):
                    groups[LISTEN, name] = keys.listener_keys(name, dialect)
                    groups[section, ""] = [key for key in groups[section, ""] if key.name != name]
        groups[DEFAULTS, ""] = keys.service_keys(DEFAULTS)
        return groups

    def _is_service(self, name: str) -> bool:
        try:
            return bool(read_name(name))
        except InvalidValue as bad:
            self._add_problem(f"a service's name {bad}", SERVICE, name)
            return False

    def _dialect(self, name: str) -> str:
        """Return the dialect of a listener's table. Empty if it has none."""
        if not _LISTENER.fullmatch(name):
            limits = "1 to 40 letters, digits, - and _, and not be native"
            reason = f"a listener's name must have {limits}, but is {name!r}"
            self._add_problem(reason, LISTEN, name)
            return ""
        key = keys.ListenSection.dialect.of(f"{LISTEN}.{name}")
        dialect: str = self._setting(key).value or (name if name in DIALECTS else "")
        if name in DIALECTS and dialect != name:
            reason = f"{key.path} must be {name} (give the table another name)"
            self._add_problem(reason, LISTEN, name, "dialect")
            return ""
        if not dialect and key.path not in self._invalid_paths:
            close = _closest(name, DIALECTS)
            meant = f"did you mean [{LISTEN}.{close}]?" if close else ", ".join(DIALECTS)
            self._add_problem(f"[{LISTEN}.{name}] needs a dialect ({meant})", LISTEN, name)
        return dialect

    def _check_names(self, groups: Groups) -> None:
        """Report unknown sections and keys."""
        for section, table in self._document.content.items():
            if (section, "") not in groups:
                self._add_problem(_unknown_section(section, table), section)
        for (section, name), rows in groups.items():
            path = (section, name) if name else (section,)
            shown, table = ".".join(path), self._raw(*path)
            if table is not None and not isinstance(table, dict):
                self._add_problem(f"{shown} must be a section: [{shown}]", *path)
            elif table is not None and path != (SERVICE,):
                known = [key.name for key in rows]
                for key in table:
                    if key not in known and (path != (LISTEN,) or type(table[key]) is not dict):
                        self._add_problem(_unknown_key(shown, key, known), *path, key)

    def _raw(self, *path: str) -> Any:  # noqa: ANN401  # any value
        """Return what the file has at a path. None: nothing."""
        found: object = self._document.content
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _unknown_variables(self, rows: Sequence[AnyKey]) -> tuple[str, ...]:
        known = [*(key.environment for key in rows), CONFIG_VARIABLE, *OTHER_VARIABLES]
        found = []
        for name in self._environment:
            if name.startswith(keys.PREFIX) and name not in known:
                close = _closest(name, known, 0.8)
                hint = f"did you mean {close}?" if close else "ignored"
                found.append(f"unknown variable {name} ({hint})")
        return tuple(found)

    # Values.

    def _setting(self, key: AnyKey) -> Setting:
        """Return the effective value of a key. Overridden values are checked, too."""
        setting = Setting(key, key.default, Origin(Source.DEFAULT))
        if key.path == "broker.state":
            state = files.find_state()  # perhaps of a parent directory
            location = "parent directory" if state.is_absolute() else ""
            setting = Setting(key, state, Origin(Source.DEFAULT, location))
        for origin, raw in self._given(key):
            try:
                value = key.kind.read(raw)
            except InvalidValue as bad:
                self._blame(Setting(key, None, origin), f"{key.path} {bad}")
                self._invalid_paths.add(key.path)
                continue
            if origin.source is Source.FILE and self._document.file is not None:
                value = key.kind.rebased(value, self._document.file.parent)
            setting = Setting(key, value, origin)
        return setting

    def _given(self, key: AnyKey) -> Iterator[tuple[Origin, object]]:
        """Yield all values given for a key, the weakest first."""
        path = _path_of(key)
        raw = self._raw(*path)
        if raw is not None and not (key.section == LISTEN and isinstance(raw, dict)):
            yield Origin(Source.FILE, self._document.location(*path)), raw
        if text := self._environment.get(key.environment):
            yield Origin(Source.ENVIRONMENT, key.environment), key.kind.from_text(text)
        if key.path in self._flags:
            flag, raw = self._flags[key.path]
            yield Origin(Source.FLAG, flag), raw

    # Values that belong together.

    def _listener(self, name: str) -> keys.ListenSection:
        """Return a listener's section. Report what is wrong with its values together."""
        path = f"{LISTEN}.{name}"
        dialect = self._found[f"{path}.dialect"].value or name
        section = self._section(keys.ListenSection, path, dialect=dialect)
        wrong = {}
        if section.identity and len(section.endpoint or ()) > 1:
            wrong["identity"] = f"belong to one endpoint, not {len(section.endpoint or ())}"
        if dialect == keys.WMP and section.service in NATIVE_SERVICES:
            wrong["service"] = f"be another one (only native workers run {section.service} tasks)"
        default = keys.LISTENER_UNSET["expire"].get(dialect, "0s")
        expire_ns = section.expire_ns or read_duration(default)
        if section.timeout_ns and section.timeout_ns < expire_ns:
            wrong["timeout"] = f"be at least {path}.expire, {span_text(expire_ns)}"
        for key, value_ns in (("expire", section.expire_ns), ("timeout", section.timeout_ns)):
            if value_ns and value_ns < _EXPIRE_NS_MIN:
                wrong[key] = "be at least 300ms"
        for key, reason in wrong.items():
            self._blame(self._found[f"{path}.{key}"], f"{path}.{key} must {reason}")
        return section

    def _check_lease(self) -> None:
        heartbeat, expire = self._found["lease.heartbeat"], self._found["lease.expire"]
        if self._invalid_paths & {heartbeat.key.path, expire.key.path}:
            return
        if expire.value < HEARTBEATS_PER_LEASE_MIN * heartbeat.value:
            latest = max(heartbeat, expire, key=lambda one: one.origin.source)
            reason = (
                f"lease.expire, {expire.describe()}, must be at least three times lease.heartbeat, "
                f"{heartbeat.describe()}, or one lost message expires a worker"
            )
            self._blame(latest, reason)

    def _check_matches(self, sections: dict[str, keys.ServiceSection]) -> None:
        """Report sections that are never used, because an earlier section has the same pattern."""
        firsts: dict[str, str] = {}
        for name, section in sections.items():
            match = section.match_for(name)
            first = firsts.setdefault(match, name)
            if first != name:
                what = f"[service.{name}] matches {match}, as does [service.{first}] before it"
                self._add_problem(f"{what}, which is used (remove one)", SERVICE, name)

    def _blame(self, setting: Setting, reason: str) -> None:
        """Add a problem about a value, where it was set."""
        in_file = setting.origin.source is Source.FILE
        line = self._document.line(*_path_of(setting.key)) if in_file else _NO_LINE
        self._problems.append((line, f"{setting.origin.location}: {reason}"))

    def _add_problem(self, reason: str, *path: str) -> None:
        """Add a problem about a section or key of the file."""
        self._problems.append(
            (self._document.line(*path), f"{self._document.location(*path)}: {reason}")
        )


def _path_of(key: AnyKey) -> tuple[str, ...]:
    """Return the names that lead to a key in a file. A service's name may contain dots."""
    return (*key.section.split(".", 1), key.name)


def _is_given(setting: Setting) -> bool:
    return setting.origin.source is not Source.DEFAULT or setting.value is not setting.key.default


def _is_listed(setting: Setting) -> bool:
    """Return whether a setting is shown: the whole table, and the given keys of other sections."""
    key = setting.key
    is_endpoint = key.section.startswith(f"{LISTEN}.") and key.name == "endpoint"
    return key in KEYS or is_endpoint or _is_given(setting)


# Texts about unknown names.


def _unknown_section(section: str, content: object) -> str:
    homes = [key.section for key in KEYS if key.name == section]
    if not isinstance(content, dict) and homes:
        return f"{section} belongs in a section: [{homes[0]}]"
    what = f"section [{section}]" if isinstance(content, dict) else f"setting {section}"
    shown = {one: f"[{one}]" for one in _SECTIONS} | {SERVICE: f"[{SERVICE}.NAME]"}
    if close := _closest(section, [*shown]):
        return f"unknown {what} (did you mean {shown[close]}?)"
    return f"unknown {what} (sections: {', '.join(shown.values())})"


def _unknown_key(section: str, name: str, known: Sequence[str]) -> str:
    homes = [key.path for key in KEYS if key.name == name and key.section != section]
    close = _closest(name, known) or (homes[0] if homes else "")
    hint = f"did you mean {close}?" if close else f"settings of [{section}]: {', '.join(known)}"
    return f"unknown setting {section}.{name} ({hint})"


def _closest(name: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return the most similar name, if any is similar enough."""
    import difflib  # noqa: PLC0415  # only for errors

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


# The scheduler's rules.


def to_rules_set(settings: Settings) -> RulesSet:
    """Return all rules, one for each service in order, as an event for the scheduler."""
    common = vars(settings.defaults)
    rules = tuple(
        Rule(
            name.encode(),
            section.match_for(name).encode(),
            _lane_options(keys.ServiceSection(**common | vars(section))),
        )
        for name, section in settings.services.items()
    )
    return RulesSet(
        now_ns=0,
        rules=rules,
        defaults=_lane_options(settings.defaults),
        workers_max=settings.broker.workers_max,
    )


def _lane_options(section: keys.ServiceSection) -> LaneOptions:
    return LaneOptions(
        workers_max=section.workers_max,
        lane_workers_max=section.lane_workers_max,
        overfeed=section.overfeed,
        rate_interval_ns=section.rate.interval_ns if section.rate else 0,
        lane_rate_interval_ns=section.lane_rate.interval_ns if section.lane_rate else 0,
        weight=section.weight,
        retry_delays_ns=tuple(
            min(round(multiple * section.interval_ns), NUMBER_MAX) for multiple in section.retries
        ),
        jitter_percent=section.jitter,
        interval_ns=section.interval_ns,
        expiry_ns=section.expiry_ns,
        expiry_hard_ns=section.expiry_hard_ns,
        report_after_ns=section.report_after_ns,
        is_random=section.order == "random",
        is_held=section.hold,
        debounce_ns=section.debounce_ns,
        # A line, which the agent host splits again.
        command=shlex.join(section.command).encode(errors="surrogateescape"),
        idle_ns_max=section.idle_max_ns,
        hunger_ns_max=section.hunger_max_ns,
        lines=section.lines.encode(),
        lane_template=section.lane.encode(),
    )


# The differences that a broker logs.

#: Keys of the table that a broker applies without a restart.
_APPLIED_LIVE: Final = ("broker.workers_max", "blobs.quota", "blobs.keep", "blobs.grace")

#: Keys for clients and the page, which a broker ignores.
_OF_CLIENTS: Final = ("broker.url", "broker.key", "broker.invite", "broker.page")


class Changes(Struct, frozen=True):
    """The changes between two versions of the settings."""

    #: A short text each: `service.smtp.workers_max 20 → 5`.
    applied: tuple[str, ...]
    #: Keys that need a restart.
    needs_restart: tuple[str, ...]

    def sentence(self) -> str:
        """Return the changes as a log line."""
        labels = {"applied": self.applied, "restart needed for": self.needs_restart}
        texts = [f"{label} {', '.join(some)}" for label, some in labels.items() if some]
        return "; ".join(texts) or "no changes"


def diff(before: Settings, after: Settings) -> Changes:
    """Compare two versions of the settings."""
    was, now = before.services, after.services
    applied = [f"[{SERVICE}.{name}] added" for name in now if name not in was]
    applied += [f"[{SERVICE}.{name}] removed" for name in was if name not in now]
    if [name for name in was if name in now] != [name for name in now if name in was]:
        applied.append("order of the services")
    needs_restart = []
    for path in dict.fromkeys((*before.all, *after.all)):
        old, new = before.all.get(path), after.all.get(path)
        if path in _OF_CLIENTS or (old and old.value) == (new and new.value):
            continue
        section, _, name = path.rpartition(".")
        service = section.removeprefix(f"{SERVICE}.")
        if path not in _APPLIED_LIVE and section != DEFAULTS and service == section:
            needs_restart.append(path)
        elif service == section or (service in was and service in now):
            found = [
                one.all.get(path, one.all.get(f"{DEFAULTS}.{name}")) for one in (before, after)
            ]
            key = next(one.key for one in (old, new) if one)
            texts = [key.text(one.value if one else key.default) for one in found]
            applied.append(f"{path} {' → '.join(texts)}")
    return Changes(tuple(applied), tuple(needs_restart))
