"""Planning of answers: prompts as tokens, sampling parameters, and choices."""

from __future__ import annotations

import re
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from common.errors import ContextLengthExceeded, InvalidRequest
from common.wire import MAX_TOP_LOGPROBS, BadWord, Pooling, SamplingParams, ThinkingBudget
from router.dispatch import GenerationRequest, Prompt, Trail
from router.generation.beam_search import BeamSettings
from router.generation.budgets import MAX_PROMPT_LOGPROBS
from router.generation.choice import AnswerChoice
from router.generation.context import RequestContext
from router.generation.parts import AnswerParts
from router.generation.request_history import MAX_CHOICES
from router.generation.served_model import ServedModel
from router.generation.structure import begins_in_form
from router.generation.thoughts import thinking_budget
from router.request import COPIED
from router.request.errors import InvalidField
from router.request.fields import ChatRequest, SamplingFields
from router.text import ContentStops, Detokenizer, StopScanner

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
MASK64 = 2**64 - 1
"""Truncates the sums of SplitMix64 to 64 bits."""
MAX_SEQUENCES = 1024
"""Maximum number of choices of one request, over all its prompts."""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """One prompt. `text` is its text for an echo; `max_tokens` limits the answer.

    With `max_tokens` 0, a worker still generates one token, which is not shown. Prompts of an `AnswerPlan` store tokens
    in an array, because they may wait for minutes and an array takes a tenth of a list's memory.
    """

    token_ids: Sequence[int]
    max_tokens: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The plan of one answer. `choices` has `n` items per prompt, grouped by prompt. `fields` omit the prompt.

    `num_prompt_logprobs_held` is the number of prompt log-probabilities in the answer, including alternatives.
    `num_logprobs` is the number of alternatives per generated token; -1 for no log-probabilities. With `beams`, a beam
    search finds all choices of a prompt. `num_values` is the number of values in the answer's vectors, converted to
    decimal ones. `most_at_once` limits the choices that workers process at a time; 0 for no limit.
    """

    id: str
    created: int
    model: str
    fields: SamplingFields
    prompts: list[PlannedPrompt]
    choices: list[AnswerChoice]
    num_prompt_logprobs_held: int = 0
    num_logprobs: int = -1
    beams: BeamSettings | None = None
    num_values: int = 0
    most_at_once: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def shown_choices(self) -> list[AnswerChoice]:
        """The choices to return: for each prompt, the `n` with the highest average log-probability."""
        n, num_sampled = self.fields.n or 1, self.fields.num_sampled
        if n == num_sampled:
            return self.choices
        shown: list[AnswerChoice] = []
        for first in range(0, len(self.choices), num_sampled):
            of_prompt = self.choices[first : first + num_sampled]
            shown += sorted(of_prompt, key=lambda choice: -choice.mean_logprob)[:n]
        return shown


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` (splitmix64, Steele et al. 2014); choice 0 uses the request's seed."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return (z ^ (z >> 31)) >> 1


def check_num_sequences(model: ServedModel, num_prompts: int, n: int) -> None:
    """Raise InvalidRequest if the router could never admit the request. Clients would retry after a 503 forever."""
    most = min(MAX_SEQUENCES, model.config.max_inflight)
    if num_prompts * n <= most:
        return
    param = "n" if num_prompts == 1 else "prompt"
    raise InvalidRequest(
        f"{param}: {num_prompts:,} prompts with {n} choices each exceed the limit of {most:,} sequences per request",
        param=param,
    )


def fit(
    num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, default: int | None = None, param: str
) -> int:
    """Return the maximum number of answer tokens. Without `max_tokens`, the smaller of `default` and all that fit.

    Raises ContextLengthExceeded.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1 or (max_tokens is not None and max_tokens > room):
        raise ContextLengthExceeded(num_prompt_tokens, max_model_len, max(1, max_tokens or 1), where=param)
    if max_tokens is None:
        return room if default is None else min(default, room)
    return max_tokens


