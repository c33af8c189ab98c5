"""Requests that change something: submit, cancel, retry, expire, move, edit, pause and drain.

Each function returns an exchange. `Client` and `AsyncClient` have them as methods, with these
docstrings. Also here: the lookups that a submission needs, of lanes and of dependencies.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from taskyard.campaign.batches import encode_text
from taskyard.campaign.lanes import template_of
from taskyard.client.exchanges import Deadline, Query, checked_reply
from taskyard.client.requests import (
    check_names,
    existing,
    full_name,
    portions,
    scope_of,
    status,
)
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS, SERVICES_MAX
from taskyard.core.model import Refusal, TermsChanges
from taskyard.errors import Refused
from taskyard.wire.native import peer
from taskyard.wire.native.peer import encode_failover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.client.exchanges import Exchange
    from taskyard.core.model import Submission


# Submissions.


def create(  # noqa: PLR0913  # the last ones are named
    submission: Submission,
    unknown: UnknownPolicy = UnknownPolicy.REFUSE,
    *,
    after_campaigns: Sequence[str] = (),
    check_only: bool = False,
    restart: bool = False,
    environment: bytes | None = None,
) -> Exchange[int]:
    """Submit a batch whole or not at all, and wait until the broker has it.

    Its tasks also wait for all unsettled tasks of `after_campaigns`. With `check_only` the broker
    checks the batch and accepts no task. With `restart` tasks that have ended start again, and
    others get their dependencies too. `environment` replaces that of this client, encoded. Returns
    how many of its tasks are new. Raises `Refused` with the names of the tasks at fault.
    """
    build = partial(
        peer.create,
        submission=submission,
        unknown=unknown,
        after_campaigns=[*map(encode_text, after_campaigns)],
        check_only=check_only,
        restart=restart,
        environment=environment or b"",
    )
    reply = yield from checked_reply(Query(build, has_environment=environment is None))
    if reply.kind == peer.EXIT:
        code = Refusal.SHUTTING_DOWN.value
        raise Refused("the broker is shutting down and accepts no tasks", code)
    return reply.count


def lane_templates(services: Iterable[str]) -> Exchange[dict[str, str]]:
    """Return the lane templates of services. Skip services without one."""
    templates: dict[str, str] = {}
    names = [*dict.fromkeys(services)]
    for some in portions(names, SERVICES_MAX) if names else ():
        encoded = [*map(encode_text, some)]
        reply = yield from checked_reply(Query(partial(peer.rules, services=encoded)))
        rules = reply.clauses()
        for service, name in zip(some, encoded, strict=True):
            templates[service] = template_of(name, rules)
    return {service: template for service, template in templates.items() if template}


def known_predecessors(campaign: str, names: Sequence[str]) -> Exchange[dict[str, None]]:
    """Return those names in `after` that a task of this campaign could wait for now."""
    found = yield from existing([one for name in names for one in (spelling(campaign, name), name)])

    def is_known(name: str) -> bool:
        own, other = found.get(spelling(campaign, name)), found.get(name)
        if own is not None and own["campaign"] == campaign:
            return True
        return other is not None and full_name(other) == name

    return dict.fromkeys(filter(is_known, names))


# Commands on tasks.


def cancel(
    names: Iterable[str] | Scope | None = None,
    *,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Cancel tasks and all that wait for them: by names, or by campaign, service, lane, states.

    Returns how many. Raises `TimedOut`.
    """
    return (yield from _command(partial(peer.command, kind=peer.CANCEL), names, scope, timeout))


