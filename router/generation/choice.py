"""State of one choice of an answer: converts tokens to text and keeps log-probabilities aligned with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.wire import TokenLogprobs
from router.dispatch import GenerationRequest, RequestTimeline, TokenEvent
from router.observe import ChoiceRecord
from router.text import ContentStops, Detokenizer, StopScanner


@dataclass(frozen=True, slots=True)
class TokenWithLogprobs:
    """A generated token whose text spans characters `start` to `end`.

    Its log-probabilities are `among[place]`; `among` may be packed.
    """

    token_id: int
    among: Sequence[TokenLogprobs]
    place: int
    start: int
    end: int

    @property
    def logprobs(self) -> TokenLogprobs:
        return self.among[self.place]


@dataclass(slots=True)
class Piece:
    """The increment that one event adds to a choice. `finish_reason` is "" until the choice ends."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    with_logprobs: list[TokenWithLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    first: bool = False


class AnswerChoice:
    """Choice `index` of an answer to prompt number `prompt`.

    `echo` is text that precedes the generated text. Stop strings that end within the first `params.min_tokens` tokens
    are ignored. A `silent` choice shows no generated tokens, because its client requested only the prompt.
    `prompt_logprobs` arrive with the first piece and begin at the prompt's second token. `pooled` is the vector of a
    pooled prompt.
    """

    def __init__(
        self,
        index: int,
        prompt: int,
        request: GenerationRequest,
        detokenizer: Detokenizer,
        scanner: StopScanner | ContentStops | None,
        *,
        include_stop: bool = False,
        echo: str = "",
        silent: bool = False,
    ) -> None:
        self.index, self.prompt, self.request, self.echo = index, prompt, request, echo
        self._detokenizer, self._scanner, self._include_stop = detokenizer, scanner, include_stop
        self._held: deque[TokenWithLogprobs] = deque()
        self._decoded = self._given = 0  # characters from the detokenizer, and characters past the scanner
        self.num_tokens = self.num_cached_tokens = 0
        self._sum_logprobs, self._last_token = 0.0, -1
        self._silent = silent
        self.num_pieces = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.pooled = b""
        self.finish_reason = ""
        self.timeline: RequestTimeline | None = None
        self.weight_version = ""
        self.first_at = self.last_at = 0.0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the choice, if any."""
        return self._scanner.stop if self._scanner is not None else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the token of `stop_token_ids`, that ended the choice; None otherwise."""
        if self.finish_reason == "stop" and self._last_token in self.request.params.stop_token_ids:
            return self.stop if self.stop is not None else self._last_token
        return self.stop

    @property
    def mean_logprob(self) -> float:
        """Average log-probability of the tokens; 0 if they have none."""
        return self._sum_logprobs / max(1, self.num_tokens)

    def push(self, event: TokenEvent) -> Piece:
        """Process the next event. Tokens after a completed stop string are neither counted nor returned."""
        if event.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        self.timeline = event.timeline or self.timeline
        self.weight_version = event.weight_version
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if self.num_pieces and self._scanner is None and not (event.finish_reason or event.logprobs or self._silent):
            self.num_pieces += 1
            self.num_tokens += len(event.token_ids)
            return Piece(self._decode(event.token_ids), list(event.token_ids))
        self.pooled = event.pooled
        piece = Piece(first=not self.num_pieces)
        self.num_pieces += 1
        if self._silent:
            self.finish_reason = piece.finish_reason = "length" if event.finish_reason else ""
            return piece
        ends_by_token = event.finish_reason == "stop" and not self._include_stop
        num_text_tokens = len(event.token_ids) - ends_by_token
        stopped = False
        if self._scanner is None and not event.logprobs:
            piece.token_ids.extend(event.token_ids)
            piece.text = self._decode(event.token_ids[:num_text_tokens])
        else:
            stopped = self._push_singly(event, num_text_tokens, piece)
        self.num_tokens += len(piece.token_ids)
        if event.finish_reason and piece.token_ids:
            self._last_token = piece.token_ids[-1]
        if event.logprobs:
            self._sum_logprobs += sum([event.logprobs[i].logprob for i in range(len(piece.token_ids))])
        if event.finish_reason and not stopped:
            stopped = self._flush(piece, cut=event.finish_reason != "stop")
        self.finish_reason = piece.finish_reason = "stop" if stopped else event.finish_reason
        piece.with_logprobs = self._released()
        return piece

    def record(self) -> ChoiceRecord:
        """Return the record of the choice so far."""
        params = self.request.params
        return ChoiceRecord(
            self.index,
            self.num_tokens,
            self.finish_reason,
            self.first_at,
            self.last_at,
            self.timeline,
            params.max_tokens,
            params.temperature,
            params.top_p,
            bool(params.pooling),
        )

    def _push_singly(self, event: TokenEvent, num_text_tokens: int, piece: Piece) -> bool:
        """Push one token at a time, to locate the end of a stop string and the text of each token."""
        for i, token_id in enumerate(event.token_ids):
            piece.token_ids.append(token_id)
            start = self._decoded
            if i >= num_text_tokens:  # the end token is not text
                if event.logprobs:
                    self._held.append(TokenWithLogprobs(token_id, event.logprobs, i, start, start))
                return False
            text, stopped = self._scan(self._decode((token_id,)), self.num_tokens + len(piece.token_ids))
            piece.text += text
            self._given += len(text)
            if event.logprobs:
                self._held.append(TokenWithLogprobs(token_id, event.logprobs, i, start, self._decoded))
            if stopped:
                return True
        return False

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        text = self._detokenizer.push(token_ids)
        self._decoded += len(text)
        return text

    def _scan(self, text: str, num_tokens: int) -> tuple[str, bool]:
        if self._scanner is None:
            return text, False
        return self._scanner.push(text, may_end=num_tokens > self.request.params.min_tokens)

    def _flush(self, piece: Piece, *, cut: bool) -> bool:
        """Release an incomplete character and the scanner's held text. Returns whether a stop string ended it."""
        rest, stopped = self._scan(self._detokenizer.flush(), self.num_tokens)
        if self._scanner is not None and not stopped:
            rest += self._scanner.flush(cut=cut)
            stopped = self._scanner.stop is not None
        piece.text += rest
        self._given += len(rest)
        self._decoded = self._given
        return stopped

    def _released(self) -> list[TokenWithLogprobs]:
        """Pop the tokens whose text was released; at the end, also tokens whose text a stop string removed."""
        out: list[TokenWithLogprobs] = []
        while self._held and (self._held[0].end <= self._given or self.finish_reason):
            token = self._held.popleft()
            if token.end > self._given:
                token = replace(token, start=min(token.start, self._given), end=self._given)
            out.append(token)
        return out
