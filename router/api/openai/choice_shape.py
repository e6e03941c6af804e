"""The common part of chat choices and completion choices: log-probabilities, token ids, joined pieces."""

from __future__ import annotations

from collections.abc import Sequence

from router.generation import AnswerChoice, LogprobShapes, Object, Piece, Service
from router.request.fields import SamplingFields


class ChoiceShape:
    """The settings of a request that both shapes follow."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        return None

    def __init__(self, service: Service, fields: SamplingFields) -> None:
        as_ids, wanted, of_prompt = fields.return_tokens_as_token_ids, fields.num_alternatives, fields.prompt_logprobs
        self._logprobs = self._prompt_logprobs = None
        if wanted is not None:
            number = len(fields.logprob_token_ids or ()) or service.num_alternatives(wanted, "logprobs")
            self._logprobs = LogprobShapes(service.text, number, as_ids=bool(as_ids))
        if of_prompt is not None:
            self._prompt_logprobs = LogprobShapes(service.text, service.num_alternatives(of_prompt, "prompt_logprobs"))
        self._token_ids, self._streams = bool(fields.return_token_ids), bool(fields.stream)

    def _of_prompt(self, choice: AnswerChoice) -> Object:
        """The member `prompt_logprobs`; null for requests that do not want it."""
        if self._prompt_logprobs is None:
            return {"prompt_logprobs": None}
        token_ids = choice.request.prompt_token_ids
        return {"prompt_logprobs": self._prompt_logprobs.prompt(token_ids, choice.prompt_logprobs)}


def merged(choice: AnswerChoice, pieces: Sequence[Piece]) -> Piece:
    """All pieces of a finished choice as one."""
    return Piece(
        text="".join([piece.text for piece in pieces]),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        with_logprobs=[token for piece in pieces for token in piece.with_logprobs],
        finish_reason=choice.finish_reason,
    )
