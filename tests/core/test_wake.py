"""Workers that are called, not served: whatever becomes ready is called for."""

from taskyard.core.effects import Effect, Wake
from taskyard.core.events import Outcome
from tests.core.kit import Yard, assigned


def calls(effects: list[Effect]) -> list[bytes]:
    return [effect.worker for effect in effects if isinstance(effect, Wake)]


def test_worker_is_called_again_for_the_task_that_it_failed() -> None:
    yard = Yard()
    yard.join(b"w", wants_wake=True)
    yard.ask(b"w", parks=True)
    assert calls(yard.submit(b"a", retry_delays_ns=(1,))) == [b"w"]
    yard.ask(b"w")
    yard.report(b"w", b"a", Outcome.FAILED)
    yard.ask(b"w", parks=True)
    assert calls(yard.later(1)) == [b"w"]


def test_second_worker_is_called_when_a_failed_task_comes_due_beside_another() -> None:
    yard = Yard()
    for worker in (b"one", b"two"):
        yard.join(worker, wants_wake=True)
    yard.ask(b"one", parks=True)
    assert calls(yard.submit(b"a", retry_delays_ns=(1,))) == [b"one"]
    yard.ask(b"one")
    yard.report(b"one", b"a", Outcome.FAILED)
    for worker in (b"one", b"two"):
        yard.ask(worker, parks=True)
    first = calls(yard.submit(b"b"))
    assert sorted(first + calls(yard.later(0.5))) == [b"one", b"two"]


def test_worker_that_was_called_twice_at_once_does_not_keep_another_from_being_called() -> None:
    yard = Yard()
    for worker in (b"u", b"w"):
        yard.join(worker, wants_wake=True)
    yard.ask(b"u", parks=True)
    assert calls(yard.submit(b"a")) == [b"u"]
    assert calls(yard.ask(b"u", parks=True)) == [b"u"]  # it asked again before the call reached it
    yard.ask(b"w", parks=True)
    assert calls(yard.submit(b"b")) == [b"w"]


def test_another_worker_is_called_when_the_called_one_takes_a_task_of_another_service() -> None:
    yard = Yard()
    yard.join(b"u", wants_wake=True, services=(b"x", b"y"))
    yard.ask(b"u", parks=True)
    assert calls(yard.submit(b"y0", service=b"y")) == [b"u"]
    yard.join(b"w", wants_wake=True, services=(b"y",))
    yard.ask(b"w", parks=True)
    yard.submit(b"x0", service=b"x")
    effects = yard.ask(b"u")
    assert (assigned(effects), calls(effects)) == ([b"x0"], [b"w"])
