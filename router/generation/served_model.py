"""One model of the router, as seen by the endpoints."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from common.config import RouterConfig
from common.errors import InvalidRequest, ModelNotFound, Unavailable
from common.model_files import ModelFiles, ServedTask, Task, served_task
from router.dispatch import FIRST_WEIGHTS, DispatchLoad, GenerationClient, PauseMode
from router.fleet import AdapterInfo, Outcome
from router.observe import RouterMetrics
from router.planner import Outlook
from router.text import TextPipeline, ThoughtMarks, marks_in
from router.text.calls import Dialect, dialect_of

log = logging.getLogger(__name__)

# Limits on texts that are only tokenised, and on token ids that are only detokenised.
MIN_TOKENIZE_BYTES = 1024 * 1024
BYTES_PER_TOKEN = 16
"""Four times the bytes per token of most texts, so texts of four times the model's length can be counted."""
BYTES_PER_ID = 4
"""Minimum size of a token id with its comma in JSON."""
TASKS_IN_WORDS: Mapping[Task, str] = {
    "generate": "generates text",
    "embed": "embeds texts",
    "score": "scores pairs of texts",
}


class ServingClient(GenerationClient, Protocol):
    """A `GenerationClient` that also reports its load."""

    def load(self) -> DispatchLoad:
        """Return the request counts and the state of the workers."""
        ...

    def reset_prefix_cache(self) -> None:
        """Make every worker drop its prefix cache."""
        ...

    def passed_on(self) -> None:
        """Count a request for this model that a fallback answers, so that scaling this model's pools considers it."""
        ...


class ServedAdapters(Protocol):
    """LoRA adapters of one model; implemented by `AdapterOrders`."""

    def has(self, name: str) -> bool: ...
    def names(self) -> Iterator[AdapterInfo]: ...
    def digest_of(self, name: str) -> str: ...
    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome: ...
    async def unload(self, name: str) -> None: ...


class NoAdapters:
    """Adapters of a model without workers that support adapters."""

    def has(self, name: str) -> bool:
        return False

    def names(self) -> Iterator[AdapterInfo]:
        return iter(())

    def digest_of(self, name: str) -> str:
        raise ModelNotFound(f"The adapter {name!r} does not exist.", param="model")

    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome:
        raise Unavailable("This model does not support adapters.")

    async def unload(self, name: str) -> None:
        raise ModelNotFound(f"The adapter {name!r} does not exist.", param="lora_name")


NO_ADAPTERS = NoAdapters()


Body = Callable[[int], AsyncIterator[bytes]]
"""Returns the parts of a request's body, up to a number of bytes."""


class Serving(Protocol):
    """How the workers of one model serve; implemented by `ServingOrders`."""

    @property
    def is_paused(self) -> bool: ...
    @property
    def is_asleep(self) -> bool: ...
    @property
    def weight_version(self) -> str: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self, mode: PauseMode) -> None: ...
    async def wake_up(self) -> None: ...
    async def update(self, path: str, weight_version: str, *, aborts: bool, keep_pause: bool) -> int: ...
    async def update_from_body(
        self, body: Body, sha256: str, weight_version: str, *, aborts: bool, keep_pause: bool
    ) -> int: ...


class AlwaysServing:
    """A model without workers that could be paused."""

    is_paused = is_asleep = False
    weight_version = FIRST_WEIGHTS

    async def pause(self, mode: PauseMode) -> None:
        _refuse()

    async def resume(self) -> None:
        _refuse()

    async def sleep(self, mode: PauseMode) -> None:
        _refuse()

    async def wake_up(self) -> None:
        _refuse()

    async def update(self, path: str, weight_version: str, *, aborts: bool, keep_pause: bool) -> int:
        _refuse()

    async def update_from_body(
        self, body: Body, sha256: str, weight_version: str, *, aborts: bool, keep_pause: bool
    ) -> int:
        _refuse()


def _refuse() -> NoReturn:
    raise Unavailable("This model has no workers.")


ALWAYS_SERVING = AlwaysServing()


