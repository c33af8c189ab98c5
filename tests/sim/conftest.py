"""Counts of the simulator at the end of a run: schedules, events, restarts, planted bugs."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name.startswith("simulated "):
                counts[name.removeprefix("simulated ")] += int(str(value))
    if counts:
        told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(f"simulated: {told}")
