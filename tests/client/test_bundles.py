"""Bundles: one payload for many recipients, from a program, from a file, and in the broker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import taskyard
from taskyard import testing
from taskyard.campaign import batches
from taskyard.campaign.batches import encode_batches
from taskyard.campaign.reader import read_campaign, write_rejected
from taskyard.campaign.task_spec import InvalidTask, check_task, expand_row
from taskyard.errors import Refused, TimedOut, UserError
from tests.kit.clients import internal
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEWS: dict[str, Any] = {
    "name": "news",
    "payload": {"text": "hi"},
    "recipients": [{"to": "ann", "host": "a"}, {"to": "bob", "host": "b"}],
    "lane": "{host}",
}


def why_not(**keys: Any) -> str:
    with pytest.raises(InvalidTask) as refused:
        expand_row(NEWS | keys)
    return str(refused.value)


class TestTasks:
    def test_each_recipient_has_a_task(self) -> None:
        first, second = expand_row(NEWS | {"priority": 3, "after": ["x"]})
        assert [first.name, second.name] == ["news/0", "news/1"]
        assert [first.lane, second.lane] == ["a", "b"]
        assert (second.priority, second.after) == (3, ("x",))
        assert first.payload is second.payload
        assert msgspec.json.decode(first.payload or b"") == {
            "body": {"text": "hi"},
            "recipients": NEWS["recipients"],
        }

    def test_lane_template_has_fields_of_recipient_and_bundle(self) -> None:
        texts = {"recipients": ["ann", "bob"]}
        lanes = [spec.lane for spec in expand_row(NEWS | texts | {"lane": "{bundle}.{recipient}"})]
        assert lanes == ["news.ann", "news.bob"]
        lanes = [spec.lane for spec in expand_row(NEWS | {"lane": "{offset} {name} {service}"})]
        assert lanes == ["0 news/0 default", "1 news/1 default"]

    def test_body_keeps_its_type(self) -> None:
        for body, kept in (
            ("text", "text"),
            (b"bytes", "bytes"),
            ([1], [1]),
            ('{"a":1}', '{"a":1}'),
        ):
            (first, _) = expand_row(NEWS | {"payload": body})
            assert msgspec.json.decode(first.payload or b"")["body"] == kept

    @pytest.mark.parametrize(
        ("keys", "text"),
        [
            ({"payload": None}, 'has "recipients" but no "payload"'),
            ({"argv": ["true"]}, 'only one of "argv"'),
            ({"recipients": []}, '"recipients" must have at least one'),
            ({"recipients": "ann"}, '"recipients" must be a list'),
            ({"recipients": ["ann", 7]}, '"recipients" must be a list of texts or objects'),
            ({"recipients": ["ann", ""]}, "number 1 is ''"),
            ({"recipients": [{1: 2}]}, "texts or objects, but number 0"),
            ({"payload": b"\xff"}, "(put them in a file)"),
            ({"payload": {"at": b"x"}}, "payload of type dict can't be sent as JSON"),
            (
                {"lane": "{hots}"},
                "\"lane\" of recipient 0 is '{hots}', but the task has no field 'hots'",
            ),
            ({"lane": 7}, '"lane" must be text'),
            ({"name": "x" * 1023}, '"name" must leave room for /1'),
            ({"env": {"A": "b"}}, '"env" or "cwd"'),
        ],
    )
    def test_invalid_bundle_is_refused(self, keys: dict[str, Any], text: str) -> None:
        assert text in why_not(**keys)

    def test_too_many_recipients_are_refused(self) -> None:
        text = why_not(recipients=["a"] * 100_001)
        assert text == ('"recipients" must be at most 100,000, not 100,001 (split the bundle)')

    def test_single_task_with_recipients_is_refused(self) -> None:
        with pytest.raises(InvalidTask, match="submit it as a bundle"):
            check_task(NEWS)


class TestSubmissions:
    def test_tasks_share_one_payload(self) -> None:
        (batch,) = encode_batches(expand_row(NEWS), b"c", 0)
        assert len(batch.payloads) == 1
        assert batch.lanes == [b"a", b"b"]

    def test_bundle_is_one_batch_between_others(self) -> None:
        others = [check_task({"name": name, "argv": ["true"]}) for name in "xyz"]
        many = expand_row(NEWS | {"recipients": ["a"] * 30_000, "lane": "one"})
        specs = [others[0], *many, *expand_row(NEWS | {"name": "more"}), *others[1:]]
        sizes = [len(batch.names) for batch in encode_batches(specs, b"", 0)]
        assert sizes == [1, 30_000, 2, 2]

    def test_bundle_larger_than_a_batch_is_not_split(self) -> None:
        specs = expand_row(NEWS | {"payload": "x" * 10_000})
        (batch,) = encode_batches(specs, b"", 0, bytes_max=1000)
        assert len(batch.names) == 2

    def test_bundle_that_fits_no_message_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batches, "BUNDLE_BYTES_MAX", 1000)
        with pytest.raises(InvalidTask, match=r"bundle 'news': .* the limit is 1,000 \(split"):
            list(encode_batches(expand_row(NEWS | {"payload": "x" * 1000}), b"", 0))


class TestFiles:
    def test_row_with_recipients_is_a_bundle(self, tmp_path: Path) -> None:
        file = tmp_path / "c.jsonl"
        last = {"name": "last", "argv": ["true"], "after": ["news/0", "news/1"]}
        file.write_bytes(b"\n".join(map(msgspec.json.encode, (last, NEWS))))
        loaded = read_campaign(file)
        assert [spec.name for spec in loaded.specs] == ["news/0", "news/1", "last"]
        assert ([*loaded.lines], loaded.rejected) == ([2, 2, 1], [])
        assert loaded.specs[0].payload is loaded.specs[1].payload

    def test_cell_lists_recipients(self, tmp_path: Path) -> None:
        file = tmp_path / "c.csv"
        file.write_text("name,payload,recipients,lane\nnews,hi,ann;bob,{recipient}\n")
        assert [spec.lane for spec in read_campaign(file).specs] == ["ann", "bob"]

    def test_invalid_recipient_rejects_the_row_with_its_line(self, tmp_path: Path) -> None:
        file = tmp_path / "c.jsonl"
        rejected = NEWS | {"recipients": [{"host": "a"}, {"hots": "b"}]}
        file.write_bytes(b'{"name": "x", "argv": ["true"]}\n' + msgspec.json.encode(rejected))
        loaded = read_campaign(file)
        assert [spec.name for spec in loaded.specs] == ["x"]
        (text,) = map(str, loaded.rejected)
        assert text == (
            f"{file}:2: \"lane\" of recipient 1 is '{{host}}', but the task has no field 'host' "
            "(it has 'hots', 'bundle', 'offset', 'name', 'campaign' and 1 more)"
        )

    def test_duplicate_name_rejects_the_whole_bundle(self, tmp_path: Path) -> None:
        file = tmp_path / "c.jsonl"
        file.write_bytes(b'{"name": "news/1", "argv": ["true"]}\n' + msgspec.json.encode(NEWS))
        loaded = read_campaign(file)
        assert [spec.name for spec in loaded.specs] == ["news/1"]
        assert "duplicate name 'news/1', first on line 1" in str(loaded.rejected[0])

    def test_bundle_behind_a_bad_line_is_rejected_as_it_was_written(self, tmp_path: Path) -> None:
        file = tmp_path / "c.jsonl"
        behind = NEWS | {"after": ["bad"]}
        file.write_bytes(b'{"name": "bad"}\n' + msgspec.json.encode(behind))
        loaded = read_campaign(file)
        assert (loaded.specs, [one.line for one in loaded.rejected]) == ([], [1, 2])
        (written,) = write_rejected(loaded.rejected)
        rejected = written.read_bytes().splitlines()
        assert msgspec.json.decode(rejected[1])["raw"] == behind


@pytest.fixture
def broker() -> Iterator[testing.InMemoryBroker]:
    with testing.broker() as running:
        yield running


def send(
    broker: testing.InMemoryBroker, campaign: str = "news", **keys: Any
) -> list[taskyard.Future]:
    return (
        internal(broker.client())
        .campaign(campaign)
        .submit_bundle("hi", ["ann", "bob"], service="mail", **keys)
    )


class TestClient:
    def test_bundle_is_a_list_of_futures(self, broker: testing.InMemoryBroker) -> None:
        bundle = send(broker)
        campaign = internal(broker.client()).campaign("news")
        with pytest.raises(TimedOut):
            campaign.wait(timeout=0)
        assert broker.run_all({"mail": lambda payload: payload}) == ["news/0", "news/1"]
        campaign.wait(PATIENCE_SECONDS)
        names = [future.name for future in bundle]
        parts = [
            taskyard.bundle_part(future.full_name, future.result(PATIENCE_SECONDS))
            for future in bundle
        ]
        assert names == ["0", "1"]
        assert parts == [("news", 0, "hi", "ann"), ("news", 1, "hi", "bob")]

    def test_each_task_has_its_own_lane_in_the_bundles_campaign(
        self, broker: testing.InMemoryBroker
    ) -> None:
        send(broker)
        views = list(internal(broker.client()).campaign("news").tasks())
        assert [(view["name"], view["lane"]) for view in views] == [("0", "ann"), ("1", "bob")]
        assert [*internal(broker.client()).existing(["news/0", "news/1"])] == ["news/0", "news/1"]
        send(broker, "week", name="more", lane="all")
        (view, _) = internal(broker.client()).campaign("week").tasks()
        assert (view["name"], view["lane"]) == ("more/0", "all")

    def test_resubmission_changes_nothing_and_another_payload_is_refused(
        self, broker: testing.InMemoryBroker
    ) -> None:
        campaign = internal(broker.client()).campaign("news")
        send(broker)
        send(broker)
        broker.run_all({"mail": lambda payload: payload})
        taskyard.wait(send(broker), PATIENCE_SECONDS)
        assert campaign.status()["done"] == 2
        with pytest.raises(Refused, match="news/0 is known with another payload"):
            campaign.submit_bundle("bye", ["ann", "bob"])

    def test_one_refused_task_refuses_the_whole_bundle(
        self, broker: testing.InMemoryBroker
    ) -> None:
        client = internal(broker.client())
        client.submit(b"other", name="news/1")
        client.status()
        with pytest.raises(Refused):
            send(broker)
        assert client.existing(["news/0"]) == {}

    def test_bundle_is_cancelled_as_its_campaign(self, broker: testing.InMemoryBroker) -> None:
        bundle = send(broker, "week", name="news")
        campaign = internal(broker.client()).campaign("week")
        assert campaign.cancel() == 2
        campaign.wait(PATIENCE_SECONDS)
        taskyard.wait(bundle, PATIENCE_SECONDS)
        assert all(future.cancelled() for future in bundle)

    def test_recipients_are_any_iterable_but_a_text(self, broker: testing.InMemoryBroker) -> None:
        client = internal(broker.client())
        submit_bundle = client.campaign("all").submit_bundle
        assert len(submit_bundle("hi", (str(number) for number in range(9)))) == 9
        with pytest.raises(UserError, match="must be a list"):
            submit_bundle("hi", "ann")
        with pytest.raises(UserError, match=r"no field 'recipient' \(it has 'to'"):
            submit_bundle("hi", [{"to": "ann"}])
        with pytest.raises(UserError, match="submit it as a bundle"):
            client.submit(b"hi", recipients=["ann"])

    def test_bundle_waits_for_tasks(self, broker: testing.InMemoryBroker) -> None:
        first = internal(broker.client()).submit(["true"], name="first")
        assert first.state == "ready", "the broker has it before another client names it"
        assert send(broker, after=[first])[0].state == "blocked"
        assert send(broker, "n2", after=["ghost"], wait_for_unknown=True)[0].state == "blocked"

    def test_async_bundle_works_alike(self, broker: testing.InMemoryBroker) -> None:
        async def main() -> None:
            async with taskyard.AsyncClient(broker.endpoint) as client:
                campaign = client.campaign("news")
                bundle = await campaign.submit_bundle("hi", ["ann", "bob"])
                assert [future.name for future in bundle] == ["0", "1"]
                assert await campaign.cancel() == 2
                await campaign.wait(PATIENCE_SECONDS)
                await asyncio.wait(bundle)  # type: ignore[type-var]
                assert bundle[1].cancelled()

        asyncio.run(main())
