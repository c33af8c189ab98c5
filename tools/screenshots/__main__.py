"""`./yard screenshots [DIR] [--docs]`: pictures of the page, of `taskyard top` and of the report.

Starts a broker, workers and the page, submits the mail example and a graph of a thousand tasks, and
takes pictures while they run. Kills the broker once before that. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from screenshots import camera, notebook, top
from screenshots.camera import Camera, Shot
from screenshots.scene import ROOT, Scene
from taskyard.web.views.site import NAVIGATION, link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser

IMAGES: Final = ROOT / "docs" / "images"

#: The pictures of the docs, with the height at which each is cut.
DOCS: Final = {
    "overview-light": 900,
    "overview-dark": 900,
    "campaign-light": 1000,
    "task-failed-light": 1000,
    "timeline-light": 700,
    "overview-390": 844,
    "notebook-light": 900,
    "report-light": 1400,
}

#: All pictures of the docs together.
DOCS_BYTES_MAX: Final = 1_200_000

#: Tasks to wait for before the broker is killed, and again before the first picture.
_DONE: Final = 100

#: How long the broker stays away, so that charts show a gap.
_AWAY_SECONDS: Final = 4.0


def main(arguments: Sequence[str]) -> int:
    """Take all pictures. Return 1 if a view complained."""
    parser = argparse.ArgumentParser(prog="./yard screenshots", description="Take screenshots.")
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("screenshots"), metavar="DIR"
    )
    parser.add_argument(
        "--docs", action="store_true", help="also write the pictures of the docs to docs/images"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="factor of the tasks' seconds, for a busy machine (default: 1)",
    )
    wanted = parser.parse_args(arguments)
    directory: Path = wanted.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with camera.chromium() as browser:
        complaints = take_all(browser, directory, wanted.pace)
        if wanted.docs:
            complaints += copy_to_docs(browser, directory, IMAGES)
    pictures = sorted(directory.glob("*.png")) + sorted(directory.glob("*.svg"))
    (directory / "index.html").write_text(index(pictures))
    print(f"{len(pictures)} pictures: {directory / 'index.html'}")
    for line in complaints:
        print(f"  {line}", file=sys.stderr)
    return 1 if complaints else 0


def take_all(browser: Browser, directory: Path, pace: float) -> list[str]:
    """Take pictures of the page while tasks run, then of the report. Return all complaints."""
    with (
        tempfile.TemporaryDirectory(prefix="taskyard-screenshots-") as temporary,
        Scene(Path(temporary)) as scene,
    ):
        taker = Camera(browser, directory)
        taker.open_page(scene.address)
        scene.load_survey(pace)
        scene.load_mail()
        scene.wait_for_done(_DONE)
        scene.kill_broker()
        time.sleep(_AWAY_SECONDS)
        scene.start_broker()
        scene.wait_for_done(2 * _DONE)
        for shot in page_shots(scene, taker):
            print(shot.name, flush=True)
        file = scene.directory / "notebook.html"
        file.write_text(notebook.page(scene.state, "survey", scene.task_of_each_kind()))
        taker.take(Shot("notebook", file.as_uri()))
        with ThreadPoolExecutor(1) as other:  # the browser has an event loop in this thread
            other.submit(top.capture, scene.state, directory).result()
        print("waiting for the end of the survey", flush=True)
        scene.wait_for_end()
        print("report", flush=True)
        scene.taskyard("report", "--campaign", "survey", "--out", "report")
        taker.take(Shot("report", (scene.directory / "report" / "report.html").as_uri()))
        return taker.complaints


def page_shots(scene: Scene, taker: Camera) -> Iterator[Shot]:
    """Take pictures of every view of the page, and yield each."""
    root = scene.address.partition("/?")[0]
    waiting = {path: root + path for path, _ in NAVIGATION}
    seen: set[str] = set()
    while waiting:
        path, address = next(iter(waiting.items()))
        del waiting[path]
        seen.add(path)
        shot = Shot(camera.view_name(path), address)
        links = taker.take(shot)
        waiting |= camera.new_views(links, root, {*seen, *waiting}, "survey")
        yield shot
    more = {"tasks-failed": link("/tasks", filter="--campaign survey --failed")}
    for state, name in scene.task_of_each_kind().items():
        more[f"task-{state}"] = link("/task", name=name)
    for name, address in more.items():
        shot = Shot(name, root + address)
        taker.take(shot)
        yield shot


def copy_to_docs(browser: Browser, directory: Path, images: Path) -> list[str]:
    """Write the pictures of the docs. Return complaints about their size."""
    total = 0
    for name, height_max in DOCS.items():
        (source,) = directory.glob(f"{name}.*g")
        total += camera.compress(browser, source, images / f"{name}.webp", height_max)
    if total > DOCS_BYTES_MAX:
        return [f"docs/images: {total:,} bytes, more than {DOCS_BYTES_MAX:,}"]
    return []


def index(pictures: Sequence[Path]) -> str:
    """Return a page with all pictures."""
    figures = "".join(
        f'<figure id="{escape(one.stem)}"><figcaption>{escape(one.stem)}</figcaption>'
        f'<a href="{escape(one.name)}"><img src="{escape(one.name)}" loading="lazy"></a></figure>\n'
        for one in pictures
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">\n'
        "<title>Taskyard in pictures</title>\n"
        "<style>body{font:16px sans-serif;display:flex;flex-wrap:wrap;gap:1em;align-items:start}"
        "figure{margin:0}img{max-width:30em;max-height:40em;border:1px solid #8888}</style>\n"
        f"{figures}</html>\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