def make_plan(
    model: ServedModel,
    fields: SamplingFields,
    context: RequestContext,
    prompts: Sequence[PlannedPrompt],
    *,
    prefix: str,
    num_prompt_logprobs: int = -1,
    echo: bool = False,
    grammar: str = "",
    bad_words: tuple[BadWord, ...] = (),
    marks: frozenset[int] = frozenset(),
    pooled: bool = False,
) -> AnswerPlan:
    """Plan the choices of a request whose prompts are tokenised. Raises InvalidRequest.

    `num_prompt_logprobs` is -1 for none. Every answer must match `grammar`, unless it is "", and must not contain
    `bad_words`. The text of an answer includes the special tokens `marks`. With `pooled`, an answer is the prompt's
    vector.
    """
    num_logprobs = _num_logprobs(model, fields, prompts)
    num_prompt_logprobs_held = _num_prompt_logprobs(fields, prompts, num_prompt_logprobs)
    answer_id = f"{prefix}{secrets.token_hex(16)}"
    choices: list[AnswerChoice] = []
    parts = AnswerParts(model, fields) if fields.stops and isinstance(fields, ChatRequest) else None
    salt = context.salt
    adapter = model.adapters.digest_of(context.adapter) if context.adapter else ""
    in_form = begins_in_form(model, fields)
    compact = [replace(prompt, token_ids=array("I", prompt.token_ids)) for prompt in prompts]
    for number, prompt in enumerate(compact):
        seed = secrets.randbits(63) if fields.seed is None else fields.seed
        shared = Prompt(prompt.token_ids, salt, adapter)
        params = sampling_params(
            model,
            fields,
            prompt.max_tokens,
            num_logprobs,
            seed,
            grammar=grammar,
            num_prompt_logprobs=num_prompt_logprobs,
            bad_words=bad_words,
            thinking=thinking_budget(model, fields, prompt.token_ids, in_form=in_form),
            pooling=model.task.pooling if pooled else "",
        )
        for k in range(fields.num_sampled):
            index = len(choices)
            seeded = msgspec.structs.replace(params, seed=derive_seed(seed, k)) if k else params
            request = _request(model, context, f"{answer_id}-{index}", prompt, shared, salt, adapter, seeded, index)
            choices.append(
                _choice(
                    model,
                    fields,
                    index,
                    number,
                    request,
                    marks=marks,
                    parts=parts,
                    echo=prompt.text if echo else "",
                    silent=not prompt.max_tokens,
                )
            )
    beams = _beams(model, fields) if fields.use_beam_search else None
    return AnswerPlan(
        answer_id,
        int(time.time()),
        context.model_name,
        fields.without_prompt(),
        compact,
        choices,
        num_prompt_logprobs_held,
        num_logprobs,
        beams,
    )


def _beams(model: ServedModel, fields: SamplingFields) -> BeamSettings:
    penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    return BeamSettings(fields.num_beams, fields.n or 1, penalty, model.text.eos_token_ids)


def _request(
    model: ServedModel,
    context: RequestContext,
    request_id: str,
    prompt: PlannedPrompt,
    shared: Prompt,
    salt: str,
    adapter: str,
    params: SamplingParams,
    index: int,
) -> GenerationRequest:
    """Build the dispatcher's request for choice `index`. All choices of a prompt share `shared`."""
    request_class = context.request_class
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        params=params,
        cache_salt=salt,
        deadline_s=model.config.request_timeout_s,
        traceparent=context.traceparent if TRACEPARENT.fullmatch(context.traceparent) else "",
        prompt=shared,
        ttft_s=request_class.ttft_s,
        tpot_s=request_class.tpot_s,
        priority=request_class.priority,
        request_class=request_class.name,
        key=context.key.name,
        share=request_class.share,
        pooled_width=model.task.width if params.pooling else 0,
        adapter=adapter,
        adapter_name=context.adapter,
        trail=Trail() if index < MAX_CHOICES else None,
    )


def _choice(
    model: ServedModel,
    fields: SamplingFields,
    index: int,
    prompt: int,
    request: GenerationRequest,
    *,
    marks: frozenset[int],
    parts: AnswerParts | None,
    echo: str,
    silent: bool,
) -> AnswerChoice:
    """Create a choice. `parts` separates content from thoughts and calls."""
    include_stop = bool(fields.include_stop_str_in_output)
    stops: StopScanner | ContentStops | None = None
    if fields.stops:
        stops = StopScanner(fields.stops, include_stop=include_stop)
        if parts is not None:
            stops = parts.stop_scanner(stops, request.prompt_token_ids)
    skip_special = fields.skip_special_tokens is not False
    return AnswerChoice(
        index,
        prompt,
        request,
        Detokenizer(model.text.tokenizer, skip_special_tokens=skip_special, kept=marks),
        stops,
        include_stop=include_stop,
        echo=echo,
        silent=silent,
    )


