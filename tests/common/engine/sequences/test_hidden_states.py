"""Places of hidden states: the next chunk of a sequence reads what its last one kept, whatever was accepted."""

from __future__ import annotations

import random

from common.engine.models.batch import NO_SLOT
from common.engine.sequences.hidden_states import HiddenStateSlots


class Text:
    """Stands for a sequence."""


def test_the_next_chunk_finds_the_state_of_the_token_before_it() -> None:
    places, text = HiddenStateSlots(4), Text()
    assert places.take(text, 0, 10).before == NO_SLOT
    kept = places.at(text, 9)
    assert kept != NO_SLOT and places.at(text, 8) == NO_SLOT
    assert places.take(text, 10, 6).before == kept
    assert places.take(text, 17, 1).before == NO_SLOT  # it lacks a token


def test_each_draft_token_has_a_place_until_it_is_known_which_are_accepted() -> None:
    places, text = HiddenStateSlots(8), Text()
    taken = places.take(text, 5, 1, num_drafts=3)
    assert len(set(taken.kept)) == 4
    for accepted in range(4):
        assert places.at(text, 5 + accepted) == taken.kept[accepted]
    assert places.take(text, 8, 1).before == taken.kept[2]
    assert places.at(text, 7) == NO_SLOT  # only the newest step's are held


def test_places_run_out_and_come_back() -> None:
    places, texts = HiddenStateSlots(3), [Text() for _ in range(3)]
    assert NO_SLOT not in places.take(texts[0], 0, 4).kept
    assert places.take(texts[1], 0, 1, num_drafts=3).kept[2:] == [NO_SLOT, NO_SLOT]
    assert list(places.take(texts[2], 0, 1).kept) == [NO_SLOT]
    places.retain(lambda each: each is texts[2])
    assert len(places) == 0
    assert NO_SLOT not in places.take(texts[2], 1, 1, num_drafts=2).kept


def test_no_place_is_held_twice() -> None:
    source, places, texts = random.Random(1), HiddenStateSlots(12), [Text() for _ in range(5)]
    ends = [0] * 5
    for _ in range(300):
        which = source.randrange(5)
        num_tokens, num_drafts = source.randrange(1, 4), source.randrange(4)
        places.take(texts[which], ends[which], num_tokens, num_drafts)
        ends[which] += num_tokens + source.randrange(num_drafts + 1)
        if source.random() < 0.1:
            gone = source.randrange(5)
            places.retain(lambda each, gone=gone: each is not texts[gone])
        held = [place for of_one in places._held.values() for place in of_one.values()]
        assert sorted([*held, *places._free]) == list(range(12))
