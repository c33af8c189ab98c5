"""Parts of `./yard screenshots`: the survey's graph, finding views, and small pictures."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

from screenshots import __main__ as command
from screenshots import camera, survey
from taskyard.web.views.site import NAVIGATION
from tests.kit.requirements import need

ROOT = Path(__file__).parents[2]
SITE = "http://127.0.0.1:6180"


def test_survey_is_a_graph_of_a_thousand_tasks_in_order() -> None:
    tasks = list(survey.tasks())
    assert tasks == list(survey.tasks()), "it is the same in every run"
    assert len(tasks) == 1001
    seen: set[str] = set()
    for task in tasks:
        assert seen.issuperset(task["after"])
        seen.add(task["name"])
    assert len(seen) == len(tasks)
    outcomes = Counter(task["argv"][-1] for task in tasks)
    assert outcomes["flaky"] > 10
    assert 2 < outcomes["missing"] + outcomes["diverging"] < 40


@pytest.mark.parametrize(
    ("outcome", "attempt", "status"),
    [("good", 1, 0), ("flaky", 1, 75), ("flaky", 2, 0), ("missing", 3, 4), ("diverging", 1, 1)],
)
def test_step_has_its_outcome(tmp_path: Path, outcome: str, attempt: int, status: int) -> None:
    script = tmp_path / survey.SCRIPT_NAME
    script.write_text(survey.SCRIPT)
    words = ["sh", str(script), "fetch", "007", "0", outcome]
    ended = subprocess.run(
        words,
        env={"PATH": "/usr/bin:/bin", "TASKYARD_ATTEMPT": str(attempt)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == status
    assert ended.stdout.startswith(f"fetch 007: attempt {attempt} on ")
    assert ended.stdout.endswith("wrote fetch-007.fits\n") == (status == 0)


def test_views_are_found_by_links() -> None:
    links = [
        f"{SITE}/",
        f"{SITE}/task?name=mail%2F1",
        f"{SITE}/task?name=survey%2F1",
        f"{SITE}/task?name=survey%2F2",
        f"{SITE}/campaign?name=mail",
        f"{SITE}/tasks.csv",
        "https://example.org/elsewhere",
    ]
    assert camera.new_views(links, SITE, {"/"}, "survey") == {
        "/task": f"{SITE}/task?name=survey%2F1",
        "/campaign": f"{SITE}/campaign?name=mail",
    }


def test_names_of_views_differ() -> None:
    names = [camera.view_name(path) for path, _ in NAVIGATION]
    assert "overview" in names
    assert len({*names}) == len(NAVIGATION)


def test_index_shows_every_picture() -> None:
    page = command.index([Path("a-light.png"), Path("b<c.svg")])
    assert '<img src="a-light.png"' in page
    assert "b&lt;c" in page
    assert "b<c" not in page


def test_docs_have_their_pictures() -> None:
    sizes = [(command.IMAGES / f"{name}.webp").stat().st_size for name in command.DOCS]
    assert max(sizes) <= camera.PICTURE_BYTES_MAX
    assert sum(sizes) <= command.DOCS_BYTES_MAX


def noise(width: int, height: int) -> bytes:
    """Return a PNG that compresses badly."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    random_bits = random.Random(1)
    rows = b"".join(b"\0" + random_bits.randbytes(width * 3) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows, 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


@pytest.mark.whole  # a browser takes six seconds of CPU
def test_pictures_of_the_docs_are_small(tmp_path: Path) -> None:
    need("chromium")
    source, target = tmp_path / "noise.png", tmp_path / "noise.webp"
    source.write_bytes(noise(200, 1600))
    with camera.chromium() as browser:
        size = camera.compress(browser, source, target, 1500)
        page = browser.new_page(viewport={"width": 2000, "height": 2000})
        page.goto(target.as_uri())
        shown = page.evaluate("[document.images[0].naturalWidth, document.images[0].naturalHeight]")
    assert shown == [200, 1500]
    assert size == target.stat().st_size <= camera.PICTURE_BYTES_MAX
    assert target.read_bytes()[:4] == b"RIFF"


def test_command_prints_its_help() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "screenshots", "--help"],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--docs" in ended.stdout
