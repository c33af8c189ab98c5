"""Cases that share a test: all of them run, and those that fail are named."""

from pathlib import Path

import pytest

from tests.kit.cases import each_case

RAN: list[str] = []


@each_case(("number", "text"), [(1, "a"), (2, "b")])
def test_every_case_runs_with_the_fixtures_of_the_test(
    number: int, text: str, tmp_path: Path
) -> None:
    assert tmp_path.is_dir()
    RAN.append(text)
    assert ["a", "b"][:number] == RAN


def test_failed_cases_are_named_and_the_others_run() -> None:
    ran: list[int] = []

    @each_case("number", range(4))
    def check(number: int) -> None:
        ran.append(number)
        if number == 1:
            pytest.fail("one")
        assert number != 3

    with pytest.raises(pytest.fail.Exception, match="one") as failed:
        check()
    assert ran == [0, 1, 2, 3]
    assert failed.value.__notes__ == ["of 4 cases these failed:\n  number=1\n  number=3"]
