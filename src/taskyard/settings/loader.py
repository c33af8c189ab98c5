"""Load the settings: for each key the flag, else the variable, else the file, else the default.

All problems are collected and reported together. An unknown key in a file is an error. An unknown
variable is only a warning: it may belong to another version or another program, and an error would
stop every command, those of tasks included.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from taskyard.core.limits import HEARTBEATS_PER_LEASE_MIN, NUMBER_MAX
from taskyard.settings import files, listeners
from taskyard.settings.files import Document, InvalidSettings
from taskyard.settings.keys import (
    CONFIG_VARIABLE,
    DEFAULTS,
    DIALECTS,
    KEYS,
    LISTEN,
    OTHER_VARIABLES,
    PREFIX,
    SECTIONS,
    SERVICE,
    STATE,
    Key,
    service_keys,
)
from taskyard.settings.sections import (
    BlobsSection,
    BrokerSection,
    LeaseSection,
    ListenSection,
    LogSection,
    Origin,
    ServiceSection,
    Setting,
    Settings,
    Source,
    WorkerSection,
)
from taskyard.settings.values import InvalidValue, read_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

#: The tables of listeners are shown after it.
_LAST_OF_LISTEN: Final = f"{LISTEN}.{DIALECTS[-1]}"

#: Problems without a line are sorted last.
_NO_LINE: Final = 1 << 31


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
    if not reading.problems:
        return settings
    first, *more = reading.problems
    rest = f" (and {len(more)} more, see `taskyard config --check`)" if more else ""
    raise InvalidSettings(first + rest)


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
        document = files.read(files.find(config, environment))
    except InvalidSettings as bad:
        return [str(bad)], None
    reading = _Loader(document, environment, {})
    settings = reading.settings()
    return reading.problems, settings


class _Loader:
    """One pass over the file, the environment and the flags."""

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

    @property
    def problems(self) -> list[str]:
        """The problems in the order of the file, then those of variables and flags."""
        found = sorted(dict.fromkeys(self._problems), key=lambda one: one[0] or _NO_LINE)
        return [describe for _, describe in found]

    def settings(self) -> Settings:
        """Build the settings from all valid values."""
        services, tables = self._services(), self._listeners()
        of_services = [key for name in services for key in service_keys(f"{SERVICE}.{name}")]
        keys = (*_keys_with(tables), *service_keys(DEFAULTS), *of_services)
        self._check_unknown(tables)
        found = {key.path: self._setting(key) for key in keys}
        self._check_listeners(found, tables)
        self._check_lease(found)
        self._check_retries(found, services)
        self._check_matches(found, services)
        unknown = self._unknown_variables(keys)
        return _build_settings(self._document.file, found, services, tables, unknown)

    # Unknown sections and keys.

    def _services(self) -> list[str]:
        """Return the services with a section in the file."""
        section = self._document.content.get(SERVICE, {})
        if not isinstance(section, dict):
            self._add_file_problem(
                (SERVICE,), "service must have a section for each service: [service.NAME]"
            )
            return []
        names = []
        for name, table in section.items():
            try:
                read_name(name)
            except InvalidValue as bad:
                self._add_file_problem((SERVICE, name), f"a service's name {bad}")
                continue
            if isinstance(table, dict):
                names.append(name)
            else:
                self._add_file_problem(
                    (SERVICE, name), f"service.{name} must be a section: [service.{name}]"
                )
        return names

    def _listeners(self) -> dict[str, str]:
        """Return the dialect of each valid table of a listener in the file."""
        section = self._document.content.get(LISTEN, {})
        tables: dict[str, str] = {}
        for name, table in section.items() if isinstance(section, dict) else ():
            if not isinstance(table, dict):
                continue
            if not listeners.is_name(name):
                self._add_file_problem((LISTEN, name), f"{listeners.NAME_TEXT}, but is {name!r}")
                continue
            key = listeners.dialect_key(name)
            dialect = self._setting(key).value or (name if name in DIALECTS else None)
            if name in DIALECTS and dialect != name:
                reason = f"{key.path} must be {name} (give the table another name)"
                self._add_file_problem((LISTEN, name, "dialect"), reason)
            elif dialect is not None:
                tables[name] = dialect
            elif key.path not in self._invalid_paths:
                self._add_file_problem((LISTEN, name), _no_dialect(name))
        return tables

    def _check_listeners(self, found: dict[str, Setting], tables: dict[str, str]) -> None:
        """Check the values of each table together."""
        for name, dialect in tables.items():
            section = _listen_section(found, name, dialect)
            for key, reason in listeners.problems(name, section):
                setting = found[f"{listeners.section_of(name)}.{key}"]
                self._add_problem(setting.origin, setting.key, reason)

    def _check_unknown(self, tables: dict[str, str]) -> None:
        for section, table in self._document.content.items():
            if section == LISTEN and isinstance(table, dict):
                self._check_listen_section(table, tables)
            elif section == SERVICE:
                for name, inner in table.items() if isinstance(table, dict) else ():
                    if isinstance(inner, dict):
                        self._check_section(
                            (SERVICE, name), inner, service_keys(f"{SERVICE}.{name}")
                        )
            elif section not in (*SECTIONS, DEFAULTS):
                self._add_file_problem((section,), _unknown_section(section, table))
            elif not isinstance(table, dict):
                self._add_file_problem((section,), f"{section} must be a section: [{section}]")
            else:
                self._check_section((section,), table, _keys_of(section))

    def _check_listen_section(self, section: dict[str, Any], tables: dict[str, str]) -> None:
        """Check the names of `[listen]` and its tables. Reasons come before suggestions."""
        endpoints = {name: one for name, one in section.items() if not isinstance(one, dict)}
        self._check_section((LISTEN,), endpoints, _keys_of(LISTEN))
        for name, dialect in tables.items():
            table, path = dict(section[name]), (LISTEN, name)
            for key in [*table]:
                reason = listeners.missing_reason(dialect, key)
                if reason is not None:
                    del table[key]
                    self._add_file_problem((*path, key), f"{'.'.join(path)}.{key}: {reason}")
            self._check_section(path, table, listeners.listener_keys(name, dialect))

    def _check_section(
        self, path: tuple[str, ...], table: dict[str, Any], keys: Sequence[Key]
    ) -> None:
        known = [key.name for key in keys]
        for name in table:
            if name not in known:
                self._add_file_problem((*path, name), _unknown_key(".".join(path), name, known))

    def _unknown_variables(self, keys: Sequence[Key]) -> tuple[str, ...]:
        known = [*(key.environment for key in keys), CONFIG_VARIABLE, *OTHER_VARIABLES]
        ours = [name for name in self._environment if name.startswith(PREFIX)]
        return tuple(
            f"unknown variable {name} ({_did_you_mean(name, known) or 'ignored'})"
            for name in ours
            if name not in known
        )

    # Values.

    def _setting(self, key: Key) -> Setting:
        """Return the effective value of a key. Overridden values are checked, too."""
        setting = _default_of(key)
        for origin, raw in self._given(key):
            try:
                value = key.kind.read(raw)
            except InvalidValue as bad:
                self._add_problem(origin, key, f"{key.path} {bad}")
                self._invalid_paths.add(key.path)
                continue
            if origin.source is Source.FILE and self._document.file is not None:
                value = key.kind.rebased(value, self._document.file.parent)
            setting = Setting(key, value, origin)
        return setting

    def _given(self, key: Key) -> list[tuple[Origin, object]]:
        """Return all values given for a key, the weakest first."""
        given: list[tuple[Origin, object]] = []
        path = _path_of(key)
        table: object = self._document.content
        for name in path:
            table = table.get(name) if isinstance(table, dict) else None
        is_listener = key.section == LISTEN and isinstance(table, dict)
        if table is not None and not is_listener:
            given.append((Origin(Source.FILE, self._document.place(*path)), table))
        if text := self._environment.get(key.environment):
            origin = Origin(Source.ENVIRONMENT, key.environment)
            given.append((origin, key.kind.from_text(text)))
        if key.path in self._flags:
            flag, raw = self._flags[key.path]
            given.append((Origin(Source.FLAG, flag), raw))
        return given

    def _check_lease(self, found: dict[str, Setting]) -> None:
        heartbeat, expire = found["lease.heartbeat"], found["lease.expire"]
        if self._is_invalid(heartbeat, expire):
            return
        if expire.value < HEARTBEATS_PER_LEASE_MIN * heartbeat.value:
            latest = max(heartbeat, expire, key=lambda one: one.origin.source)
            self._add_problem(
                latest.origin,
                latest.key,
                f"lease.expire, {expire.describe()}, must be at least three times lease.heartbeat, "
                f"{heartbeat.describe()}, or one lost message expires a worker",
            )

    def _check_retries(self, found: dict[str, Setting], services: Sequence[str]) -> None:
        """Check retries times interval, which may come from different sections."""
        for section in (DEFAULTS, *(f"{SERVICE}.{name}" for name in services)):
            retries, interval = (
                _of_service(found, section, name) for name in ("retries", "interval")
            )
            is_own = section in (retries.key.section, interval.key.section)
            if not is_own or self._is_invalid(retries, interval):
                continue
            together = ServiceSection(retries=retries.value, interval_ns=interval.value)
            if together.longest_wait_ns > NUMBER_MAX:
                latest = max(retries, interval, key=lambda one: one.origin.source)
                what = f"{retries.key.path} times {interval.key.path}"
                self._add_problem(latest.origin, latest.key, f"{what} must be less than 292 years")

    def _check_matches(self, found: dict[str, Setting], services: Sequence[str]) -> None:
        """Report sections that are never used, because an earlier one has the same pattern."""
        firsts: dict[str, str] = {}
        for name in services:
            setting = found[f"{SERVICE}.{name}.match"]
            if self._is_invalid(setting):
                continue
            match = ServiceSection(match=setting.value).match_for(name)
            first = firsts.setdefault(match, name)
            if first != name:
                what = f"[service.{name}] matches {match}, as does [service.{first}] before it"
                self._add_file_problem((SERVICE, name), f"{what}, which is used (remove one)")

    def _is_invalid(self, *settings: Setting) -> bool:
        return any(one.key.path in self._invalid_paths for one in settings)

    def _add_problem(self, origin: Origin, key: Key, reason: str) -> None:
        in_file = origin.source is Source.FILE
        line = self._document.line(*_path_of(key)) if in_file else _NO_LINE
        self._problems.append((line, f"{origin.place}: {reason}"))

    def _add_file_problem(self, path: tuple[str, ...], reason: str) -> None:
        """Add a problem about a section or key of the file."""
        describe = f"{self._document.place(*path)}: {reason}"
        self._problems.append((self._document.line(*path), describe))


def _default_of(key: Key) -> Setting:
    """Return the default of a key. The state directory may be that of a parent directory."""
    if key.path != STATE:
        return Setting(key, key.default, Origin(Source.DEFAULT))
    state = files.find_state()
    return Setting(
        key, state, Origin(Source.DEFAULT, "parent directory" if state.is_absolute() else "")
    )


def _path_of(key: Key) -> tuple[str, ...]:
    """Return the names that lead to a key in a file. A service's name may contain dots."""
    return (*key.section.split(".", 1), key.name)


