"""The documents of --json match their schemas, and the schemas match docs/schemas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from docs import schemas
from taskyard.cli.entry import run, taskyard
from tests.kit.processes import Broker

if TYPE_CHECKING:
    from tests.cli.yard import Caller, Yard

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"


def test_schemas_are_made_from_the_documents() -> None:
    made = schemas.schemas()
    kept = {path.name: path.read_text() for path in SCHEMAS.iterdir()}
    assert made == kept, "on purpose? then: ./yard docs"


@pytest.fixture(scope="module", autouse=True)
def campaign(yard: Yard) -> None:
    lines = [
        {"name": "done", "argv": ["echo", "out"]},
        {"name": "bytes", "argv": ["printf", "\\377"]},
        {"name": "bad", "argv": ["false"]},
        {"name": "behind", "argv": ["true"], "after": ["bad"]},
        {"name": "late", "argv": ["true"], "due": "1h", "lane": "l"},
    ]
    (yard.directory / "bad.jsonl").write_text('{"nam": 1}\n')
    (yard.directory / "quick.jsonl").write_text('{"name": "quick", "argv": ["true"]}\n')
    (yard.directory / "sad.jsonl").write_text('{"name": "sad", "argv": ["false"]}\n')
    file = yard.directory / "frozen.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = ["--state", str(yard.state)]
    assert run(taskyard, ["load", *state, str(file)]) == 0
    assert run(taskyard, ["wait", *state, "done", "bytes", "bad"]) == 1


#: A command with its options, and its exit code.
VERBS = [
    ("status", 0),
    ("status --campaign frozen", 0),
    ("list", 0),
    ("list --limit 1", 0),
    ("list --sort duration --columns name,memory", 0),
    ("list --lane none", 0),
    ("show behind", 0),
    ("result done", 0),
    ("result bytes", 0),
    ("log done", 0),
    ("log bytes", 0),
    ("why behind late", 0),
    ("why --campaign frozen", 0),
    ("workers", 0),
    ("why --lane l --service exec", 0),
    ("services", 0),
    ("lanes", 0),
    ("lanes --service none --waiting", 0),
    ("move late --to-lane l", 0),
    ("edit late --priority 3", 0),
    ("expire --match no-such-name", 0),
    ("submit -- true", 0),
    ("submit --wait -- echo hi", 0),
    ("submit --wait -- false", 1),
    ("submit --wait -- printf \\377", 0),
    ("map --no-wait --lines FILE -- echo {}", 0),
    ("map --lines FILE -- echo {}", 0),
    ("map --lines FILE -- false {}", 1),
    ("load FILE", 0),
    ("load FILE --dry-run", 0),
    ("load BAD --dry-run", 2),
    ("load QUICK --wait", 0),
    ("wait done", 0),
    ("wait --any done bad", 0),
    ("wait late --timeout 0.01", 4),
    ("retry bad", 0),
    ("cancel --match no-such-name", 0),
    ("pause --service exec", 0),
    ("resume --service exec", 0),
    ("watch --since 0 --campaign quick --until-settled", 0),
]


@pytest.mark.parametrize(("words", "code"), VERBS, ids=[words for words, _ in VERBS])
def test_output_matches_the_schema(call: Caller, yard: Yard, words: str, code: int) -> None:
    files = {"FILE": "frozen.jsonl", "BAD": "bad.jsonl", "QUICK": "quick.jsonl"}
    verb, *given = [
        str(yard.directory / files[one]) if one in files else one for one in words.split()
    ]
    outcome = call(verb, "--json", *given)
    assert outcome.code == code, outcome.err
    assert outcome.out
    for line in outcome.out.splitlines() if verb == "watch" else [outcome.out]:
        schemas.check(line)


@pytest.mark.parametrize(
    "words",
    [
        "config --json",
        "config --check --json",
        "journal check --json --state STATE",
        "journal export --json --state STATE --out STATE/exported",
        "journal compact --json --state STATE",
        "keys new --json --state STATE --role viewer --out STATE/guest.key guest",
        "keys list --json --state STATE",
        "keys revoke --json --state STATE guest",
        "run --json --state STATE FILE",
    ],
)
def test_output_without_a_broker_matches_the_schema(
    words: str, stopped: Path, yard: Yard, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    if "revoke" in words or "list" in words:
        new = f"keys new --state {stopped} --role viewer --out {stopped}/{len(words)}.key"
        run(taskyard, [*new.split(), "guest"])
    file = str(yard.directory / "sad.jsonl")
    given = words.replace("STATE", str(stopped)).replace("FILE", file).split()
    capsysbinary.readouterr()
    assert run(taskyard, given) in (0, 1)
    schemas.check(capsysbinary.readouterr().out)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state directory of a stopped broker."""
    directory = tmp_path_factory.mktemp("left")
    with Broker(directory) as broker:
        assert broker.terminate()[0] == 0
    return directory / ".taskyard"


@pytest.fixture
def stopped(left: Path, tmp_path: Path) -> Path:
    """Return a copy of the state directory for one test."""
    return Path(shutil.copytree(left, tmp_path / "state"))


@pytest.mark.parametrize(
    "spoilt",
    [
        {"version": 2, "document": "retry", "retried": 1},
        {"version": 1, "document": "retry"},
        {"version": 1, "document": "retry", "retried": "1"},
        {"version": 1, "document": "retry", "retried": 1, "more": 1},
        {"version": 1, "document": "frobnicate"},
        {"version": 1, "document": "watch", "kind": "finished", "record": 1},
        {"version": 3, "document": "watch", "kind": "cancelled", "record": 1, "at": 1, "names": []},
    ],
)
def test_wrong_document_is_rejected(spoilt: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        schemas.check(json.dumps(spoilt))
