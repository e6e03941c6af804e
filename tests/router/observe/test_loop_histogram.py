"""The histogram of the event loop shows what Prometheus's own does, sample by sample."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.observe.metrics import LoopHistogram

BUCKETS = (0.001, 0.05, 1.0, 60.0)
VALUES = (0.0, 0.001, 0.0011, 0.05, 0.7, 0.7, 60.0, 61.0)


def shown(registry: CollectorRegistry) -> tuple[list[str], dict[str, float]]:
    """Every line, and the values by name and labels but for the time of creation."""
    page = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = {f"{one.name}{sorted(one.labels.items())}": one.value for one in samples if "created" not in one.name}
    return [line.rsplit(" ", 1)[0] for line in page.splitlines()], found


def test_it_shows_what_prometheus_shows() -> None:
    ours, theirs, labels = CollectorRegistry(), CollectorRegistry(), {"model_name": "m", "engine": "router"}
    mine = LoopHistogram("vllm:some_seconds", "Some time", labels, BUCKETS)
    ours.register(mine)
    usual = Histogram("vllm:some_seconds", "Some time", list(labels), buckets=BUCKETS, registry=theirs)
    assert not any(shown(ours)[1].values())
    for value in VALUES:
        mine.observe(value)
        usual.labels(*labels.values()).observe(value)
    assert shown(ours) == shown(theirs)


def test_equal_values_count_at_once() -> None:
    one, many = (LoopHistogram("some_seconds", "Some time", {}, BUCKETS) for _ in range(2))
    for _ in range(4):
        one.observe(0.25)
    many.observe(0.25, 4)
    pages = []
    for histogram in (one, many):
        registry = CollectorRegistry()
        registry.register(histogram)
        pages.append(shown(registry))
    assert pages[0] == pages[1] and pages[0][1]["some_seconds_sum[]"] == 1.0
