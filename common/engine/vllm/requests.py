"""Requests of routers in vLLM's terms: sampling parameters, grammars and limits.

A prompt may end with output of the request: tokens before a takeover, or the first token of a prefill worker. vLLM
treats all of it as prompt, so limits count without these `earlier` tokens, `token_rules.py` applies penalties and bad
words to them, and the scheduler's connector advances the grammar over them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from common.errors import WireError
from common.wire import LOGPROB_FLOOR, Pooling, SamplingParams, TokenLogprobs, unpack_tokens

if TYPE_CHECKING:
    import vllm

    from common.engine.vllm.link import TransferParams

RULES_KEY = "diptych_rules"
"""Key of `TokenRules` in `SamplingParams.extra_args`."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Limit of vLLM's sampler."""
WITHOUT_DRAFTS = (
    *("min_p", "logit_bias"),  # vLLM's own limits
    *("bad_words", "thinking", "presence_penalty", "frequency_penalty"),  # `token_rules.py` does not see draft tokens
    "logprob_token_ids",  # the rejection sampler needs log probabilities of the whole vocabulary
)
"""Parameters that are rejected with a draft model, wherever the prompt is computed."""
API_NAMES = {"thinking": "thinking_token_budget"}
"""Names of parameters that have another one in the API."""
REFERENCE = re.compile(r"@([A-Za-z_][\w-]*)")
"""Reference to another grammar of a list, in llguidance's Lark format."""
WHITE_SPACE = re.compile(r'(?<="x-guidance":\{)"whitespace_pattern":"(?:[^"\\]|\\.)*"')
"""The router's limit of white space in JSON. vLLM's llguidance repeats it, and small models fill answers with it."""
SEPARATORS = '"whitespace_flexible":false,"key_separator":": ?","item_separator":", ?"'
"""Its replacement: at most a space after a colon or comma."""


class TokenRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rules that vLLM cannot apply itself, because they depend on output that is part of its prompt.

    The answer begins at position `start` of the sequence. `params` are the request's parameters, packed.
    """

    start: int
    params: bytes

    @property
    def sampling(self) -> SamplingParams:
        return msgspec.msgpack.decode(self.params, type=SamplingParams)

    @classmethod
    def of(cls, extra_args: dict[str, Any] | None) -> TokenRules | None:
        """Read the rules of a request, if it has any. Raises msgspec.ValidationError."""
        found = (extra_args or {}).get(RULES_KEY)
        return None if found is None else msgspec.convert(found, cls)


def unsupported(
    params: SamplingParams, *, speculates: bool, pooling: Pooling = "", has_first_runner: bool = False
) -> str:
    """Return why vLLM cannot serve these parameters, or "".

    `speculates`: it has a draft model. `pooling`: how it pools prompts; "" if it generates text. `has_first_runner`: it
    uses its first model runner.
    """
    if params.pooling != pooling:
        wanted = f"pooling {params.pooling!r}" if params.pooling else "generated text"
        provided = f"supports pooling {pooling!r}" if pooling else "generates text"
        return f"the request requires {wanted}, but this worker {provided}"
    if params.logprob_token_ids and has_first_runner:
        # Its sampler returns wrong alternatives for all other requests of the step.
        return (
            "logprob_token_ids, and allowed_token_ids in a beam search, are not supported by --engine vllm with vLLM's "
            "first model runner, as on CPUs: omit them"
        )
    if len(params.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        given = len(params.logprob_token_ids)
        return f"logprob_token_ids has {given} tokens, the maximum with --engine vllm is {MAX_LOGPROB_TOKEN_IDS}"
    if speculates and (used := [name for name in WITHOUT_DRAFTS if getattr(params, name)]):
        name = API_NAMES.get(used[0], used[0])
        return f"{name} is not supported by --engine vllm with --speculative-config: omit it"
    return ""


def sampling_params(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    earlier: int,
    eos_token_ids: Collection[int],
    transfer: TransferParams,
    most_tokens: int = 0,
    mixes_seed: bool = True,
) -> vllm.SamplingParams:
    """Return vLLM's parameters. The last `earlier` of `num_prompt_tokens` tokens are output of the request.

    `most_tokens` limits the number of tokens; 0 for the request's limit. With `mixes_seed`, draws depend on the number
    of earlier tokens: vLLM's first model runner draws from the beginning of a seed's sequence for every request.
    """
    import vllm
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    left = max(1, params.max_tokens - earlier)
    max_tokens = min(left, most_tokens) if most_tokens else left
    extra: dict[str, Any] = {}
    if transfer_params := transfer.to_dict():
        extra["kv_transfer_params"] = transfer_params
    has_rules = needs_rules(params, earlier)
    if has_rules:
        rules = TokenRules(start=num_prompt_tokens - earlier, params=msgspec.msgpack.encode(params))
        extra[RULES_KEY] = msgspec.to_builtins(rules, builtin_types=(bytes,))
    # End tokens are passed as stop tokens, because vLLM's own may differ from those of the model's files.
    stops = [*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids]
    by_id = list(params.logprob_token_ids)
    logprobs = params.logprobs if params.logprobs >= 0 else None
    return vllm.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(max(0, params.min_tokens - earlier), max_tokens),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=seed_at(params.seed, earlier if mixes_seed else 0),
        presence_penalty=0.0 if has_rules else params.presence_penalty,
        frequency_penalty=0.0 if has_rules else params.frequency_penalty,
        repetition_penalty=1.0 if has_rules else params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        allowed_token_ids=list(params.allowed_token_ids) or None,
        logprobs=len(by_id) if by_id and logprobs is not None else logprobs,
        logprob_token_ids=by_id if by_id and logprobs is not None else None,
        prompt_logprobs=params.prompt_logprobs if params.prompt_logprobs >= 0 and not earlier else None,
        ignore_eos=True,
        stop_token_ids=list(dict.fromkeys(stops)),
        structured_outputs=StructuredOutputsParams(grammar=as_lark(params.grammar)) if params.grammar else None,
        extra_args=extra or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def needs_rules(params: SamplingParams, earlier: int) -> bool:
    """Return whether `token_rules.py` must apply penalties and bad words instead of vLLM."""
    has_penalties = bool(params.presence_penalty or params.frequency_penalty)
    return bool(params.bad_words) or params.thinking is not None or (earlier > 0 and has_penalties)


def seed_at(seed: int, earlier: int) -> int:
    """Return the seed of the draws after `earlier` tokens. Never -1, which vLLM takes for no seed."""
    if earlier:
        text = blake2b(f"{seed}/{earlier}".encode(), digest_size=8).digest()
        seed = int.from_bytes(text, "big", signed=True)
    return seed if seed != -1 else -(2**62)


def as_lark(grammar: str) -> str:
    """Write a grammar as one text in Lark's format, the only one that vLLM passes on to llguidance unchanged.

    A JSON list of grammars becomes its first grammar, with the others as nested rules.
    """
    return WHITE_SPACE.sub(SEPARATORS, _joined(grammar))


def _joined(grammar: str) -> str:
    if not grammar.lstrip().startswith("{"):
        return grammar if grammar.startswith("%llguidance") else f"%llguidance {{}}\n{grammar}"
    first, *others = json.loads(grammar)["grammars"]
    text = REFERENCE.sub(lambda found: _rule_name(found[1]), _as_rules(first))
    nested = [f"{_rule_name(each['name'])}: {_nested(each)}\n" for each in others]
    return "\n".join(("%llguidance {}", text, *nested))


def _rule_name(name: str) -> str:
    return f"nested_{name.lower().replace('-', '_')}"


def _as_rules(grammar: dict[str, Any]) -> str:
    return str(grammar["lark_grammar"]) if "lark_grammar" in grammar else f"start: {_nested(grammar)}\n"


def _nested(grammar: dict[str, Any]) -> str:
    if "lark_grammar" in grammar:
        return f"%lark {{\n{grammar['lark_grammar']}\n}}"
    return f"%json {json.dumps(grammar['json_schema'])}"


def checked_prompt(packed: bytes, num_output_tokens: int, *, vocab_size: int, max_prompt_len: int) -> list[int]:
    """Return the tokens of a prompt. Raises WireError if vLLM cannot compute it."""
    token_ids = unpack_tokens(packed)
    if not token_ids:
        raise WireError("the prompt is empty")
    if len(token_ids) > max_prompt_len:
        raise WireError(f"the prompt has {len(token_ids)} tokens, the maximum is {max_prompt_len}")
    if max(token_ids) >= vocab_size:
        raise WireError(f"token id {max(token_ids)} is outside of the vocabulary of {vocab_size}")
    if num_output_tokens >= len(token_ids):
        raise WireError(f"invalid num_output_tokens {num_output_tokens} of {len(token_ids)} tokens")
    return token_ids


def token_logprobs(token_id: int, found: Any, count: int, ids: Sequence[int] = ()) -> TokenLogprobs:
    """Convert vLLM's log probabilities of one position, by token id.

    `count` alternatives were requested, or those of the tokens `ids`.
    """
    own = found.get(token_id)
    if ids:
        top = sorted(((each, _finite(found[each].logprob)) for each in ids if each in found), key=_best_first)
    else:
        by_rank = sorted((one.rank or 0, each, one) for each, one in found.items() if one.rank)
        top = [(each, _finite(one.logprob)) for _, each, one in by_rank][:count]
    rank = own.rank or 0 if own is not None else 0
    return TokenLogprobs(_finite(own.logprob) if own is not None else LOGPROB_FLOOR, tuple(top), rank)


def _best_first(one: tuple[int, float]) -> tuple[float, int]:
    return -one[1], one[0]


def _finite(logprob: float) -> float:
    """Replace minus infinity and NaN."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
