import asyncio

from prometheus_client import CollectorRegistry

from common.machine.process_metrics import register_process

LABELS = {"engine": "decode-0"}


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    register_process(made, LABELS)
    return made


def test_the_process_tells_its_memory_and_files() -> None:
    found = registry()
    assert (found.get_sample_value("process_resident_memory_bytes") or 0) > 2**20
    assert (found.get_sample_value("process_open_fds") or 0) >= 3


async def test_tasks_of_the_loop_are_counted() -> None:
    found = registry()
    before = found.get_sample_value("diptych_asyncio_tasks", LABELS)
    waiting = asyncio.create_task(asyncio.Event().wait())
    assert found.get_sample_value("diptych_asyncio_tasks", LABELS) == (before or 0) + 1
    waiting.cancel()


def test_without_a_loop_there_are_no_tasks() -> None:
    assert registry().get_sample_value("diptych_asyncio_tasks", LABELS) == 0
