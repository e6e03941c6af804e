"""Rates that change over time, against what is expected of them."""

import itertools

import pytest

from benchmarks.load.arrivals import RateProfile


def counts(profile: RateProfile, edges: list[float], seeds: int = 200) -> list[float]:
    """Mean arrivals between neighbouring edges over many seeds."""
    arrivals = [at for seed in range(seeds) for at in profile.arrivals(seed)]
    return [sum(low <= at < high for at in arrivals) / seeds for low, high in itertools.pairwise(edges)]


def test_steps_have_their_rates() -> None:
    profile = RateProfile.steps("2x10,0x5,8x10")
    assert (profile.seconds, profile.num_expected) == (25.0, 100.0)
    assert counts(profile, [0, 10, 15, 25]) == pytest.approx([20, 0, 80], rel=0.03)
    assert [profile.rate_at(at) for at in (-1, 0, 12, 15, 25)] == [0, 2, 0, 8, 0]


def test_a_ramp_grows_evenly() -> None:
    profile = RateProfile.ramp("0:10", 20.0)
    assert counts(profile, [0, 5, 10, 15, 20]) == pytest.approx([6.25, 18.75, 31.25, 43.75], rel=0.05)
    assert profile.rate_at(5.0) == pytest.approx(2.5)


def test_a_ramp_may_fall_to_nothing() -> None:
    assert counts(RateProfile.steps("10-0x20"), [0, 10, 20]) == pytest.approx([75, 25], rel=0.03)


def test_a_burst_lies_in_the_middle() -> None:
    profile = RateProfile.burst("1:20x4", 20.0)
    assert counts(profile, [0, 8, 12, 20]) == pytest.approx([8, 80, 8], rel=0.05)


def test_counts_vary_as_those_of_a_poisson_process() -> None:
    nums = [len(list(RateProfile.ramp("2:6", 10.0).arrivals(seed))) for seed in range(400)]
    mean = sum(nums) / len(nums)
    variance = sum((num - mean) ** 2 for num in nums) / len(nums)
    assert mean == pytest.approx(40, rel=0.03) and variance == pytest.approx(40, rel=0.2)


def test_arrivals_ascend_and_repeat_with_the_seed() -> None:
    profile = RateProfile.steps("5x3,1-9x3,2x3")
    times = list(profile.arrivals(7))
    assert times == sorted(times) == list(profile.arrivals(7)) != list(profile.arrivals(8))
    assert times[0] > 0.0 and times[-1] <= 9.0


@pytest.mark.parametrize("text", ["", "2", "2x", "x3", "2x3,", "2:3", "0x5", "2x0", "-1x4"])
def test_steps_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not|above 0|longer"):
        RateProfile.steps(text)


def test_a_burst_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        RateProfile.burst("1:5x20", 20.0)