@dataclass
class ServedModel:
    """One model: the client of its workers, its tokenizer and templates, its settings and metrics.

    `config` has the settings for this model. `outlook` returns the planner's latest result. `dialect` is the tool-call
    format, and `marks` are its special tokens. Raises ModelError if the model does not support the configured task.
    """

    client: ServingClient
    text: TextPipeline
    files: ModelFiles
    config: RouterConfig
    metrics: RouterMetrics
    adapters: ServedAdapters = NO_ADAPTERS
    serving: Serving = ALWAYS_SERVING
    outlook: Callable[[], Outlook | None] = lambda: None
    task: ServedTask = field(init=False)
    dialect: Dialect = field(init=False)
    marks: frozenset[int] = field(init=False)
    thoughts: ThoughtMarks | None = field(init=False)
    """The marks around thoughts at the beginning of answers; None if thoughts are not shown separately."""
    tool_thoughts: ThoughtMarks | None = field(init=False)
    """The same, in answers to requests with tools, which may have a separate template."""
    thought_tokens: Mapping[ThoughtMarks, frozenset[int]] = field(init=False)
    """The special tokens in these marks."""

    def __post_init__(self) -> None:
        self.task = served_task(self.files, self.config.task)
        template = self.text.template.with_tools
        self.dialect = dialect_of(template, self.config.tool_parser)
        if not self.dialect.is_known and self.task.name == "generate":
            if "tools" in (template.source or ""):
                log.warning(
                    "model %s: its chat template shows no known tool-call format. The router describes functions and "
                    "the format %s in the prompt. If the model was trained with another format, set --tool-parser, or "
                    "tool_parser in the models file.",
                    self.name,
                    self.dialect.format.name,
                )
            else:
                log.info(
                    "model %s: its chat template has no tools: prompts describe functions in the tool-call format %s "
                    "(--tool-parser)",
                    self.name,
                    self.dialect.format.name,
                )
        self.marks = self.text.mark_tokens(self.dialect.format.marks)
        templates = (self.text.template.source, template.source)
        self.thoughts = self._thought_marks(*templates)
        self.tool_thoughts = self._thought_marks(*reversed(templates)) if self.dialect.native else self.thoughts
        self.thought_tokens = {
            marks: frozenset(self.text.special_tokens(marks.start)) | frozenset(self.text.special_tokens(marks.end))
            for marks in (self.thoughts, self.tool_thoughts)
            if marks is not None
        }

    @property
    def name(self) -> str:
        """The name under which the model is listed."""
        return self.config.served_model_name or self.files.model_id

    @property
    def capabilities(self) -> list[str]:
        """What the model can do, in Ollama's words."""
        if not self.task.generates:
            return ["embedding"] if self.task.name == "embed" else []
        if self.text.chat_template is None:
            return ["completion"]
        thinks = self.thoughts is not None or self.dialect.format.has_channels
        return ["completion", *(["tools"] if self.dialect.is_known else []), *(["thinking"] if thinks else [])]

    @property
    def availability(self) -> tuple[bool, str]:
        """Whether workers would answer a request now, and what is missing otherwise."""
        return self.client.ready

    @property
    def max_model_len(self) -> int:
        """Maximum length, in tokens, of a prompt and its answer: the workers' limit, or the model's if unknown."""
        return self.client.max_model_len or self.files.max_model_len

    @property
    def max_tokenize_bytes(self) -> int:
        """Maximum size of a text that is only tokenised, even if it exceeds the model's length."""
        return max(MIN_TOKENIZE_BYTES, BYTES_PER_TOKEN * self.max_model_len)

    @property
    def max_detokenize_ids(self) -> int:
        """Maximum number of token ids that are only detokenised."""
        return max(1, self.max_tokenize_bytes // BYTES_PER_ID)

    @property
    def shows_thoughts(self) -> bool:
        """Whether thoughts are shown separately from the answer."""
        return self.config.reasoning == "auto"

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's `system_fingerprint`, which changes when the same seed may produce another answer.

        None if the router has not read the weights.
        """
        return f"fp_{self.files.weights_hash}" if self.files.weights_hash else None

    def thoughts_of(self, *, with_tools: bool) -> ThoughtMarks | None:
        """Return the marks of thoughts in answers to requests with or without tools."""
        return self.tool_thoughts if with_tools else self.thoughts

    def _thought_marks(self, template: str | None, other: str | None) -> ThoughtMarks | None:
        """Return the configured marks, or those in the template, or those in the model's other template."""
        if not self.shows_thoughts or self.dialect.format.has_channels:
            return None
        if self.config.reasoning_start:
            return ThoughtMarks(self.config.reasoning_start, self.config.reasoning_end)

        def is_token(text: str) -> bool:
            return self.text.tokenizer.token_to_id(text) is not None

        return marks_in(template, is_token) or marks_in(other, is_token)

    def num_alternatives(self, wanted: int, param: str) -> int:
        """Return the number of alternatives for a request of `wanted`; -1: all tokens. Raises InvalidRequest."""
        most, size = self.config.max_logprobs, self.text.vocab_size
        number = size if wanted < 0 else wanted
        if 0 <= most < number:
            whole = " (the whole vocabulary)" if wanted < 0 else ""
            raise InvalidRequest(
                f"{param}: {number:,} alternatives{whole} exceed this server's limit of {most:,} (--max-logprobs)",
                param=param,
            )
        return min(number, size)

    def check_task(self, *tasks: Task) -> None:
        """Raise InvalidRequest unless the model is served for one of `tasks`."""
        if self.task.name not in tasks:
            wanted, does = " or ".join(f"--task {task}" for task in tasks), TASKS_IN_WORDS[self.task.name]
            raise InvalidRequest(
                f"The model {self.name!r} {does}. This endpoint requires a model served with {wanted}.", param="model"
            )
