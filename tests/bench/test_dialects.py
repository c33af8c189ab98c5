"""Every case of the dialects' suite runs with tiny numbers and fills its lines."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cli import main
from bench.dialects import suite as dialects

LINES = {"round-robin": ["INCREMENT to next message, p50", "INCREMENT to next message, p99"]}


#: Cases that every run tries. The others differ in their peers, and are tried with --whole.
TRIED = ("round-robin", "wmp, native client")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in TRIED else [pytest.mark.whole])
        for case in dialects.CASES
    ],
)
def test_case_fills_its_lines(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(dialects, "CASES", {case: dialects.CASES[case]})
    words = ["dialects", "--quick", "--repeats", "1"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for what in (case, "all processes", *LINES.get(case, ())):
        assert what in done.output
