"""Lane templates: the values of fields, and the errors for missing ones."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.campaign import lanes
from taskyard.campaign.bundles import assign_lanes, expand_row
from taskyard.campaign.task_spec import InvalidTask, check_task, to_row
from taskyard.campaign.values import InvalidValue


def lane(**keys: Any) -> str:
    return check_task({"name": "a", **keys}, campaign="week").lane


def why_not(**keys: Any) -> str:
    with pytest.raises(InvalidTask) as refused:
        lane(**keys)
    return str(refused.value)


@pytest.mark.parametrize(
    ("template", "keys", "expected"),
    [
        ("{host}", {"payload": {"host": "a.org", "n": 1}}, "a.org"),
        ("{host}", {"payload": ' {"host": "a.org"}'}, "a.org"),
        ("{host}:{port}", {"call": "m:f", "kwargs": {"host": "h", "port": 25}}, "h:25"),
        ("{0}-{1}", {"call": "m:f", "args": ["x", 2.5]}, "x-2.5"),
        ("{1}", {"argv": ["scp", "file", "host:"]}, "file"),
        ("{call}", {"call": "imaging:thumbnail"}, "imaging:thumbnail"),
        ("{name} {campaign} {service}", {"argv": ["true"]}, "a week exec"),
        ("{service}", {"payload": "", "service": "smtp"}, "smtp"),
        ("{ok}", {"payload": {"ok": True}}, "true"),
        ("{first name}", {"payload": {"first name": "é"}}, "é"),
        ("{{{name}}}", {"argv": ["true"]}, "{a}"),
        ("{{host}}", {"argv": ["true"]}, "{host}"),
        ("plain", {"argv": ["true"]}, "plain"),
    ],
)
def test_field_is_replaced_by_its_value(template: str, keys: dict[str, Any], expected: str) -> None:
    assert lane(lane=template, **keys) == expected


def test_name_campaign_and_service_are_always_the_tasks_own() -> None:
    payload = {"name": "not this", "campaign": "nor this", "service": "nor that"}
    assert lane(lane="{name}/{campaign}/{service}", payload=payload) == "a/week/default"


def test_missing_field_is_reported_with_the_known_ones() -> None:
    known = "'to', 'host', 'name', 'campaign', 'service'"
    payload = {"to": "b", "host": "c", "list": []}
    assert why_not(lane="{hots}", payload=payload) == (
        f"\"lane\" is '{{hots}}', but the task has no field 'hots' (it has {known})"
    )


def test_at_most_five_fields_are_reported() -> None:
    text = why_not(lane="{x}", argv=["a", "b", "c", "d", "e", "f"])
    assert text.endswith("(it has '0', '1', '2', '3', '4' and 4 more)")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"payload": {"x": None}}, "no field 'x'"),
        ({"payload": {"x": [1]}}, "field 'x' is [1], not a text or a number"),
        ({"payload": {"x": ""}}, "is '{x}', which expands to nothing"),
        ({"payload": {"x": "a\nb"}}, "is '{x}', which must not contain control characters"),
        ({"payload": {"x": "y" * 1025}}, "is '{x}', which must have at most 1024 bytes"),
        ({"payload": "no object"}, "no field 'x' (it has 'name', 'campaign', 'service')"),
        ({"payload": "{cut"}, "no field 'x'"),
        ({"payload": b"\xff"}, "no field 'x'"),
    ],
)
def test_field_that_makes_no_lane_is_refused(keys: dict[str, Any], text: str) -> None:
    assert text in why_not(lane="{x}", **keys)


@pytest.mark.parametrize("template", ["{", "}", "a{b", "{a}}", "{}", "{a{b}}"])
def test_single_brace_is_refused(template: str) -> None:
    text = why_not(lane=template, payload={"a": "1", "b": "2"})
    assert "(write a field as {host}, and double a literal brace)" in text


@given(st.text("a{}é", min_size=1))
def test_escaped_lane_is_the_template_of_itself(name: str) -> None:
    assert lanes.expand(lanes.escape_template(name), {}) == name


@given(st.text(max_size=30), st.dictionaries(st.text(max_size=3), st.text(max_size=5)))
def test_template_gives_a_lane_or_is_refused(template: str, fields: dict[str, str]) -> None:
    with suppress(InvalidValue):
        assert lanes.expand(template, fields)


def test_rejected_task_is_written_so_that_it_has_the_same_lane() -> None:
    task = check_task({"name": "a", "argv": ["true"], "lane": "{{x}}"})
    assert check_task(to_row(task)) == task


def test_lane_template_of_a_service_applies_to_tasks_without_a_lane() -> None:
    template = {"smtp": "{host}"}
    raws: list[dict[str, Any]] = [
        {"name": "a", "service": "smtp", "payload": {"host": "h"}},
        {"name": "b", "service": "smtp", "payload": {"host": "h"}, "lane": "own"},
        {"name": "c", "payload": {"host": "h"}},
    ]
    specs = [spec for raw in raws for spec in expand_row(raw)]
    assign_lanes(specs, "week", lambda service: template.get(service, ""))
    assert [spec.lane for spec in specs] == ["h", "own", ""]


def test_task_that_its_services_template_does_not_fit_is_refused() -> None:
    (spec,) = expand_row({"name": "a", "payload": "x"})
    with pytest.raises(InvalidTask, match="no field 'host'"):
        assign_lanes([spec], "", lambda _service: "{host}")