def retry(
    names: Iterable[str] | Scope | None = None,
    *,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Retry failed tasks, and delayed ones now: by names, or by campaign, service, lane, states.

    Returns how many. Raises `TimedOut`.
    """
    return (yield from _command(partial(peer.command, kind=peer.RETRY), names, scope, timeout))


def expire(
    names: Iterable[str] | Scope | None = None,
    *,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Expire tasks that no worker holds: by names, or by campaign, service, lane, states.

    They end as failed. Returns how many. Raises `TimedOut`.
    """
    return (yield from _command(partial(peer.command, kind=peer.EXPIRE), names, scope, timeout))


def move(
    names: Iterable[str] | Scope | None = None,
    *,
    to_lane: str | None = None,
    to_service: str | None = None,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Move tasks that no worker holds to another lane, another service, or both.

    `to_lane=""` is the open lane. None as `to_lane` or `to_service` keeps what tasks have. By
    names, or by campaign, service, lane, states. Returns how many. Raises `TimedOut`.
    """
    service, lane = (None if one is None else encode_text(one) for one in (to_service, to_lane))
    build = partial(peer.move, service=service, lane=lane)
    return (yield from _command(build, names, scope, timeout))


def edit(  # noqa: PLR0913  # all but the first are named
    names: Iterable[str] | Scope | None = None,
    *,
    priority: int | None = None,
    time_limit: float | None = None,
    retry_delays: Sequence[float] | None = None,
    expires: float | None = None,
    timeout: float | None = None,
    **scope: Any,  # noqa: ANN401  # the keywords of `scope_of`
) -> Exchange[int]:
    """Change tasks that wait: by names, or by campaign, service, lane, states.

    None keeps a value. A higher `priority` goes first. `time_limit` and `retry_delays` are in
    seconds, and `expires` is in seconds since the epoch. 0 removes a limit or an expiry. Returns
    how many tasks were changed: leased and ended ones stay as they are. Raises `TimedOut`.
    """

    def nanoseconds(seconds: float) -> int:
        return round(seconds * SECOND_NS)

    changes = TermsChanges(
        priority=priority,
        time_limit_ns=None if time_limit is None else nanoseconds(time_limit),
        retry_delays_ns=None if retry_delays is None else tuple(map(nanoseconds, retry_delays)),
        expires_hard_ns=None if expires is None else nanoseconds(expires),
    )
    return (yield from _command(partial(peer.edit, changes=changes), names, scope, timeout))


def _command(
    build: Callable[..., bytes],
    names: Iterable[str] | Scope | None,
    scope: dict[str, Any],
    timeout: float | None,
) -> Exchange[int]:
    deadline, total = Deadline.after(timeout), 0
    check_names(names)
    if isinstance(names, Scope):
        scopes = [names]
    elif names is None:
        scopes = [scope_of(**scope)]
    else:
        scopes = [scope_of(some, **scope) for some in portions(list(names))]
    for one in scopes:
        query = Query(partial(build, scope=one), deadline=deadline, what="the tasks")
        reply = yield from checked_reply(query)
        total += reply.count
    return total


# Commands on workers, services and lanes.


def drain(worker: str | None = None) -> Exchange[int]:
    """Stop assigning tasks to a worker, and shut it down when it is idle.

    Without a name, drain all workers and then the broker. Returns how many workers there were.
    """
    location = None if worker is None else encode_text(worker)
    reply = yield from checked_reply(Query(partial(peer.drain, location=location)))
    return reply.count


def failover(*, force: bool = False) -> Exchange[int]:
    """Hand over from a leader to its standby. Return the epoch of the leader, which ends.

    Raises `Refused` if no standby is ready, unless `force` is set.
    """
    leader = ((yield from status())["health"] or {}).get("leader")
    if leader is None:
        raise Refused(
            "the broker has no standby: its journal is not in PostgreSQL", Refusal.NO_STANDBY.value
        )
    epoch: int = leader["epoch"]
    yield from checked_reply(Query(partial(encode_failover, epoch=epoch, force=force)))
    return epoch


def pause(service: str | None = None, lane: str | None = None) -> Exchange[None]:
    """Stop assigning tasks of a lane, of a whole service, or, without a service, all tasks."""
    scope = scope_of(service=service, lane=lane)
    yield from checked_reply(Query(partial(peer.command, kind=peer.PAUSE, scope=scope)))


def resume(service: str | None = None, lane: str | None = None) -> Exchange[None]:
    """End the pause of a lane, of a service, or, without a service, the pause of everything.

    Other pauses stay.
    """
    scope = scope_of(service=service, lane=lane)
    yield from checked_reply(Query(partial(peer.command, kind=peer.RESUME, scope=scope)))
