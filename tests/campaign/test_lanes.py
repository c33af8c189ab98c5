"""Lane templates: the values of fields, and the errors for missing ones."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.campaign import lanes
from taskyard.campaign.batches import encode_batch
from taskyard.campaign.task_spec import InvalidTask, assign_lanes, check_task, expand_row, to_row
from taskyard.campaign.values import InvalidValue
from taskyard.core.model import Submission


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


def _batch(*raws: dict[str, Any]) -> Submission:
    specs = [spec for raw in raws for spec in expand_row(raw)]
    return encode_batch(specs, b"week", 0)


def test_lane_template_of_a_service_applies_to_tasks_without_a_lane() -> None:
    batch = _batch(
        {"name": "a", "service": "smtp", "payload": {"host": "h"}},
        {"name": "b", "service": "smtp", "payload": {"host": "h"}, "lane": "own"},
        {"name": "c", "payload": {"host": "h"}},
    )
    templates = lanes.LaneTemplates()
    templates.put({b"smtp": "{host}", b"default": ""})
    assert templates.assign(batch) == []
    assert batch.lanes == [b"h", b"own", b""]


@pytest.mark.parametrize(
    ("work", "template", "lane"),
    [
        ({"argv": ["echo", "x"]}, "{1}-{campaign}", b"x-week"),
        ({"call": "m:f", "args": [7], "kwargs": {"host": "h"}}, "{0}-{host}-{name}", b"7-h-a"),
        ({"payload": "text"}, "{service}", b"default"),
    ],
)
def test_fields_of_a_batch_are_those_of_its_tasks(
    work: dict[str, Any], template: str, lane: bytes
) -> None:
    batch = _batch({"name": "a", **work})
    templates = lanes.LaneTemplates()
    templates.put({batch.terms[0].service: template})
    assert templates.assign(batch) == []
    assert batch.lanes == [lane]
    assert check_task({"name": "a", **work, "lane": template}, "week").lane.encode() == lane


def test_tasks_that_their_services_template_does_not_fit_are_returned() -> None:
    batch = _batch({"name": "a", "payload": {"host": "h"}}, {"name": "b", "payload": "x"})
    templates = lanes.LaneTemplates()
    templates.put({b"default": "{host}"})
    ((index, problem),) = templates.assign(batch)
    assert index == 1
    assert "the lane of service default is '{host}', but the task has no field" in problem


def test_lane_of_a_bundles_task_is_by_template_or_its_recipient() -> None:
    raw = {"name": "news", "payload": "hi", "recipients": [{"host": "h", "recipient": "ann"}]}
    for template, lane in (("{host}", "h"), ("", "ann")):
        specs = expand_row(raw)
        assign_lanes(specs, "week", template)
        assert [spec.lane for spec in specs] == [lane]
    with pytest.raises(InvalidTask, match="no field 'user'"):
        assign_lanes(expand_row(raw), "week", "{user}")
