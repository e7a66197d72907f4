"""What is said of bytes on their way, where there is no terminal."""

import pytest

from nxbucket.toolkit.transfer_progress import byte_progress


def test_a_long_transfer_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("nxbucket.toolkit.transfer_progress.time.monotonic", lambda: now)
    with byte_progress("pushing", 30_000_000) as progress:
        progress(1_000_000)
        now += 11
        progress(3_000_000)
        now += 1
        progress(1_000_000)
        now += 11
        progress(-2_000_000)
    assert capsys.readouterr().err == "pushing: 4 of 30 MB\npushing: 3 of 30 MB\n"


def test_a_short_one_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress("pulling", None) as progress:
        progress(600_000_000)
    assert capsys.readouterr().err == ""
