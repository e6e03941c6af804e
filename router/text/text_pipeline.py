"""Tokenization, chat templates and detokenization of one model, in threads so that no prompt stalls the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from common.errors import ContextLengthExceeded, InvalidRequest
from common.grammar import GrammarChecks
from common.model_files import ChatTemplate, ModelFiles, Tokenizer
from common.wire import BadWord
from router.text.answer_grammar import literal, special_token, without_position
from router.text.calls import Dialect, Function
from router.text.chat_prompt import chat_prompt
from router.text.detokenizer import TokenText, token_table
from router.text.grammar_writer import PROGRAM, Demand, grammar_of, text_of
from router.text.known_prefixes import PromptTokenCache
from router.text.prelude import Prelude
from router.text.text_threads import HUGE_TEXT, MAX_PENDING, SHORT_TEXT, TextThreads
from router.text.token_floor import TokenFloor, token_floor

Result = TypeVar("Result")

CHARS_PER_TOKEN = 8
"""Upper bound on the characters per token of nearly every text."""
CHARS_PER_VALUE = 16
"""Cost of a JSON value in a chat template in addition to its text, in characters."""


class TextPipeline:
    """A model's tokenizer and chat template, used through a bounded thread pool. Use from one event loop.

    `threads`: a pool shared with other pipelines, or the number of threads for a new one. `vocab_size`: number of token
    ids that the model accepts, by default the tokenizer's. At most `max_pending` jobs are queued or running; more raise
    Unavailable. `max_model_len` is 0 if unknown. Without `grammars`, grammars are not compiled on trial. `close` also
    closes the threads and `grammars`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_model_len: int,
        threads: int | TextThreads,
        max_pending: int = MAX_PENDING,
        model_id: str = "",
        vocab_size: int = 0,
        eos_token: str = "",
        eos_token_ids: tuple[int, ...] = (),
        floor: TokenFloor | None = None,
        grammars: GrammarChecks | None = None,
    ) -> None:
        self.tokenizer, self.model_id = tokenizer, model_id
        self.max_model_len, self.vocab_size = max_model_len, vocab_size or tokenizer.vocab_size
        self.eos_token, self.eos_token_ids = eos_token, eos_token_ids
        self.template = template or ChatTemplate(None, model_id=model_id)
        self._floor, self.grammars = floor or TokenFloor(), grammars
        self._may_exceed = tokenizer.highest_id >= self.vocab_size
        self._table = token_table(tokenizer)
        sources = dict.fromkeys((self.template.source, self.template.with_tools.source, eos_token))
        self._prefixes = PromptTokenCache(tokenizer, "".join(filter(None, sources)))
        self._threads = threads if isinstance(threads, TextThreads) else TextThreads(threads, max_pending)

    @classmethod
    def from_files(
        cls, files: ModelFiles, *, threads: int | TextThreads = 2, max_pending: int = MAX_PENDING
    ) -> TextPipeline:
        """Create the pipeline of a resolved model. Raises ModelError for an invalid tokenizer or template."""
        tokenizer = Tokenizer.from_file(files.tokenizer)
        return cls(
            tokenizer,
            ChatTemplate.from_files(files),
            max_model_len=files.max_model_len,
            threads=threads,
            max_pending=max_pending,
            model_id=files.model_id,
            vocab_size=files.vocab_size,
            eos_token=files.eos_token,
            eos_token_ids=files.eos_token_ids,
            floor=token_floor(files.tokenizer, tokenizer),
            grammars=GrammarChecks(files, files.vocab_size, program=PROGRAM),
        )

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template, or None for a base model, which rejects chat requests."""
        return self.template.source

    @property
    def num_pending(self) -> int:
        """Number of queued and running jobs."""
        return self._threads.num_pending

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        limit: int = 0,
        max_bytes: int = 0,
        second: str | None = None,
        keep: int = 0,
        side: Literal["left", "right"] = "right",
    ) -> list[int]:
        """Return the token ids of a plain prompt, or of a pair with a `second` text.

        They are truncated on `side` to at most `keep` tokens (0: no limit), as in `Tokenizer.encode_cut`.

        A text that certainly has more than `limit` tokens, or has more than `max_bytes` of UTF-8 (0: no limit), is
        rejected before tokenization. The number of tokens is not checked afterwards. Raises ContextLengthExceeded,
        Unavailable, and InvalidRequest for too many bytes or invalid Unicode.
        """
        size = len(text) + len(second or "")
        return await self._threads.run(
            lambda: self._encode(text, add_special_tokens, limit, max_bytes, "prompt", second, keep=keep, side=side),
            size,
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        functions: Sequence[Function] = (),
        dialect: Dialect | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        limit: int = 0,
        max_bytes: int = 0,
        salt: str | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, rendered by the model's chat template.

        `continue_final_message` leaves the last message open for the model to continue; it excludes
        `add_generation_prompt`. `extra` are further template variables. The template or added instructions describe
        `functions` to the model. `dialect` is detected from the template if it is None. Prefixes of conversations with
        the same `salt` are cached. Raises as `encode` does.
        """

        def job() -> list[int]:
            text = chat_prompt(
                self.template,
                messages,
                functions=functions,
                dialect=dialect,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                extra=extra,
            )
            return self._encode(text, False, limit, max_bytes, "messages", salt=salt)

        return await self._threads.run(job, text_size((messages, [each.as_tool() for each in functions], extra)))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Raises Unavailable, and InvalidRequest for an id outside the vocabulary."""

        def job() -> str:
            self.check_ids(token_ids)
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return await self._threads.run(job, len(token_ids))

    async def spellings(self, words: Sequence[str]) -> tuple[BadWord, ...]:
        """Return the distinct token sequences of each word, with and without a leading space. Raises as `encode`."""

        def job() -> tuple[BadWord, ...]:
            texts = [text for word in words for text in (word, word.lstrip(), " " + word.lstrip()) if text]
            found = [self._encode(text, False, 0, 0, "bad_words") for text in texts]
            return tuple(dict.fromkeys(map(BadWord.of, filter(None, found))))

        return await self._threads.run(job, len(words) * max(map(len, words), default=0))

    async def grammar(self, demand: Demand, prelude: Prelude | None = None, *, salt: str = "", owner: str = "") -> str:
        """Write the grammar of a demand after its prelude and compile it on trial; see `GrammarChecks.submit`.

        Raises Unavailable, and ValueError with a message for the client if workers could not use the grammar.
        """
        text = text_of(demand, prelude)
        if self.grammars is None:
            return await self.apart(lambda: grammar_of(text))
        # Shielded because other requests may wait for the same grammar after this client disconnects.
        verdict = await asyncio.shield(asyncio.wrap_future(self.grammars.submit(text, salt=salt, owner=owner)))
        if verdict.problem:
            raise ValueError(without_position(verdict.problem))
        return verdict.grammar

    async def apart(self, job: Callable[[], Result], size: int = SHORT_TEXT + 1) -> Result:
        """Run other work on `size` characters in the text threads. Raises Unavailable."""
        return await self._threads.run(job, size)

    def exceeds(self, prompt: str | Sequence[int], num_tokens: int) -> bool:
        """Whether a prompt certainly has more than `num_tokens` tokens. Examines only the beginning of a text.

        False if that is uncertain, which includes most texts if `num_tokens` is above a thousand.
        """
        if not isinstance(prompt, str):
            return len(prompt) > num_tokens
        if len(prompt) <= num_tokens:
            return False
        if self._floor.of(prompt[:SHORT_TEXT]) > num_tokens:
            return True
        num_chars = CHARS_PER_TOKEN * (num_tokens + 1)
        if num_chars > SHORT_TEXT:
            return False
        whole_words, _, _ = prompt[:num_chars].rpartition(" ")
        return len(self.tokenizer.encode(whole_words.rstrip(), add_special_tokens=False)) > num_tokens

    def token_text(self, token_id: int) -> TokenText:
        """Return the text and bytes of one token, for log probabilities."""
        return self._table.text(token_id)

    def token_name(self, token_id: int) -> str:
        """Return the unambiguous name of one token; see `TokenTable.name`."""
        return self._table.name(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, or the name of a control token."""
        return self._table.raw(token_id)

    def spell(self, mark: str) -> str:
        """Write a delimiter in a grammar: as a token if it is a special token, otherwise as text."""
        token_id = self._special_id(mark)
        return literal(mark) if token_id is None else special_token(token_id)

    def spell_all(self, text: str) -> tuple[str, ...]:
        """Write a text in a grammar, with each special token in it as a token."""
        spelled, left = list[str](), text
        for token_id in self.special_tokens(text):
            before, _, left = left.partition(self.tokenizer.id_to_token(token_id))
            spelled += [literal(before), special_token(token_id)] if before else [special_token(token_id)]
        return (*spelled, literal(left)) if left else tuple(spelled)

    def special_tokens(self, text: str) -> list[int]:
        """Return the special tokens in the tokens of a text."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [token_id for token_id in token_ids if token_id in self.tokenizer.special_ids]

    def mark_tokens(self, marks: Iterable[str]) -> frozenset[int]:
        """Return the ids of delimiters that are special tokens. Scanners need them in the text of an answer."""
        return frozenset(token_id for mark in marks if (token_id := self._special_id(mark)) is not None)

    def _special_id(self, mark: str) -> int | None:
        token_id = self.tokenizer.token_to_id(mark)
        return token_id if token_id in self.tokenizer.special_ids else None

    def check_ids(self, token_ids: Sequence[int], *, param: str = "tokens") -> None:
        """Raise InvalidRequest if an id is not in the model's vocabulary."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):  # 1 million in milliseconds
            return
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
        raise InvalidRequest(
            f"Token id {bad} is not in the vocabulary: must be 0 to {self.vocab_size - 1}", param=param
        )

    def close(self) -> None:
        """Drop queued jobs. The threads end after their current jobs."""
        self._threads.close()
        if self.grammars is not None:
            self.grammars.close()

    def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        limit: int,
        max_bytes: int,
        param: str,
        second: str | None = None,
        salt: str | None = None,
        *,
        keep: int = 0,
        side: Literal["left", "right"] = "right",
    ) -> list[int]:
        if limit and (floor := self._floor.of(text) + self._floor.of(second or "")) > limit:
            raise ContextLengthExceeded(floor, limit, where=param, at_least=True)
        if max_bytes and (num_bytes := len((text + (second or "")).encode(errors="surrogatepass"))) > max_bytes:
            raise InvalidRequest(
                f"{param}: the prompt has {num_bytes:,} bytes; the maximum is {max_bytes:,}", param=param
            )
        if keep:
            ids = self.tokenizer.encode_cut(text, keep, second=second, side=side, add_special_tokens=add_special_tokens)
        elif second is not None:
            ids = self.tokenizer.encode_pair(text, second)
        elif salt is None:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = self._prefixes.encode(text, salt, alone=not self._threads.num_pending)
        if self._may_exceed:
            self.check_ids(ids, param=param)
        return ids


def text_size(value: object) -> int:
    """Return the number of characters of all strings in a JSON value, plus a constant per value. Stops above
    `HUGE_TEXT`."""
    size, left = 0, [value]
    while left and size <= HUGE_TEXT:
        part = left.pop()
        size += CHARS_PER_VALUE
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            size += sum(map(len, part))
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
    return size
