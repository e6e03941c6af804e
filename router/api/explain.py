"""Response of `/explain`: why a request ran where it did, and its predicted and measured times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from router.dispatch import Step
from router.generation import ChoiceHistory, RequestHistoryEntry
from router.policy import Forecast, WeighedWorker, reason, weighed

SECOND_MS = 1e3


def explained(entry: RequestHistoryEntry) -> dict[str, Any]:
    """Return the response body for one request. Times are milliseconds, offsets are from the arrival of its head."""
    arrived = time.time() - (time.perf_counter() - entry.began)
    return {
        "request_id": entry.request_id,
        "id": entry.id,
        "path": entry.path,
        "model": entry.model,
        "key": entry.key,
        "class": entry.request_class,
        "state": _state(entry),
        "status": None if entry.is_running else entry.status,
        "error": entry.error,
        "reason": entry.reason,
        "arrived_at": datetime.fromtimestamp(arrived, UTC).isoformat(timespec="milliseconds"),
        "total_ms": _ms(entry.ended - entry.began),
        "prompt_tokens": entry.num_prompt_tokens,
        "cached_tokens": entry.num_cached_tokens,
        "output_tokens": entry.num_output_tokens,
        "num_choices": entry.num_choices,
        "choices": [_choice(entry, one) for one in entry.choices],
    }


def _state(entry: RequestHistoryEntry) -> str:
    if entry.is_running:
        return "running"
    return "disconnected" if entry.client_left else "failed" if entry.error else "finished"


def _choice(entry: RequestHistoryEntry, choice: ChoiceHistory) -> dict[str, Any]:
    placed = [step for step in choice.steps if step.kind == "placed" and step.choice is not None]
    last = placed[-1].choice if placed else None
    line = choice.timeline
    forecast = line.forecast if line is not None else last.forecast if last is not None else Forecast()
    return {
        "index": choice.index,
        "output_tokens": choice.num_tokens,
        "finish_reason": choice.finish_reason,
        "attempts": line.num_attempts if line is not None else 1 + sum(one.kind == "failed" for one in choice.steps),
        "preemptions": line.num_preemptions if line is not None else 0,
        "transfer_bytes": line.transfer_bytes if line is not None else 0,
        "stages": list(_stages(entry, choice, forecast)),
        "goals": _goals(entry, choice, forecast),
        "steps": [
            {"at_ms": _ms(step.at - entry.began), "kind": step.kind, "detail": step.detail} for step in choice.steps
        ],
        "omitted_steps": choice.num_omitted_steps,
        "decisions": [_decision(entry, step) for step in placed],
    }


def _stages(entry: RequestHistoryEntry, choice: ChoiceHistory, forecast: Forecast) -> Iterator[dict[str, Any]]:
    """Yield the stages that happened, in order. The KV transfer overlaps with the prefill."""
    accepted = next((step.at for step in choice.steps if step.kind == "accepted"), None)
    placed = next((step.at for step in choice.steps if step.kind == "placed"), None)
    known, line = forecast.is_known, choice.timeline

    def stage(name: str, began: float, took_s: float, predicted_s: float | None, where: str, waits_for: str) -> Any:
        return {
            "name": name,
            "began_ms": _ms(began - entry.began),
            "took_ms": _ms(took_s),
            "predicted_ms": None if predicted_s is None or not known else _ms(predicted_s),
            "where": where,
            "waits_for": waits_for,
        }

    end = accepted if accepted is not None else entry.ended
    yield stage("receive", entry.began, end - entry.began, None, "router", "body, tokenizer and admission")
    if accepted is None:
        return
    queued_s = (placed if placed is not None else entry.ended) - accepted
    why = next((step.detail for step in choice.steps if step.kind in ("held", "waits")), "")
    yield stage("router queue", accepted, queued_s, None, "router", why)
    if line is None or placed is None or not choice.first_at:
        if placed is not None:
            yield stage("first token", placed, entry.ended - placed, forecast.ttft_s, "", "a worker's first token")
        return
    computed_on = line.prefill_worker or line.decode_worker
    prefill_at = choice.first_at - line.prefill_s
    wait_s = max(0.0, line.queue_s - queued_s)
    yield stage("worker queue", prefill_at - wait_s, wait_s, forecast.wait_s, computed_on, "earlier prompts and steps")
    yield stage("prefill", prefill_at, line.prefill_s, forecast.prompt_s, computed_on, "first token")
    if line.grant_wait_s or line.transfer_s:
        to = f"{line.prefill_worker} to {line.decode_worker}"
        yield stage("grant", prefill_at, line.grant_wait_s, None, line.decode_worker, "KV blocks")
        exposed_s, done = line.exposed_transfer_s, choice.first_at + line.exposed_transfer_s
        began = max(prefill_at, done - line.transfer_s)
        yield stage("KV transfer", began, line.transfer_s, None, to, "first to last KV block")
        waits_for = "the part that prefill does not hide"
        yield stage("exposed transfer", choice.first_at, exposed_s, forecast.transfer_s, to, waits_for)
    if choice.num_tokens > 1:
        decode_s = choice.last_at - choice.first_at
        predicted_s = forecast.token_s * (choice.num_tokens - 1) if forecast.token_s else None
        yield stage("decode", choice.first_at, decode_s, predicted_s, line.decode_worker, "further tokens")


def _goals(entry: RequestHistoryEntry, choice: ChoiceHistory, forecast: Forecast) -> dict[str, Any]:
    accepted = next((step.at for step in choice.steps if step.kind == "accepted"), entry.began)
    ttft_s = choice.first_at - accepted if choice.first_at else None
    token_s = (choice.last_at - choice.first_at) / (choice.num_tokens - 1) if choice.num_tokens > 1 else None
    return {
        "ttft": _goal(entry.ttft_s, ttft_s, forecast.ttft_s if forecast.is_known else 0.0),
        "tpot": _goal(entry.tpot_s, token_s, forecast.token_s if forecast.is_known else 0.0),
    }


def _goal(goal_s: float, measured_s: float | None, predicted_s: float) -> dict[str, Any]:
    return {
        "goal_ms": _ms(goal_s) if goal_s > 0 else None,
        "predicted_ms": _ms(predicted_s) if predicted_s > 0 else None,
        "measured_ms": None if measured_s is None else _ms(measured_s),
        "met": None if measured_s is None or goal_s <= 0 else measured_s <= goal_s,
    }


def _decision(entry: RequestHistoryEntry, step: Step) -> dict[str, Any]:
    choice = step.choice
    assert choice is not None
    return {
        "at_ms": _ms(step.at - entry.began),
        "kind": step.detail,
        "prefill_worker": choice.prefill.worker_id if choice.prefill is not None else "",
        "decode_worker": choice.decode.worker_id if choice.decode is not None else "",
        "reason": reason(choice) or "The routing policy compares no predictions.",
        "candidates": [_candidate(one) for one in weighed(choice)],
    }


def _candidate(one: WeighedWorker) -> dict[str, Any]:
    forecast = one.forecast
    return {
        "worker": one.worker,
        "role": one.role,
        "chosen": one.is_chosen,
        "computes_prompt": one.computes_prompt,
        "cost_ms": _ms(one.cost_s),
        "queue_ms": _ms(forecast.wait_s),
        "prefill_ms": _ms(forecast.prompt_s),
        "lag_ms": _ms(forecast.lag_s),
        "transfer_ms": _ms(forecast.transfer_s),
        "slot_ms": _ms(forecast.place_s),
        "token_ms": _ms(forecast.token_s),
        "delays_others_ms": _ms(forecast.delay_s),
        "is_measured": forecast.is_known,
        "requests": one.num_requests,
        "cached_tokens": one.num_cached_tokens,
        "problem": one.problem,
    }


def _ms(seconds: float) -> float | None:
    """Return milliseconds, None for an unlimited time."""
    return round(seconds * SECOND_MS, 3) if math.isfinite(seconds) else None
