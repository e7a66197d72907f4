"""What is left of a build: from recorded seconds, and from its own where nothing is recorded."""

import pytest

from nxbucket.compile.eta import Eta, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_recorded_seconds_are_shared_out_among_the_jobs_and_run_down(clock: Clock) -> None:
    eta = Eta({"a": 40.0, "b": 20.0, "c": 20.0}, jobs=2, clock=clock)
    assert eta.at_the_start() == "3 programs to compile: ~40 s, by what is recorded"
    eta.started("a")
    eta.started("b")
    clock.now = 15
    assert eta.remaining_s() == 25  # a has 25 s left, b 5, c 20: a is the longest
    eta.finished("b", compiled=True)
    clock.now = 100
    assert eta.remaining_s() == 20  # a takes longer than thought: it counts for nothing
    eta.finished("a", compiled=True)
    eta.finished("c", compiled=False)
    assert eta.left() == "~0 s left"


def test_without_a_record_the_builds_own_compiles_are_the_record(clock: Clock) -> None:
    eta = Eta({"a": None, "b": None, "c": None}, jobs=1, clock=clock)
    assert eta.at_the_start() == "3 programs to compile; no record of how long one takes"
    assert (eta.remaining_s(), eta.left()) == (None, "no record of how long one takes")
    eta.started("a")
    clock.now = 90
    eta.finished("a", compiled=True)
    assert eta.left() == "~3 min 00 s left"


def test_what_failed_or_was_pulled_is_no_record_of_a_compile(clock: Clock) -> None:
    eta = Eta({"a": None, "b": None}, jobs=1, clock=clock)
    eta.started("a")
    eta.finished("a", compiled=False)
    assert eta.remaining_s() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7801, "2 h 10 min"),
    ],
)
def test_a_duration_is_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
