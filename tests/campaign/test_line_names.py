"""Names of lines: readable, stable, and distinct."""

import pytest

from taskyard.campaign.shell_lines import WORDS_CHARS_MAX, LineNames, line_name
from taskyard.campaign.values import read_name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gzip a.txt", "gzip-a.txt"),
        ("./run.sh --lr 0.1", "run.sh-lr-0.1"),
        ("convert 'a b.png' | tee x", "convert-a-b.png-tee-x"),
        ("größe-a.b_c  --x=1", "größe-a.b_c-x-1"),
        ("gross-a.b_c  --x=1", "gross-a.b_c-x-1"),
        ("größe œuvre/名前", "größe-œuvre-名前"),
        ("((!))", "line"),
        ("", "line"),
        ("\udcff\udcfe x", "x"),
        ("-rf --", "rf"),
    ],
)
def test_name_begins_with_the_first_words(text: str, words: str) -> None:
    name, _, digest = line_name(text).rpartition("-")
    assert (name, len(digest)) == (words, 12)
    assert read_name(line_name(text)) == line_name(text)


def test_names_never_change() -> None:
    """Names are in journals: another name would run a done task again."""
    assert line_name("gzip a.txt") == "gzip-a.txt-2a81d7bdd490"
    assert line_name("gzip a.txt", 2) == "gzip-a.txt-2a81d7bdd490-2"


def test_long_line_has_a_short_name() -> None:
    name = line_name("x" * 1_000_000)
    assert name.startswith("x" * WORDS_CHARS_MAX + "-")
    assert len(name) == WORDS_CHARS_MAX + 13


def test_equal_lines_are_counted_and_others_keep_their_names() -> None:
    def names(*texts: str) -> list[str]:
        numbering = LineNames()
        return [numbering.next_name(text) for text in texts]

    a, b = line_name("a"), line_name("b")
    assert names("a", "b", "a", "a") == [a, b, f"{a}-2", f"{a}-3"]
    assert names("b", "new", "a", "a") == [b, line_name("new"), a, f"{a}-2"]


def test_many_similar_lines_have_distinct_names() -> None:
    texts = [f"python train.py --config configs/experiment.toml --seed {n}" for n in range(20_000)]
    numbering = LineNames()
    assert len({numbering.next_name(text) for text in texts}) == len(texts)
