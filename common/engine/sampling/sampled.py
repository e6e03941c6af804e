"""Tokens that a step samples, on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.sampling.logprobs import LaunchedLogprobs
from common.wire import SampledToken, TokenLogprobs
from kernels import to_host


class LaunchedTokens:
    """The tokens of a step, and what is wanted with them. The thread that launches the step makes it right after.

    `ids` int64 [n] lie on the device, where the next step takes them from.
    """

    def __init__(self, ids: Tensor, logprobs: Sequence[LaunchedLogprobs], vocab_size: int) -> None:
        self.ids, self._logprobs, self._vocab_size = ids, logprobs, vocab_size
        self._host = to_host(ids)
        self._event: torch.cuda.Event | None = None
        if ids.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[SampledToken]:
        """Waits until the step has ended: a token for each row. Raises RuntimeError when it failed on the device.

        A row without finite logits has an id that is no token, and no log-probabilities.
        """
        if self._event is not None:
            self._event.synchronize()
        if not self._logprobs:
            return [SampledToken(token_id) for token_id in self._host.tolist()]
        found: dict[int, TokenLogprobs] = {}
        for launched in self._logprobs:
            found |= zip(launched.rows, launched.read(), strict=True)
        return [
            SampledToken(token_id, found.get(row) if token_id < self._vocab_size else None)
            for row, token_id in enumerate(self._host.tolist())
        ]
