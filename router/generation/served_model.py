"""One model that this router serves, as the endpoints see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from common.config import RouterConfig
from common.errors import InvalidRequest, ModelNotFound, Unavailable
from common.model_files import ModelFiles, ServedTask, Task, served_task
from router.dispatch import DispatchLoad, GenerationClient
from router.fleet import KnownAdapter, Outcome
from router.observe import RouterMetrics
from router.planner import Outlook
from router.text import CLOSE, OPEN, TextPipeline, thinks
from router.text.calls import Dialect, dialect_of

# Bounds of texts that are only tokenised, and of ids that are only made into text.
MIN_TOKENIZE_BYTES = 1024 * 1024
BYTES_PER_TOKEN = 16
"""Four times those of most texts, so that a text of four times the model's length can be counted."""
BYTES_PER_ID = 4
"""Minimum size of a token id and the comma after it in JSON."""
TASKS_IN_WORDS: Mapping[Task, str] = {
    "generate": "generates text",
    "embed": "embeds texts",
    "score": "scores pairs of texts",
}


class ServingClient(GenerationClient, Protocol):
    """A `GenerationClient` that also reports its load."""

    def load(self) -> DispatchLoad:
        """Return where requests are and the state of the workers."""
        ...

    def reset_prefix_cache(self) -> None:
        """Make every worker drop its prefix cache."""
        ...

    def passed_on(self) -> None:
        """Count a request for this model that another one answers: it counts in scaling this model's pools."""
        ...


class ServedAdapters(Protocol):
    """The LoRA adapters of one model: see `AdapterOrders`."""

    def has(self, name: str) -> bool: ...
    def names(self) -> Iterator[KnownAdapter]: ...
    def digest_of(self, name: str) -> str: ...
    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome: ...
    async def unload(self, name: str) -> None: ...


class NoAdapters:
    """Adapters of a model without workers that could hold any."""

    def has(self, name: str) -> bool:
        return False

    def names(self) -> Iterator[KnownAdapter]:
        return iter(())

    def digest_of(self, name: str) -> str:
        raise ModelNotFound(f"there is no adapter {name!r} here", param="model")

    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome:
        raise Unavailable("this model takes no adapters")

    async def unload(self, name: str) -> None:
        raise ModelNotFound(f"there is no adapter {name!r} here", param="lora_name")


NO_ADAPTERS = NoAdapters()


@dataclass
class ServedModel:
    """One model: the client of its workers, its tokenizer and templates, its settings and metrics.

    `config` holds the settings for this model, and `outlook` returns the planner's latest result. `dialect` is the
    tool-call format, `marks` are its special tokens, and `thought_marks` those around thoughts. Raises ModelError for a
    task that the model cannot do.
    """

    client: ServingClient
    text: TextPipeline
    files: ModelFiles
    config: RouterConfig
    metrics: RouterMetrics
    adapters: ServedAdapters = NO_ADAPTERS
    outlook: Callable[[], Outlook | None] = lambda: None
    task: ServedTask = field(init=False)
    dialect: Dialect = field(init=False)
    marks: frozenset[int] = field(init=False)
    thought_marks: frozenset[int] = field(init=False)
    thinks: bool = field(init=False)
    """Whether answers may begin with a thought between `<think>` and `</think>` that is shown separately."""

    def __post_init__(self) -> None:
        self.task = served_task(self.files, self.config.task)
        self.dialect = dialect_of(self.text.template, self.config.tool_parser)
        self.marks = self.text.mark_tokens(self.dialect.format.marks)
        self.thought_marks = self.text.mark_tokens((OPEN, CLOSE))
        self.thinks = self.shows_thoughts and thinks(self.text.chat_template)

    @property
    def name(self) -> str:
        """The name under which the model is listed."""
        return self.config.served_model_name or self.files.model_id

    @property
    def availability(self) -> tuple[bool, str]:
        """Whether workers would answer a request now, and what is missing."""
        return self.client.ready

    @property
    def max_model_len(self) -> int:
        """Maximum length, in tokens, of a prompt and its answer: that of the workers, or of the model without any."""
        return self.client.max_model_len or self.files.max_model_len

    @property
    def max_tokenize_bytes(self) -> int:
        """Maximum size of a text that is only tokenised, whether it fits the model or not."""
        return max(MIN_TOKENIZE_BYTES, BYTES_PER_TOKEN * self.max_model_len)

    @property
    def max_detokenize_ids(self) -> int:
        """Maximum number of token ids that are only made into text."""
        return max(1, self.max_tokenize_bytes // BYTES_PER_ID)

    @property
    def shows_thoughts(self) -> bool:
        """Whether thoughts are shown apart from the answer."""
        return self.config.reasoning == "auto"

    @property
    def spelled_thought(self) -> tuple[str, str] | None:
        """The marks of thoughts as grammars name them; None unless both are special tokens, which text never has."""
        if not self.thinks or len(self.thought_marks) < 2:
            return None
        return self.text.spell(OPEN), self.text.spell(CLOSE)

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's `system_fingerprint`: it changes when the same seed may give another answer. None while the router
        has not read the weights."""
        return f"fp_{self.files.weights_hash}" if self.files.weights_hash else None

    def num_alternatives(self, wanted: int, param: str) -> int:
        """The number of alternatives for a request that asks for `wanted`; -1: all tokens. Raises InvalidRequest."""
        most, size = self.config.max_logprobs, self.text.vocab_size
        number = size if wanted < 0 else wanted
        if 0 <= most < number:
            whole = ", the whole vocabulary," if wanted < 0 else ""
            raise InvalidRequest(
                f"{param}: {number:,} alternatives{whole} are more than the {most:,} that this server gives "
                "(--max-logprobs)",
                param=param,
            )
        return min(number, size)

    def check_task(self, *tasks: Task) -> None:
        """Raises InvalidRequest for an endpoint that serves `tasks` if the model is served for another one."""
        if self.task.name not in tasks:
            wanted, does = " or ".join(f"--task {task}" for task in tasks), TASKS_IN_WORDS[self.task.name]
            raise InvalidRequest(
                f"the model {self.name!r} {does}: this endpoint is for models served with {wanted}", param="model"
            )
