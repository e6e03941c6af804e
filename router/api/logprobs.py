"""Log-probabilities in the shapes of both endpoints. What is not a number a JSON reader takes becomes the floor."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.router.api.choice import ScoredToken
from diptych.router.text.pipeline import TextPipeline

FLOOR = -9999.0


def floored(logprob: float) -> float:
    """`logprob`, at least FLOOR; never NaN or infinite."""
    return logprob if FLOOR <= logprob <= 0.0 else 0.0 if logprob > 0.0 else FLOOR


class LogprobShapes:
    """Writes scored tokens. `as_ids` names tokens `token_id:ID`, which is unambiguous where their text is not."""

    def __init__(self, text: TextPipeline, num_alternatives: int, *, as_ids: bool = False) -> None:
        self._text, self._num_alternatives, self._as_ids = text, num_alternatives, as_ids

    def chat(self, scored: Sequence[ScoredToken]) -> dict[str, object]:
        """`logprobs` of a chat choice or chunk."""
        content: list[dict[str, object]] = []
        for token in scored:
            top = [self._chat_token(i, p) for i, p in token.logprobs.top[: self._num_alternatives]]
            content.append({**self._chat_token(token.token_id, token.logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, scored: Sequence[ScoredToken], offset: int) -> dict[str, object]:
        """`logprobs` of a completion choice or chunk; `offset` is where generated text begins (after an echo)."""
        tops: list[dict[str, float] | None] = []
        for token in scored:
            top = {self._name(i): floored(p) for i, p in token.logprobs.top[: self._num_alternatives]}
            top.setdefault(self._name(token.token_id), floored(token.logprobs.logprob))
            tops.append(top if self._num_alternatives else None)
        return {
            "tokens": [self._name(token.token_id) for token in scored],
            "token_logprobs": [floored(token.logprobs.logprob) for token in scored],
            "top_logprobs": tops,
            "text_offset": [offset + token.start for token in scored],
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, object]:
        shown = self._text.token_text(token_id)
        name = f"token_id:{token_id}" if self._as_ids else shown.token
        return {"token": name, "logprob": floored(logprob), "bytes": list(shown.raw)}

    def _name(self, token_id: int) -> str:
        """A part of a character is written as its bytes: as U+FFFD, two parts would be one key."""
        if self._as_ids:
            return f"token_id:{token_id}"
        shown = self._text.token_text(token_id)
        if "\ufffd" in shown.token:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in shown.raw)
        return shown.token