def sampling_params(
    model: ServedModel,
    fields: SamplingFields,
    max_tokens: int,
    num_logprobs: int,
    seed: int,
    *,
    grammar: str = "",
    num_prompt_logprobs: int = -1,
    bad_words: tuple[BadWord, ...] = (),
    thinking: ThinkingBudget | None = None,
    pooling: Pooling = "",
) -> SamplingParams:
    """Build the sampling parameters for the workers. Raises InvalidRequest."""
    copied = {name: value for name in COPIED if (value := getattr(fields, name)) is not None}
    if (min_tokens := copied.get("min_tokens", 0)) > max_tokens:
        raise InvalidRequest(
            f"min_tokens: must be at most max_tokens ({max_tokens:,}), got {min_tokens:,}", param="min_tokens"
        )
    stop_token_ids = tuple(dict.fromkeys(fields.stop_token_ids or ()))
    allowed = tuple(dict.fromkeys(fields.allowed_token_ids or ()))
    shown = tuple(dict.fromkeys(fields.logprob_token_ids or ()))
    for name, ids in (("stop_token_ids", stop_token_ids), ("allowed_token_ids", allowed), ("logprob_token_ids", shown)):
        if ids:
            model.text.check_ids(ids, param=name)
    return SamplingParams(
        **copied,
        max_tokens=max(1, max_tokens),
        top_k=max(0, fields.top_k or 0),
        seed=seed,
        logit_bias=_logit_bias(model, fields.logit_bias or {}),
        logprobs=num_logprobs,
        stop_token_ids=stop_token_ids,
        grammar=grammar,
        prompt_logprobs=num_prompt_logprobs,
        allowed_token_ids=allowed,
        bad_words=bad_words,
        logprob_token_ids=shown,
        thinking=thinking,
        pooling=pooling,
    )


def _num_logprobs(model: ServedModel, fields: SamplingFields, prompts: Sequence[PlannedPrompt]) -> int:
    """Return the number of alternatives per generated token; -1 for no log-probabilities. Raises InvalidRequest."""
    if fields.num_alternatives is None:
        return 0 if fields.num_sampled > (fields.n or 1) else -1  # ranking choices needs log-probabilities
    name = "top_logprobs" if "top_logprobs" in type(fields).model_fields else "logprobs"
    number = model.num_alternatives(fields.num_alternatives, name)
    num_tokens = sum(prompt.max_tokens for prompt in prompts) * max(fields.num_sampled, fields.num_beams)
    if number > MAX_TOP_LOGPROBS and num_tokens * (1 + number) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{name}: {number:,} alternatives for each of {num_tokens:,} tokens (max_tokens times choices or beams) "
            f"exceed the limit of {MAX_PROMPT_LOGPROBS:,} log-probabilities per answer",
            param=name,
        )
    return number


def num_prompt_logprobs(model: ServedModel, fields: SamplingFields, of_echo: int | None = None) -> int:
    """Return the number of alternatives per prompt token, for `prompt_logprobs` and an echo; -1 for none.

    Raises InvalidRequest.
    """
    asked = ((fields.prompt_logprobs, "prompt_logprobs"), (of_echo, "logprobs"))
    return max([model.num_alternatives(number, name) for number, name in asked if number is not None], default=-1)


def _num_prompt_logprobs(fields: SamplingFields, prompts: Sequence[PlannedPrompt], num_alternatives: int) -> int:
    """Return the number of prompt log-probabilities in the answer. -1 alternatives: none. Raises InvalidRequest."""
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts) * fields.num_sampled
    num_logprobs = num_tokens * (1 + num_alternatives)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"Log-probabilities of {num_tokens:,} prompt tokens with {num_alternatives:,} alternatives each exceed the "
            f"limit of {MAX_PROMPT_LOGPROBS:,} log-probabilities per answer.",
            param="logprobs" if fields.prompt_logprobs is None else "prompt_logprobs",
        )
    return num_logprobs


def _logit_bias(model: ServedModel, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for name, value in bias.items():
        if not (name.isascii() and name.isdigit() and len(name) < 12):
            raise InvalidField("logit_bias: keys must be token ids", f", got {name[:80]!r}", param="logit_bias")
        pairs[int(name)] = float(value)
    if pairs:
        model.text.check_ids(tuple(pairs), param="logit_bias")
    return tuple(pairs.items())