def _keys_with(tables: dict[str, str]) -> list[Key]:
    """Return the keys of the table, and those of listeners. A table replaces its dialect's key."""
    keys = []
    for key in KEYS:
        if key.section != LISTEN or key.name not in tables:
            keys.append(key)
        if key.path == _LAST_OF_LISTEN:
            keys += [
                one
                for name, dialect in tables.items()
                for one in listeners.listener_keys(name, dialect)
            ]
    return keys


def _listen_section(found: dict[str, Setting], name: str, dialect: str) -> ListenSection:
    section = listeners.section_of(name)
    values = {one.key.field: one.value for one in found.values() if one.key.section == section}
    return ListenSection(**values | {"dialect": dialect})


def _keys_of(section: str) -> Sequence[Key]:
    if section == DEFAULTS:
        return service_keys(DEFAULTS)
    return [key for key in KEYS if key.section == section]


def _of_service(found: dict[str, Setting], section: str, name: str) -> Setting:
    """Return the effective setting of a service: its own, or that of `[defaults]`."""
    own, common = found[f"{section}.{name}"], found[f"{DEFAULTS}.{name}"]
    return common if own.value is None and common.value is not None else own


def _build_settings(
    file: Path | None,
    found: dict[str, Setting],
    services: Sequence[str],
    tables: dict[str, str],
    unknown_variables: tuple[str, ...],
) -> Settings:
    def fields(section: str) -> dict[str, Any]:
        of_section = (one for one in found.values() if one.key.section == section)
        return {one.key.field: one.value for one in of_section}

    sections = {name: _listen_section(found, name, tables[name]) for name in tables}
    listen = {one.key.name: one.value for one in found.values() if one.key.section == LISTEN}
    listen |= {name: section.endpoint for name, section in sections.items()}
    is_listed = [key.path for key in KEYS]
    is_listed += [f"{listeners.section_of(name)}.endpoint" for name in tables]
    return Settings(
        broker=BrokerSection(**fields("broker")),
        listen={name: value for name, value in listen.items() if value is not None},
        listeners=sections,
        lease=LeaseSection(**fields("lease")),
        blobs=BlobsSection(**fields("blobs")),
        log=LogSection(**fields("log")),
        worker=WorkerSection(**fields("worker")),
        defaults=ServiceSection(**fields(DEFAULTS)),
        services={name: ServiceSection(**fields(f"{SERVICE}.{name}")) for name in services},
        all={
            path: one
            for path, one in found.items()
            if path in is_listed or one.origin.source is not Source.DEFAULT
        },
        file=file,
        unknown_variables=unknown_variables,
    )


