"""Logits processors of vLLM's model runners: penalties, bad words and thinking budgets of requests with `TokenRules`.

vLLM's own penalties and bad words ignore output that is part of the prompt. `FirstRunnerRules` is for its first model
runner, which runs on CPUs, `SecondRunnerRules` for the one that it uses on GPUs. Loaded in vLLM's processes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondLogitsProcessor

from common.engine.vllm.requests import TokenRules
from common.engine.vllm.row_rules import HostRow, RowRules


class FirstRunnerRules(LogitsProcessor):  # type: ignore[misc] # vLLM's types may not be installed
    """Applies `TokenRules` in vLLM's first model runner."""

    def __init__(self, vllm_config: Any, device: torch.device, pins: bool) -> None:
        self._rows: dict[int, HostRow] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _new_row)

    def apply(self, logits: Tensor) -> Tensor:
        for index, row in self._rows.items():
            row.apply(logits[index])
        return logits


def _new_row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> HostRow | None:
    rules = TokenRules.of(params.extra_args)
    return None if rules is None else HostRow(rules, prompt or [], output)


def _from(tokens: Tensor, first: int) -> Tensor:
    return tokens[first:].long()


class SecondRunnerRules(SecondLogitsProcessor):  # type: ignore[misc]
    """Applies `TokenRules` in vLLM's second model runner, which keeps tokens on the device. Not for draft tokens."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._tokens = req_states.all_token_ids.gpu
        self._rows: dict[int, RowRules] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        rules = TokenRules.of(sampling_params.extra_args)
        if rules is None:
            self._rows.pop(req_idx, None)
            return False
        self._rows[req_idx] = RowRules(rules)
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        if not self._rows:
            return logits
        lengths = ctx.seq_lens_upper_bound_np
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            if (rules := self._rows.get(slot)) is not None:
                tokens = self._tokens[slot, : int(lengths[row])]
                rules.apply(logits[row], len(tokens), partial(_from, tokens))
        return logits
