"""One step's inputs as tensors, computed once and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from common.blocks import Window
from common.engine.kv import KVCache
from common.errors import BlockError, ContextLengthExceeded, InvalidRequest
from common.model_files import ModelConfig
from kernels import NO_ADAPTER, AttentionPlan, QuerySpan, plan_attention, to_device

if TYPE_CHECKING:
    from common.wire import SamplingParams

NO_SLOT, ROW_BEFORE = -1, -2
"""Special indices of a hidden state: none, or the state that the preceding row produces in the same step."""


class SequenceChunk(NamedTuple):
    """Request to run `token_ids`, which follow the `start` tokens whose KV is cached.

    `block_table` lists the sequence's blocks in order and may be longer than needed. Entries outside the windows of all
    layers may be holes (`common/blocks/window.py`). With `sample`, the runner returns the logits after the chunk's last
    token; with `all_logits`, those after each token. `adapter` is the adapter slot of the tokens. A step that samples
    on the device uses `params`; without `params` it samples greedily.

    For a model with a draft head, `before` is the slot of the hidden state of the token before the chunk, or
    ROW_BEFORE. `kept` is the slot that receives the hidden state of the chunk's last token.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool = True
    all_logits: bool = False
    adapter: int = NO_ADAPTER
    params: SamplingParams | None = None
    before: int = NO_SLOT
    kept: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden-state slots per row of a step, int64 [T]: the slot (or ROW_BEFORE) to read, and the slot to write.

    NO_SLOT means zeros as input, and no output.
    """

    before: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All chunks of a step, flattened: T tokens, n sampled rows.

    token_ids, positions   int64 [T]
    slots                  int64 [T], block * block_size + slot within the block, where each token's KV is written
    sampled                int64 [n], rows of [T] whose logits are needed; None for all T rows
    plan                   attention plan, shared by all layers
    adapters               int64 [T], adapter slots of the rows; None if no row uses one
    hidden                 hidden-state slots; None for a model without a draft head
    """

    num_tokens: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor | None
    plan: AttentionPlan
    adapters: Tensor | None = None
    hidden: HiddenRows | None = None

    @classmethod
    def build(cls, chunks: Sequence[SequenceChunk], config: ModelConfig, kv: KVCache) -> ForwardBatch:
        """Flatten `chunks`. Raises BlockError, InvalidRequest or ContextLengthExceeded; does not access KV.

        The host does not wait for steps in flight on the device.
        """
        if not chunks:
            raise BlockError("a step has no chunks")
        spans: list[QuerySpan] = []
        sampled: list[int] = []
        token_ids: list[int] = []
        for chunk in chunks:
            check_chunk(chunk, config, kv)
            spans.append(QuerySpan(len(token_ids), len(chunk.token_ids), chunk.start, chunk.block_table))
            token_ids.extend(chunk.token_ids)
            if chunk.all_logits:
                sampled.extend(range(len(token_ids) - len(chunk.token_ids), len(token_ids)))
            elif chunk.sample:
                sampled.append(len(token_ids) - 1)
        ids = np.array(token_ids, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise InvalidRequest(f"token id {wrong} is outside of the vocabulary of {config.vocab_size}")
        positions, slots = _place(spans, kv.block_size, len(ids))
        adapters = _adapters(chunks)
        arrays = {"token_ids": ids, "positions": positions, "slots": slots}
        arrays |= {} if len(sampled) == len(ids) else {"sampled": np.array(sampled, dtype=np.int64)}
        arrays |= {} if adapters is None else {"adapters": adapters}
        arrays |= _hidden(chunks, spans, len(ids)) if config.draft_head else {}
        there = dict(zip(arrays, to_device(list(arrays.values()), kv.device), strict=True))
        return cls(
            num_tokens=len(ids),
            token_ids=there["token_ids"],
            positions=there["positions"],
            slots=there["slots"],
            sampled=there.get("sampled"),
            plan=plan_attention(spans, kv.layout, config.num_heads, kv.device),
            adapters=there.get("adapters"),
            hidden=HiddenRows(there["before"], there["kept"]) if config.draft_head else None,
        )


def _hidden(chunks: Sequence[SequenceChunk], spans: Sequence[QuerySpan], num_tokens: int) -> dict[str, np.ndarray]:
    """Build the arrays of `HiddenRows`."""
    before = np.full(num_tokens, ROW_BEFORE, dtype=np.int64)
    kept = np.full(num_tokens, NO_SLOT, dtype=np.int64)
    for chunk, span in zip(chunks, spans, strict=True):
        before[span.row] = chunk.before
        kept[span.row + span.num_rows - 1] = chunk.kept
    before[0] = max(before[0], NO_SLOT)  # there is no preceding row
    return {"before": before, "kept": kept}


def _adapters(chunks: Sequence[SequenceChunk]) -> np.ndarray | None:
    """Return the adapter slot of each row, int64 [T]; None if no row uses one."""
    places = [chunk.adapter for chunk in chunks]
    if all(place == NO_ADAPTER for place in places):
        return None
    return np.repeat(np.array(places, dtype=np.int64), [len(chunk.token_ids) for chunk in chunks])


def check_chunk(chunk: SequenceChunk, config: ModelConfig, kv: KVCache) -> None:
    """Raise BlockError or ContextLengthExceeded if there is no space for the chunk's KV."""
    length = chunk.start + len(chunk.token_ids)
    needed = -(-length // kv.block_size)
    if not chunk.token_ids or chunk.start < 0:
        raise BlockError(f"invalid chunk: {len(chunk.token_ids)} tokens at position {chunk.start}")
    if length > config.max_model_len:
        raise ContextLengthExceeded(length, config.max_model_len, 0)
    if len(chunk.block_table) < needed:
        raise BlockError(
            f"{length} tokens require {needed} blocks of {kv.block_size}, but the table has {len(chunk.block_table)}"
        )
    used = chunk.block_table[Window(config.window, kv.block_size).first_block(chunk.start) : needed]
    if min(used) < 0 or max(used) >= kv.num_blocks:
        raise BlockError(f"invalid block table: blocks {min(used)} to {max(used)} of a cache of {kv.num_blocks}")


def _place(spans: Sequence[QuerySpan], block_size: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions and slots of all tokens, int64 [T] each."""
    positions = np.empty(num_tokens, dtype=np.int64)
    slots = np.empty(num_tokens, dtype=np.int64)
    for first, count, start, table in spans:
        if count == 1:
            positions[first] = start
            slots[first] = table[start // block_size] * block_size + start % block_size
            continue
        where = np.arange(start, start + count, dtype=np.int64)
        blocks = np.asarray(table, dtype=np.int64)[where // block_size]
        positions[first : first + count] = where
        slots[first : first + count] = blocks * block_size + where % block_size
    return positions, slots
