"""The common part of chat choices and completion choices: log-probabilities, token ids, joined pieces."""

from __future__ import annotations

from collections.abc import Sequence

from router.generation.choice import AnswerChoice, Piece
from router.generation.logprobs import LogprobShapes
from router.generation.service import Service
from router.generation.shape import Object
from router.request.fields import SamplingFields


class ChoiceShape:
    """The settings of a request that both shapes follow; `num_alternatives` is None without log-probabilities."""

    def __init__(self, service: Service, fields: SamplingFields, num_alternatives: int | None) -> None:
        as_ids, of_prompt = bool(fields.return_tokens_as_token_ids), fields.prompt_logprobs
        self._logprobs = (
            None if num_alternatives is None else LogprobShapes(service.text, num_alternatives, as_ids=as_ids)
        )
        self._prompt_logprobs = None if of_prompt is None else LogprobShapes(service.text, of_prompt)
        self._token_ids = bool(fields.return_token_ids)

    def _of_prompt(self, choice: AnswerChoice) -> Object:
        """The member `prompt_logprobs`, for requests that want it."""
        if self._prompt_logprobs is None:
            return {}
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
