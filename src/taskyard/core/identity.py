"""Keys of tasks: a campaign and a name become one key, and back.

A task is identified by the pair (campaign, name). The key is its full name: `CAMPAIGN/NAME`, or
`NAME` outside any campaign. Owns that spelling, and the lookup of names that users and peers write.
Does not depend on task states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, AnyStr, Final, Protocol

from msgspec import structs

from taskyard.core.limits import CAMPAIGNS_SEARCHED_MAX
from taskyard.core.model import shown
from taskyard.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from taskyard.core.entities import Task
    from taskyard.core.model import Campaign, Submission

SEPARATOR: Final = b"/"

_SEPARATORS: Final[dict[type, Any]] = {bytes: SEPARATOR, str: "/"}


def prefix(campaign: AnyStr) -> AnyStr:
    """Return the prefix of full names in a campaign."""
    separator: AnyStr = _SEPARATORS[type(campaign)]
    return campaign + separator if campaign else campaign


def spelling(campaign: AnyStr, name: AnyStr) -> AnyStr:
    """Return the full name of a task from its campaign and name."""
    return prefix(campaign) + name


def split(spelled: AnyStr, campaign: AnyStr) -> AnyStr:
    """Return the name of a task in its campaign, from its full name or its key."""
    return spelled.removeprefix(prefix(campaign))


def matches(key: bytes, match: bytes, campaign: bytes | None) -> bool:
    """Return whether a full name contains a text. In a campaign, only the name in it counts."""
    return match in (key if campaign is None else split(key, campaign))


def full_names(submission: Submission) -> list[bytes]:
    """Return the full names of the tasks of a checked submission."""
    names = submission.names
    return [spelling(submission.terms_of(index).campaign, name) for index, name in enumerate(names)]


def meaning(spelled: bytes, campaign: bytes) -> str:
    """Describe the task that a key belongs to, for an error message."""
    if not campaign:
        return "the name is that of a task outside any campaign"
    name = shown(split(spelled, campaign))
    return f"the name is that of task {name} of campaign {shown(campaign)}"


class Directory(Protocol):
    """The parts of the ledger that lookups read."""

    tasks: dict[bytes, Task]
    campaigns: dict[bytes, Campaign]


class OtherTask(PeerError):
    """A name in `after` is the key of another task than it means."""


# Keys of new tasks.


def keyed(ledger: Directory, submission: Submission) -> Submission:
    """Return a checked submission with keys in place of names, also in `after`."""
    campaigns = [terms.campaign for terms in submission.terms]
    if not any(campaigns):
        return submission
    own = _campaigns_of(submission, campaigns)
    names = _keys(own, submission.names)
    after = submission.after
    if after is not None:
        find = _Predecessors(ledger, dict(zip(names, own, strict=True)))
        pairs = zip(own, after, strict=True)
        after = [[find.key(campaign, one) for one in some] for campaign, some in pairs]
    return structs.replace(submission, names=names, after=after)


def keyed_with_faults(
    ledger: Directory, submission: Submission
) -> tuple[Submission, dict[int, str]]:
    """Return a submission like `keyed`, and why tasks by index can't have their predecessors.

    In the result these tasks have no predecessors.
    """
    after, campaigns = submission.after, [terms.campaign for terms in submission.terms]
    if after is None or not any(campaigns):
        return keyed(ledger, submission), {}
    own = _campaigns_of(submission, campaigns)
    names = _keys(own, submission.names)
    find = _Predecessors(ledger, dict(zip(names, own, strict=True)))
    keys: list[list[bytes]] = []
    wrong: dict[int, str] = {}
    for index, (campaign, some) in enumerate(zip(own, after, strict=True)):
        try:
            keys.append([find.key(campaign, one) for one in some])
        except OtherTask as other:
            keys.append([])
            wrong[index] = str(other)
    return structs.replace(submission, names=names, after=keys), wrong


def _campaigns_of(submission: Submission, campaigns: list[bytes]) -> list[bytes]:
    """Return the campaign of each task, from those of the terms."""
    if submission.terms_at is None:
        return campaigns[:1] * len(submission.names)
    return [campaigns[position] for position in submission.terms_at]


def _keys(campaigns: Sequence[bytes], names: list[bytes]) -> list[bytes]:
    if campaigns.count(campaigns[0]) < len(campaigns):
        return [*map(spelling, campaigns, names)]
    begin = prefix(campaigns[0])
    return [begin + name for name in names] if begin else names


class _Predecessors:
    """Resolves the names in `after` of one submission."""

    def __init__(self, ledger: Directory, batch: dict[bytes, bytes]) -> None:
        """Prepare a lookup. `batch` has the campaigns of the submission's own tasks, by key."""
        self._ledger = ledger
        self._batch = batch
        self._campaigns = dict.fromkeys(batch.values())

    def key(self, campaign: bytes, name: bytes) -> bytes:
        """Return the key that a name in `after` means for a task of this campaign.

        Searches the task's own campaign, then outside any campaign, then splits at the first `/`.
        An unknown name means a task of the own campaign, or of the campaign that it begins with.
        """
        if not name:
            return name  # refused later
        own = prefix(campaign) + name
        known = self._ledger.tasks.get(own)
        if self._batch.get(own) == campaign or (known and known.terms.campaign == campaign):
            return own
        if self._owner(name) == b"":
            return name
        first, sign, rest = name.partition(SEPARATOR)
        if sign and rest and (first in self._campaigns or first in self._ledger.campaigns):
            return self._checked(spelling(first, rest), first)
        return self._checked(own, campaign)

    def _owner(self, spelled: bytes) -> bytes | None:
        """Return the campaign of the task with this key. None: there is no task."""
        if spelled in self._batch:
            return self._batch[spelled]
        task = self._ledger.tasks.get(spelled)
        return None if task is None else task.terms.campaign

    def _checked(self, spelled: bytes, campaign: bytes) -> bytes:
        """Return a key. Raise `OtherTask` if it belongs to a task that the name does not mean."""
        owner = self._owner(spelled)
        if owner is not None and owner != campaign:
            wrong = meaning(spelled, owner)
            text = f"predecessor {shown(spelled)}: {wrong} (give one of them another name)"
            raise OtherTask(text)
        return spelled


def predecessors(ledger: Directory, task: Task, names: Iterable[bytes]) -> list[bytes]:
    """Return the keys that names in `after` mean for a known task."""
    find = _Predecessors(ledger, {})
    return [find.key(task.terms.campaign, name) for name in names]


def everywhere(ledger: Directory, name: bytes) -> Iterator[bytes]:
    """Yield the keys of this name in every campaign, newest campaigns first."""
    newest = reversed(ledger.campaigns)
    for campaign, _ in zip(newest, range(CAMPAIGNS_SEARCHED_MAX), strict=False):
        yield prefix(campaign) + name


def candidates_of(submission: Submission) -> Iterator[bytes]:
    """Yield every key that the names of an unchecked submission may mean.

    So archived tasks are fetched into memory before the lookup.
    """
    campaigns = [terms.campaign for terms in submission.terms]
    after = submission.after or ()
    if not any(campaigns):
        yield from submission.names
        for some in after:
            yield from some
        return
    positions = submission.terms_at or [0] * len(submission.names)
    own = [campaigns[position] if 0 <= position < len(campaigns) else b"" for position in positions]
    yield from map(spelling, own, submission.names)
    for campaign, some in zip(own, after, strict=False):
        for name in some:
            yield from (spelling(campaign, name), name)