# Texts about unknown names.


def _unknown_section(section: str, content: object) -> str:
    homes = [key.section for key in KEYS if key.name == section]
    if not isinstance(content, dict) and homes:
        return f"{section} belongs in a section: [{homes[0]}]"
    known = [f"[{one}]" for one in (*SECTIONS, DEFAULTS)] + [f"[{SERVICE}.NAME]"]
    what = f"section [{section}]" if isinstance(content, dict) else f"setting {section}"
    close = _closest(section, [*SECTIONS, DEFAULTS, SERVICE])
    if close:
        meant = f"[{close[0]}.NAME]" if close[0] == SERVICE else f"[{close[0]}]"
        return f"unknown {what} (did you mean {meant}?)"
    return f"unknown {what} (sections: {', '.join(known)})"


def _no_dialect(name: str) -> str:
    close = _closest(name, DIALECTS)
    meant = f"did you mean [{LISTEN}.{close[0]}]?" if close else f"one of {', '.join(DIALECTS)}"
    return f"[{LISTEN}.{name}] needs a dialect ({meant})"


def _unknown_key(section: str, name: str, known: Sequence[str]) -> str:
    wrong = f"unknown setting {section}.{name}"
    homes = [key.section for key in KEYS if key.name == name and key.section != section]
    close = _closest(name, known)
    if close:
        return f"{wrong} (did you mean {close[0]}?)"
    if homes:
        return f"{wrong} (did you mean {homes[0]}.{name}?)"
    return f"{wrong} (settings of [{section}]: {', '.join(known)})"


def _closest(name: str, known: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """Return the most similar name, if any is similar enough."""
    import difflib  # noqa: PLC0415  # only for errors

    return difflib.get_close_matches(name, known, n=1, cutoff=cutoff)


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = _closest(name, known, 0.8)
    return f"did you mean {close[0]}?" if close else ""
