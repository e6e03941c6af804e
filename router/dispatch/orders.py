"""The messages with which a router gives workers a request. Pure."""

from __future__ import annotations

from common.wire.messages import DecodeRequest, KVTarget, PrefillRequest
from router.dispatch.request_state import RequestState
from router.fleet import Worker
from router.policy import Fetch


def decode_request(
    state: RequestState,
    source: Worker | None,
    now: float,
    *,
    serial: int,
    num_output: int | None = None,
    num_reserved: int = 0,
    fetch: Fetch | None = None,
) -> DecodeRequest:
    """The order for a decode worker, booked as `serial`; the worker `source` computes or has the KV.

    `num_output`: output tokens in the prompt, by default the attempt's. Without `source` it takes `fetch` of it.
    """
    request = state.request
    num_output = state.num_base_tokens if num_output is None else num_output
    return DecodeRequest(
        request_id=request.request_id,
        attempt=state.attempt,
        prompt=state.packed_prompt(num_output),
        params=request.params,
        prefill_worker=source.worker_id if source else "",
        num_output_tokens=num_output,
        cache_salt=request.cache_salt,
        deadline_s=state.remaining_s(now),
        ttft_s=state.first_token_s(now),
        traceparent=request.traceparent,
        num_reserved_tokens=num_reserved,
        serial=serial,
        tpot_s=request.tpot_s,
        priority=request.priority,
        adapter=request.adapter,
        peer=fetch.peer if fetch is not None else None,
    )


def prefill_request(
    state: RequestState, decode: Worker | None, now: float, *, serial: int, fetch: Fetch | None = None
) -> PrefillRequest:
    """The order for a prefill worker, booked as `serial`. `decode` gets the KV; None wants a first token alone."""
    request = state.request
    return PrefillRequest(
        request_id=request.request_id,
        attempt=state.attempt,
        prompt=state.packed_prompt(state.num_base_tokens),
        params=request.params,
        decode=kv_target(decode) if decode is not None else None,
        num_output_tokens=state.num_base_tokens,
        cache_salt=request.cache_salt,
        deadline_s=state.remaining_s(now),
        ttft_s=state.first_token_s(now),
        traceparent=request.traceparent,
        serial=serial,
        tpot_s=request.tpot_s,
        priority=request.priority,
        adapter=request.adapter,
        peer=fetch.peer if fetch is not None else None,
    )


def kv_target(decode: Worker) -> KVTarget:
    """Where a decode worker takes KV."""
    hello = decode.identity
    return KVTarget(hello.worker_id, hello.epoch, hello.kv_address)
