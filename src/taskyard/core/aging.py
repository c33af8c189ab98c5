"""Ages that the rules set for tasks which set none: fixed when a task is submitted.

They become part of its terms, which the journal keeps, so that a change of the rules changes no
task that is there already. Tasks of one submission may be in lanes of different rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from taskyard.core.limits import NUMBER_MAX
from taskyard.core.queues import OPEN_LANE
from taskyard.core.rules import first_match

if TYPE_CHECKING:
    from taskyard.core.model import Submission, Terms
    from taskyard.core.rules import ActiveRule, LaneOptions, RuleTable


def with_expiry(regimes: RuleTable, submission: Submission, at_ns: int) -> Submission:
    """The submission, with the ages that the rules of each task's lane set."""
    terms: list[Terms] = []
    places: dict[tuple[int, int], int] = {}
    terms_at = []
    for place, active_rule in _rules_of_tasks(regimes, submission):
        key = (place, id(active_rule))
        if key not in places:
            places[key] = len(terms)
            terms.append(_with_defaults(submission.terms[place], active_rule.rules, at_ns))
        terms_at.append(places[key])
    alike = len(terms) == 1
    return structs.replace(submission, terms=terms, terms_at=None if alike else terms_at)


def _rules_of_tasks(regimes: RuleTable, submission: Submission) -> list[tuple[int, ActiveRule]]:
    """Of each task which terms it has, and which regime its lane."""
    count = len(submission.names)
    services = [terms.service for terms in submission.terms]
    choices = [regimes.for_service(name) for name in services]
    places = submission.terms_at or [0] * count
    lanes = submission.lanes or [OPEN_LANE] * count
    return [
        (place, first_match(choices[place], services[place], lane))
        for place, lane in zip(places, lanes, strict=True)
    ]


def _with_defaults(terms: Terms, rules: LaneOptions, at_ns: int) -> Terms:
    """Terms with what they leave to the rules. An age is counted from when the task is due."""
    since_ns = max(at_ns, terms.due_ns)

    def after_ns(age_ns: int) -> int:
        return min(since_ns + age_ns, NUMBER_MAX) if age_ns else 0

    return structs.replace(
        terms,
        expires_ns=terms.expires_ns or after_ns(rules.expiry_ns),
        expires_hard_ns=terms.expires_hard_ns or after_ns(rules.expiry_hard_ns),
        report_ns=after_ns(rules.report_after_ns),
    )
