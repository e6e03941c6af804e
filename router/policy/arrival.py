"""What a decode worker will compute when the KV of a prompt arrives there, some seconds from now. Pure.

To judge by its present load makes two pools oscillate: many requests are refused while it is full, and none while their
prompts are still being computed (Qin et al., "Mooncake", FAST 2025, early rejection based on prediction).
"""

from __future__ import annotations

import math

from common.latency import StepShape
from router.fleet import Worker
from router.policy.forecast import model_of, places_of


def rows_at(worker: Worker, after_s: float, num_prompt_tokens: int) -> StepShape:
    """What each step decodes in `after_s` seconds: sequences that will still run, and those that come until then.

    How long a sequence still runs does not depend on how long it has run already, so that so many of them end in each
    second. Those of which nothing is known have `num_prompt_tokens` tokens.
    """
    beat = worker.beat
    num_running = min(beat.num_running, worker.num_requests) if beat is not None else 0
    num_coming = worker.num_requests - num_running
    span_s = max(worker.service_s.value, worker.lasting_s)
    num_left = num_running * math.exp(-after_s / span_s) if span_s > 0 else float(num_running)
    num_rows = min(places_of(worker), round(num_left + num_coming))
    each = beat.num_context_tokens / beat.num_running if beat is not None and beat.num_running else num_prompt_tokens
    return StepShape.of_rows(num_rows, round(num_rows * each))


def token_s_at(worker: Worker, after_s: float, num_tokens: int) -> tuple[float, float]:
    """Seconds that a token of a new answer takes once its prompt of `num_tokens` tokens arrives, and if it ran alone.

    0 of a worker that has computed nothing yet.
    """
    if not worker.step_model.is_known:
        return 0.0, 0.0
    model, own = model_of(worker), StepShape.of_rows(1, num_tokens)
    return model.seconds(rows_at(worker, after_s, num_tokens) + own), model.seconds(own)
