"""Campaigns through the whole broker: by batch, journal and shape."""

from statistics import mean
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from bench.peers import PeerTask
from bench.processes import BrokerBench
from bench.settings import Kind, Settings
from bench.table import TableLine, table_line
from bench.targets import BROKER_TASK_US, SHAPE_COST, Target
from bench.workloads import SHAPES, Shape
from taskyard.core.events import RulesSet

WORKERS: Final = 2

#: Tasks by batch size: enough to run for a second or more.
COUNTS: Final = {1: 20_000, 10: 100_000, 100: 300_000, 1000: 500_000}

#: The batch size that has floors.
BATCH: Final = 100

COUNT_SHAPES: Final = 1_000_000


class Campaign(Struct, frozen=True):
    """Tasks from one producer to two workers."""

    count: int
    batch: int = BATCH
    kind: Kind = "durable"
    #: Workers start with the producer, else when all tasks are submitted.
    concurrent: bool = False
    shape: Shape = "flat"
    #: The rules of services, if any.
    rules: RulesSet | None = None


class CampaignRun(Struct):
    """The cost of a campaign."""

    count: int
    #: CPU time of all processes, and the broker's share of it.
    cpu_ns: int
    broker_ns: int
    wall_ns: int

    @property
    def task_us(self) -> float:
        return self.cpu_ns / self.count / 1e3

    @property
    def broker_us(self) -> float:
        return self.broker_ns / self.count / 1e3

    @property
    def tasks_per_second(self) -> float:
        return self.count * 1e9 / self.wall_ns


def measure(campaign: Campaign, settings: Settings) -> CampaignRun:
    """Run a campaign once, with a broker of its own."""
    batch, count = campaign.batch, campaign.count
    with BrokerBench(campaign.kind, profile=settings.profile, rules=campaign.rules) as broker_bench:
        produces = PeerTask(
            "produce", broker_bench.endpoint, count=count, batch=batch, shape=campaign.shape
        )
        works = [
            PeerTask("work", broker_bench.endpoint, number, batch=batch)
            for number in range(WORKERS)
        ]
        producer, *workers = broker_bench.start_peers(produces, *works)
        cpu_ns, broker_ns = broker_bench.cpu_ns(), broker_bench.broker.cpu_ns()
        first, then = (workers, []) if campaign.concurrent else ([], workers)
        for peer in (producer, *first):
            peer.send_go()
        produced = producer.done()
        for peer in then:
            peer.send_go()
        end_ns = broker_bench.wait_for(workers, count)
        return CampaignRun(
            count,
            broker_bench.cpu_ns() - cpu_ns,
            broker_bench.broker.cpu_ns() - broker_ns,
            end_ns - produced.start_ns,
        )


def measure_repeatedly(campaign: Campaign, settings: Settings) -> list[CampaignRun]:
    return [measure(campaign, settings) for _ in settings.times()]


def batches(settings: Settings) -> list[TableLine]:
    """Measure campaigns by batch size, durable and in memory. The cost is the mean of two runs:
    workers start after the producer, and with it."""
    lines: list[TableLine] = []
    for kind, target in BROKER_TASK_US.items():
        for batch, count in COUNTS.items():
            what = f"batch {batch}, {kind}"
            settings.say(f"{what}: {settings.count(count):,} tasks")
            before = Campaign(settings.count(count), batch, kind)
            backlog = measure_repeatedly(before, settings)
            concurrent = measure_repeatedly(replace(before, concurrent=True), settings)
            lines += _batch_lines(what, backlog, concurrent, target if batch == BATCH else None)
    return lines


def _batch_lines(
    what: str, backlog: list[CampaignRun], concurrent: list[CampaignRun], target: Target | None
) -> list[TableLine]:
    pairs = [*zip(backlog, concurrent, strict=True)]
    costs = [mean(run.task_us for run in pair) for pair in pairs]
    of_broker = [mean(run.broker_us for run in pair) for pair in pairs]
    rates = [run.tasks_per_second for run in concurrent]
    return [
        table_line(what, "µs/task", costs, target),
        table_line("  backlog first", "µs/task", [run.task_us for run in backlog]),
        table_line("  both at once", "µs/task", [run.task_us for run in concurrent]),
        table_line("  of it the broker", "µs/task", of_broker),
        table_line("  both at once", "tasks/s", rates, higher_is_better=True),
    ]


def shapes(settings: Settings) -> list[TableLine]:
    """Compare chains of 10 and lanes of 10 with flat tasks: durable, workers after the producer."""
    lines: list[TableLine] = []
    count = settings.count(COUNT_SHAPES)
    flat_us = 0.0
    for shape in SHAPES:
        settings.say(f"{shape}: {count:,} tasks")
        runs = measure_repeatedly(Campaign(count, shape=shape), settings)
        lines.append(table_line(f"{shape}, whole broker", "µs/task", [run.task_us for run in runs]))
        if shape == "flat":
            flat_us = lines[-1].best
        else:
            costs = [run.task_us / flat_us for run in runs]
            lines.append(table_line(f"{shape} over flat", "×", costs, SHAPE_COST))
    return lines
