"""What no prediction at a request's arrival can know: the prompts that come later, of which shorter ones pass it.

A virtual worker computes the prompts of a run. For each of them a predictor that knows the worker's state exactly, and
its steps' times, foresees the first token as if no other prompt came. Its error is the floor of the router's, which
also has to guess that state and those times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.prompt_order import VirtualPrompt, VirtualWorker
from common.latency.step_model import StepModel
from common.sequences.prompt_order import prompt_order


def foreseen(prompts: Sequence[VirtualPrompt], model: StepModel, budget: int) -> list[tuple[float, float]]:
    """(foreseen, then happened) seconds to each prompt's first token; prompts come in order of their arrival."""
    worker = VirtualWorker(prompt_order, model, budget)
    ends: list[float] = []
    while len(ends) < len(prompts) or worker.here:
        if not worker.here:
            worker.now = max(worker.now, prompts[len(ends)].accepted_at)
        else:
            worker.step()
        for prompt in _arrived(prompts[len(ends) :], worker.now):
            worker.here.append(prompt)
            ends.append(_alone(worker, prompt, model, budget))
    return [(end - prompt.accepted_at, prompt.ttft_s) for end, prompt in zip(ends, prompts, strict=True)]


def _arrived(prompts: Iterable[VirtualPrompt], now: float) -> list[VirtualPrompt]:
    arrived = []
    for prompt in prompts:
        if prompt.accepted_at > now:
            break
        arrived.append(prompt)
    return arrived


def _alone(worker: VirtualWorker, prompt: VirtualPrompt, model: StepModel, budget: int) -> float:
    """When the prompt's first token would come if the worker got no others than those that are here."""
    copy = VirtualWorker(prompt_order, model, budget)
    copy.now, copy.here = worker.now, [replace(each) for each in worker.here]
    own = copy.here[worker.here.index(prompt)]
    while own.num_remaining:
        copy.step()
    return own.first_token_at
