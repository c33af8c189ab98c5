"""ZMailer's transport control files: tasks of recipients, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskyard.campaign.formats import FileOptions, Format
from taskyard.campaign.reader import read_campaign
from taskyard.campaign.task_spec import TaskSpec
from taskyard.errors import UserError
from tests.worker.zmailer_agent import control_file

TWO = control_file("a", "b")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transport" / "A" / "B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def refusal(name: str, content: str) -> str:
    with pytest.raises(UserError) as refused:
        read_campaign(write(name, content), FileOptions(Format.ZMAILER))
    return str(refused.value)


def test_each_recipient_is_a_task_at_its_offset() -> None:
    loaded = read_campaign(write("transport/12", TWO))
    assert (loaded.choice.format, loaded.choice.by_content) == (Format.ZMAILER, True)
    first, second = TWO.index("r  "), TWO.rindex("r  ")
    assert loaded.specs == [
        TaskSpec(name=f"12/{first}", payload=b"12\t-", lane="local/-"),
        TaskSpec(name=f"12/{second}", payload=b"12\t-", lane="local/-"),
    ]
    assert [*loaded.lines] == [6, 8]


def test_path_is_that_in_the_transport_directory() -> None:
    (first, _) = read_campaign(write("transport/A/B/12-3", TWO)).specs
    assert (first.name.partition("/")[0], first.payload) == ("12", b"A/B/12-3\t-")


@pytest.mark.parametrize(
    ("address", "lane"),
    [
        ("SMTP Mail.Example a@b 0", "smtp/mail.example"),
        ('local "two words" "a b"@c 0', 'local/"two words"'),
        (r"local a\ b c 0", r"local/a\ b"),
        ("smtp ((mx.example)(mx2.example)) a@b 0", "smtp/mx.example"),
        ("hold ns:{x}/mx a 0", "hold/ns:{x}/mx"),
    ],
)
def test_lane_is_the_channel_and_the_host(address: str, lane: str) -> None:
    text = TWO.replace("local - a 0", address)
    first, second = read_campaign(write("12", text)).specs
    assert (first.lane, second.lane) == (lane, "local/-")
    assert first.payload == b"12\t" + lane.partition("/")[2].encode()


def test_recipients_that_an_agent_has_marked_are_skipped() -> None:
    text = control_file("a", "b", "c", "d")
    for user, mark in (("a", "+"), ("b", "-"), ("c", "~")):
        text = text.replace(f"r {'':10}local - {user}", f"r{mark}{'':10}local - {user}")
    names = [one.name for one in read_campaign(write("12", text)).specs]
    assert names == [f"12/{text.index('r~')}", f"12/{text.rindex('r  ')}"]


def test_header_lines_and_files_without_a_delay_are_read() -> None:
    text = TWO.replace("From:", "r headers\nFrom:").replace(" " * 10, " " * 6)
    text = text.replace("@ 0x00000007\n", "").replace("o 96", "o 96\nM\nr x\n")
    specs = read_campaign(write("12", text)).specs
    assert [one.lane for one in specs] == ["local/-", "local/-"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"r " + b" " * 10 + b"local -", "a recipient is a channel, a host and a user"),
        (b"r " + b" " * 10 + b"local \xff a", "not valid UTF-8 (byte 7)"),
        (b"X " + b" " * 10 + b"1 local - a", "alternative recipients are not supported"),
    ],
)
def test_bad_recipient_is_a_rejected_line(line: bytes, reason: str) -> None:
    text = TWO.encode().replace(b"r " + b" " * 10 + b"local - a 0", line)
    loaded = read_campaign(write("12", text))
    assert [str(one) for one in loaded.rejected] == [f"12:6: {reason}"]
    assert len(loaded.specs) == 1


def test_file_that_no_agent_would_read_is_refused() -> None:
    assert refusal("mail", TWO) == "mail: a transport control file is named by a number"
    assert refusal("12", TWO.replace("s smtp", "x smtp")) == "12:6: no sender before the recipient"
    assert refusal("12", TWO.replace("i 1", "x 1")) == "12:6: no message file before the recipient"
    assert refusal("12", TWO.rstrip()) == "12:11: the file ends within the headers"
