"""Orders to load adapters that no worker can follow."""

import pytest

from common.errors import InvalidRequest, Unavailable


async def test_workers_without_places_for_adapters_are_the_askers_matter(cluster):
    dispatcher = await cluster.start()
    with pytest.raises(InvalidRequest, match="none of the 2 ready workers accepts adapters: .*--max-loras"):
        await dispatcher.adapters.load("a", "/adapters/a", in_place=False)


async def test_without_workers_it_is_worth_asking_again(cluster):
    dispatcher = await cluster.start(prefill=0, decode=0)
    with pytest.raises(Unavailable, match="No worker is ready"):
        await dispatcher.adapters.load("a", "/adapters/a", in_place=False)
