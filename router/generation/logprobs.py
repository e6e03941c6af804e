"""Log-probabilities in the formats of OpenAI's chat and completion APIs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from common.wire import LOGPROB_FLOOR, TokenLogprobs
from router.generation.choice import AnswerChoice, TokenWithLogprobs
from router.text import Detokenizer, TextPipeline

TOKEN_BYTES, ALTERNATIVE_BYTES = 20, 12
"""Bytes per token in the arrays of `PackedLogprobs`, and bytes per alternative."""


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Append-only sequence in compact arrays, which creates each item when it is read."""

    __slots__ = ("_ends", "_ids", "_own", "_ranks", "_values")

    def __init__(self, logprobs: Iterable[TokenLogprobs] = ()) -> None:
        self._own, self._ends, self._ranks = array("d"), array("Q"), array("I")
        self._ids, self._values = array("I"), array("d")
        self.extend(logprobs)

    def extend(self, logprobs: Iterable[TokenLogprobs]) -> None:
        for one in logprobs:
            self._own.append(one.logprob)
            self._ranks.append(one.rank)
            self._ids.extend([token_id for token_id, _ in one.top])
            self._values.extend([value for _, value in one.top])
            self._ends.append(len(self._ids))

    @property
    def num_bytes(self) -> int:
        return TOKEN_BYTES * len(self._own) + ALTERNATIVE_BYTES * len(self._ids)

    def __len__(self) -> int:
        return len(self._own)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, place: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        alternatives = slice(self._ends[place - 1] if place else 0, self._ends[place])
        top = tuple(zip(self._ids[alternatives], self._values[alternatives], strict=True))
        return TokenLogprobs(self._own[place], top, self._ranks[place])

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(self.__getitem__, range(len(self)))


def floored(logprob: float) -> float:
    """Clamp `logprob` to [LOGPROB_FLOOR, 0]; NaN becomes LOGPROB_FLOOR."""
    return logprob if LOGPROB_FLOOR <= logprob <= 0.0 else 0.0 if logprob > 0.0 else LOGPROB_FLOOR


class LogprobFormatter:
    """Formatter of log-probabilities. `as_ids` names tokens `token_id:ID`, which is unambiguous where text is not."""

    def __init__(self, text: TextPipeline, num_alternatives: int, *, as_ids: bool = False) -> None:
        self._text, self._num_alternatives, self._as_ids = text, num_alternatives, as_ids

    def chat(self, with_logprobs: Sequence[TokenWithLogprobs]) -> dict[str, object]:
        """Return `logprobs` of a chat choice or chunk."""
        return {"content": self.tokens(with_logprobs), "refusal": None}

    def tokens(self, with_logprobs: Sequence[TokenWithLogprobs]) -> list[dict[str, object]]:
        """Return each token with its bytes and alternatives."""
        content: list[dict[str, object]] = []
        for token in with_logprobs:
            logprobs = token.logprobs
            own, *top = self._entries([(token.token_id, logprobs.logprob), *logprobs.top[: self._num_alternatives]])
            content.append({**own, "top_logprobs": top})
        return content

    def completion(self, with_logprobs: Sequence[TokenWithLogprobs], offset: int) -> dict[str, list[object]]:
        """Return `logprobs` of a completion choice or chunk. Generated text begins at `offset`, after an echo."""
        return {
            "tokens": [self._name(token.token_id) for token in with_logprobs],
            "token_logprobs": [floored(token.logprobs.logprob) for token in with_logprobs],
            "top_logprobs": [self._alternatives(token.token_id, token.logprobs) for token in with_logprobs],
            "text_offset": [offset + token.start for token in with_logprobs],
        }

    def echo(self, choice: AnswerChoice, *, skip_special_tokens: bool) -> dict[str, list[object]]:
        """Return `logprobs` of a completion's echo. The first token has none."""
        token_ids, logprobs = choice.request.prompt_token_ids, choice.prompt_logprobs
        detokenizer = Detokenizer(self._text.tokenizer, skip_special_tokens=skip_special_tokens)
        offsets: list[object] = []
        for token_id in token_ids:
            offsets.append(min(detokenizer.position, len(choice.echo)))
            detokenizer.push((token_id,))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None, *(floored(token.logprob) for token in logprobs)],
            "top_logprobs": [None, *map(self._alternatives, token_ids[1:], logprobs)],
            "text_offset": offsets,
        }

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, object] | None]:
        """Return `prompt_logprobs` of either API, by token id, each with its rank."""
        shown: list[dict[str, object] | None] = [None]
        for token_id, found in zip(token_ids[1:], logprobs, strict=True):
            top = found.top[: self._num_alternatives]
            ranks: dict[int, tuple[float, int | None]] = {i: (p, rank) for rank, (i, p) in enumerate(top, start=1)}
            ranks.setdefault(token_id, (found.logprob, found.rank or None))
            shown.append(
                {
                    str(i): {"logprob": floored(p), "rank": rank, "decoded_token": self._text.token_text(i).token}
                    for i, (p, rank) in ranks.items()
                }
            )
        return shown

    def _alternatives(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return the alternatives of a token, including the token itself."""
        top = {self._name(i): floored(p) for i, p in logprobs.top[: self._num_alternatives]}
        top.setdefault(self._name(token_id), floored(logprobs.logprob))
        return top

    def _entries(self, logprobs: Sequence[tuple[int, float]]) -> list[dict[str, object]]:
        """Return an entry for each token id and its log-probability. Hot path: up to 21 entries per token."""
        text, entries = self._text.token_text, []
        for token_id, logprob in logprobs:
            name, byte_values = text(token_id)
            if self._as_ids:
                name = f"token_id:{token_id}"
            if not LOGPROB_FLOOR <= logprob <= 0.0:
                logprob = floored(logprob)
            entries.append({"token": name, "logprob": logprob, "bytes": byte_values})
        return entries

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text.token_name(token_id)
