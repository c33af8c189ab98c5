"""An executor's own processes: how their starts are numbered."""

from taskyard.process.supervisor import IncarnationOptions


def test_every_start_of_a_worker_has_the_next_number_and_replaces_all_before_it() -> None:
    incarnations = IncarnationOptions()
    starts = [incarnations.next() for _ in range(3)]
    first = int(starts[0][1])
    assert starts == [
        ("--incarnation", str(first + number), "--replaces", str(first)) for number in range(3)
    ]


def test_two_workers_have_numbers_of_their_own() -> None:
    assert IncarnationOptions().next() != IncarnationOptions().next()
