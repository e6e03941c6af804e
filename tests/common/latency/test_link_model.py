import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.latency.link_model import LinkFit, LinkFits, LinkModel, Links

BLOCK = 65_536


def fitted(latency_s, byte_s, sizes, noise=0.0, seed=1):
    chance, fit = random.Random(seed), LinkFit()
    for num_blocks in sizes:
        seconds = (latency_s + byte_s * num_blocks * BLOCK) * (1.0 + chance.uniform(-noise, noise))
        fit.observe(num_blocks * BLOCK, seconds, BLOCK)
    return fit.model


def test_latency_and_rate_are_found_behind_noise():
    model = fitted(0.002, 1e-9, [1, 40, 7, 300, 2, 90] * 20, noise=0.2)
    assert model.latency_s == pytest.approx(0.002, rel=0.2)
    assert 1 / model.byte_s == pytest.approx(1e9, rel=0.2)
    assert model.error < 0.2
    assert model.seconds(1000) == pytest.approx(0.0675, rel=0.2)


def test_the_fit_follows_a_link_that_becomes_slower():
    fit = LinkFit()
    for byte_s in [1e-9] * 100 + [1e-8] * 300:
        for num_blocks in (10, 200):
            fit.observe(num_blocks * BLOCK, 0.001 + byte_s * num_blocks * BLOCK, BLOCK)
    assert fit.model.byte_s == pytest.approx(1e-8, rel=0.2)


def test_a_stall_counts_for_little():
    fit = LinkFit()
    for turn in range(60):
        num_blocks = (10, 200)[turn % 2]
        stall_s = 2.0 if turn % 20 == 7 else 0.0
        fit.observe(num_blocks * BLOCK, 0.001 + 1e-9 * num_blocks * BLOCK + stall_s, BLOCK)
    assert fit.model.seconds(200) == pytest.approx(0.0141, rel=0.1)


def test_transfers_of_one_size_are_predicted_although_they_do_not_tell_latency_from_rate():
    assert fitted(0.002, 1e-9, [50] * 9).seconds(50) == pytest.approx(0.00528, rel=0.01)


def test_ways_are_told_apart_and_the_usual_one_is_that_of_most_transfers():
    fits = LinkFits()
    assert not fits.links.usual.is_known
    fits.observe(BLOCK, 0.5, BLOCK, shared=False)
    for _ in range(2):
        fits.observe(BLOCK, 0.001, BLOCK, shared=True)
    assert fits.links.tcp.num_transfers == 1
    assert fits.links.usual is fits.links.shm
    assert Links().usual == LinkModel()


samples = st.lists(st.tuples(st.integers(0, 2**40), st.floats(0.0, 1e4)), max_size=40)


@given(samples)
def test_no_transfer_makes_a_model_that_cannot_be_sent(found):
    """Coefficients stay finite and at least 0, whatever is observed."""
    fit = LinkFit()
    for num_bytes, seconds in found:
        fit.observe(num_bytes, seconds, BLOCK)
    model = fit.model
    assert 0.0 <= model.latency_s <= 1e6 and 0.0 <= model.byte_s <= 1e6 and 0.0 <= model.error <= 1.0
    assert model.num_transfers == len(found)


def test_a_model_can_be_sent_whatever_transfers_take() -> None:
    """Routers drop a heartbeat with a coefficient out of bounds, so the worker would count as dead."""
    found = LinkFit()
    for seconds in (1e-9, 1e9, 3e8, 1e12):
        found.observe(1, seconds, 1)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found.model), type=LinkModel) == found.model
