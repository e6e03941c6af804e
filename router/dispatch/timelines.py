"""What the workers of one request report, put together."""

from __future__ import annotations

from itertools import zip_longest

from common.wire.messages import Timeline
from router.dispatch.client import DraftCounts


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


def waited_s(report: Timeline, sent_at: float, answered_at: float) -> float:
    """Seconds that a prompt, sent at `sent_at`, waited for its worker's first step, whose first token came then.

    A worker reads its messages between two steps, so it sees none of the wait for the step that it is in.
    """
    if not sent_at or not report.prefill_s:
        return report.queue_s
    return max(report.queue_s, answered_at - sent_at - report.prefill_s)


def drafts_of(timeline: Timeline) -> DraftCounts:
    return DraftCounts(timeline.num_drafts, timeline.num_draft_tokens, timeline.accepted_places)
