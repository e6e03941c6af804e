"""One choice's text as it streams: tokens in, text that is safe to send out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.common.model.tokenizer import Tokenizer
from diptych.router.text.detokenizer import Detokenizer
from diptych.router.text.stop import StopScanner


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a push made ready.

    `text` may be empty while characters are held back. `stopped` says that a stop string ended the text: the finish
    reason is "stop" and generation should be closed. `num_tokens` of the pushed tokens count as output: all of them, or
    those up to the one that completed the stop string. `offsets[i]` is the character at which counted token i begins.
    """

    text: str
    stopped: bool
    num_tokens: int
    offsets: tuple[int, ...]


class TextStream:
    """Detokenizes and looks for stop strings.

    `offset` is where the text begins (characters), for offsets in an echoed prompt. With `include_stop` the stop
    string, and an end token that is text, stay in the text. Raises InvalidRequest for stop strings out of bounds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        offset: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._scanner = StopScanner(stops, include_stop=include_stop)
        self._include_stop = include_stop
        self._offset = offset

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._scanner.stop

    def push(self, token_ids: Sequence[int], finish_reason: str = "") -> TextDelta:
        """The next tokens; with the last ones their finish reason, which lets out everything held back.

        The last token of a "stop" is the end token: it counts, but is not text.
        """
        if self._scanner.stop is not None:
            return TextDelta("", True, 0, ())
        end_token = finish_reason == "stop" and not self._include_stop
        num_text_tokens = len(token_ids) - end_token
        pieces: list[str] = []
        offsets: list[int] = []
        stopped = False
        for index, token_id in enumerate(token_ids):
            offsets.append(self._offset + self._detokenizer.position)
            if index < num_text_tokens:
                text, stopped = self._scanner.push(self._detokenizer.push((token_id,)))
                pieces.append(text)
            if stopped:
                break
        if finish_reason and not stopped:
            text, stopped = self._scanner.push(self._detokenizer.flush())
            pieces += [text, self._scanner.flush()]
        return TextDelta("".join(pieces), stopped, len(offsets), tuple(offsets))
