"""Sums of what decode workers report of one request."""

from __future__ import annotations

from itertools import zip_longest

from common.wire.messages import Timeline
from router.streams.client import DraftCounts


def added(past: Timeline, spent: Timeline) -> Timeline:
    """What adds up over the decode workers of a request, one after the other."""
    places = zip_longest(past.accepted_places, spent.accepted_places, fillvalue=0)
    return Timeline(
        decode_s=past.decode_s + spent.decode_s,
        num_preemptions=past.num_preemptions + spent.num_preemptions,
        num_drafts=past.num_drafts + spent.num_drafts,
        num_draft_tokens=past.num_draft_tokens + spent.num_draft_tokens,
        accepted_places=tuple(map(sum, places)),
    )


def drafts_of(timeline: Timeline) -> DraftCounts:
    return DraftCounts(timeline.num_drafts, timeline.num_draft_tokens, timeline.accepted_places)
