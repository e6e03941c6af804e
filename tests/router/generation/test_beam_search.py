"""Beam search: the pure search beside a search of everything, then over HTTP and with a pool that fails."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from common.errors import Unavailable
from common.wire.sampling_params import TokenLogprobs
from router.dispatch.client import GenerationRequest, TokenEvent
from router.generation.beam_search import Beam, BeamSearch
from router.generation.budgets import MAX_PROMPT_LOGPROBS

Model = Callable[[Sequence[int]], list[float]]
Rule = Callable[[Sequence[int]], frozenset[int]]
"""What must not follow these tokens."""
END, VOCAB, MAX_TOKENS = 0, 4, 5


def random_model(seed: int) -> Model:
    """Log-probabilities of the next token, which depend on all tokens before it."""

    @functools.cache
    def logprobs(tokens: tuple[int, ...]) -> list[float]:
        weights = [random.Random(f"{seed} {tokens} {i}").random() ** 3 + 1e-3 for i in range(VOCAB)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return lambda tokens: logprobs(tuple(tokens))


def free(tokens: Sequence[int]) -> frozenset[int]:
    return frozenset()


def bound(tokens: Sequence[int]) -> frozenset[int]:
    """No end before the third token, and no token twice in a row."""
    return frozenset(tokens[-1:]) | (frozenset({END}) if len(tokens) < 2 else frozenset())


def search(
    model: Model, width: int, penalty: float, ends: Sequence[int] = (END,), rule: Rule = free
) -> tuple[list[Beam], int]:
    """The best continuations, and the number of steps."""
    beams, num_steps = BeamSearch(width, MAX_TOKENS, ends, length_penalty=penalty), 0
    while beams.running:
        found, banned = [], [rule(beam.token_ids) for beam in beams.running]
        for beam, bans in zip(beams.running, banned, strict=True):
            values = sorted(enumerate(model(beam.token_ids)), key=lambda item: -item[1])
            found.append(TokenLogprobs(0.0, tuple(values[: beams.num_candidates + len(bans)])))
        beams.advance(found, banned)
        num_steps += 1
    return beams.best(), num_steps


def everything(model: Model, penalty: float, rule: Rule = free) -> list[tuple[float, tuple[int, ...]]]:
    """Every whole answer that keeps a rule, with its score, the best first."""
    scored = []
    for length in range(1, MAX_TOKENS + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ends = tokens[-1] == END
            if END in tokens[:-1] or (length < MAX_TOKENS and not ends):
                continue
            if any(token in rule(tokens[:i]) for i, token in enumerate(tokens)):
                continue
            total = sum(model(tokens[:i])[token] for i, token in enumerate(tokens))
            scored.append((total / max(1, length - ends) ** penalty, tokens))
    return sorted(scored, reverse=True)


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("rule", [free, bound])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_search_that_is_wide_enough_finds_the_best_of_all(seed: int, penalty: float, rule: Rule) -> None:
    model = random_model(seed)
    found, _ = search(model, 3**MAX_TOKENS, penalty, rule=rule)
    best = everything(model, penalty, rule)[: len(found)]
    assert found and [beam.token_ids for beam in found[:20]] == [tokens for _, tokens in best[:20]]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_to_stop_early_changes_nothing(monkeypatch: pytest.MonkeyPatch, penalty: float) -> None:
    early = [search(random_model(seed), 2, penalty) for seed in range(40)]
    monkeypatch.setattr(BeamSearch, "_bound", lambda self: math.inf)
    late = [search(random_model(seed), 2, penalty) for seed in range(40)]
    assert [[beam.token_ids for beam in found] for found, _ in early] == [
        [beam.token_ids for beam in found] for found, _ in late
    ]
    saved = sum(steps for _, steps in late) - sum(steps for _, steps in early)
    assert saved > 0 or penalty == 1.0  # five tokens are too few to rule out that the longest answer wins


def test_one_beam_is_greedy() -> None:
    model = random_model(1)
    ((beam,), _) = search(model, 1, 0.0, ends=())
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        values = model(tokens)
        tokens.append(values.index(max(values)))
    assert (list(beam.token_ids), beam.finish_reason) == (tokens, "length")


class Pools:
    """A client whose model prefers letters by what was said: "a" and "b" at first, then whatever makes "bcd" best."""

    NEXT: dict[str, dict[str, float]] = {
        "": {"a": -0.1, "b": -0.4},
        "a": {"x": -3.0, "y": -3.1},
        "b": {"c": -0.1, "e": -2.0},
    }

    def __init__(self, engine: Any, eos: int) -> None:
        self.engine, self.eos, self.asked = engine, eos, list[GenerationRequest]()
        self.fail_at, self.weight_version = -1, ""
        self._sizes: dict[str, int] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        self.asked.append(request)
        if len(self.asked) == self.fail_at:
            raise Unavailable("no worker", retry_after_s=1.0)
        size = self._sizes.setdefault(request.request_id.rsplit("-", 2)[0], len(request.prompt_token_ids))
        said = bytes(list(request.prompt_token_ids[size:])).decode()
        known = self.NEXT.get(said, {"d": -0.2, "f": -2.0})
        top = [(ord(letter), value) for letter, value in known.items()]
        top += [(self.eos, -9.0), *((ord("0") + i, -20.0 - i) for i in range(request.params.logprobs - 3))]
        if chosen := request.params.logprob_token_ids:
            top = [each for each in top if each[0] in chosen]
        of_prompt = tuple(TokenLogprobs(-float(i), ((0, -0.5),)) for i in request.prompt_token_ids[1:])
        shown = of_prompt if request.params.prompt_logprobs >= 0 else ()
        logprobs = (TokenLogprobs(top[0][1], tuple(top)),)
        version = self.weight_version
        yield TokenEvent((top[0][0],), logprobs, "length", len(said), prompt_logprobs=shown, weight_version=version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.fixture
async def pools(start: Any, tools: Any) -> tuple[Any, Pools]:
    running = await start(tools.Engine())
    running.app.state.router_state.models.default.client = found = Pools(running.engine, tools.EOS)
    return running, found


async def test_the_likeliest_answer_is_not_the_greedy_one(pools: tuple[Any, Pools]) -> None:
    running, client = pools
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": 1, "return_token_ids": True}
    body = (await running.completion(**fields)).json()
    assert [choice["text"] for choice in body["choices"]] == ["bcd", "bcf"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 2
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.4, -0.1, -0.2]
    assert body["usage"] == body["usage"] | {"prompt_tokens": 2, "completion_tokens": 6}
    assert len(client.asked) == 1 + 2 + 2 and {request.params.max_tokens for request in client.asked} == {1}
    assert len({request.request_id for request in client.asked}) == 5
    assert [request.continues for request in client.asked] == [False] + 4 * [True]
    assert client.asked[0].num_at_once == 2


@pytest.mark.parametrize(("fail_at", "num_tokens"), [(-1, 2 + 5), (1, 0), (5, 2 + 4)])
async def test_tokens_of_all_beams_are_spent(
    pools: tuple[Any, Pools], monkeypatch: pytest.MonkeyPatch, fail_at: int, num_tokens: int
) -> None:
    """A search that fails before its first token gets the prompt's tokens back."""
    running, client = pools
    access, client.fail_at = running.app.state.router_state.access, fail_at
    spent: list[int] = []
    monkeypatch.setattr(access, "take_prompt", lambda _, num: spent.append(num))
    monkeypatch.setattr(access, "spend", lambda _, num: spent.append(num))
    reply = await running.completion(use_beam_search=True, best_of=2, max_tokens=3)
    assert reply.status_code == (200 if fail_at < 0 else 503) and sum(spent) == num_tokens


async def test_an_answer_reports_the_weights_that_computed_it(pools: tuple[Any, Pools]) -> None:
    running, client = pools
    client.weight_version = "v2"
    reply = await running.completion(use_beam_search=True, n=2, max_tokens=3)
    assert reply.headers["x-weight-version"] == "v2" and reply.json()["metadata"] == {"weight_version": "v2"}


async def test_more_beams_than_choices_and_streams(pools: tuple[Any, Pools]) -> None:
    running, client = pools
    fields = {"use_beam_search": True, "best_of": 2, "max_tokens": 3}
    assert [choice["text"] for choice in (await running.completion(**fields)).json()["choices"]] == ["bcd"]
    assert len(client.asked) == 5
    events = await running.events(**fields, prompt=["hi", "ho"])
    texts = {event["choices"][0]["index"]: event["choices"][0]["text"] for event in events[:-1]}
    assert texts == {0: "bcd", 1: "bcd"}
    events = await running.events("chat", use_beam_search=True, n=1, max_tokens=2)
    assert events[-1] == "[DONE]"


async def test_answers_that_end(pools: tuple[Any, Pools], tools: Any) -> None:
    running, client = pools
    client.NEXT = {"": {"a": -5.0, "b": -9.5}, **{text: {"d": -9.0, "f": -9.0} for text in ("a", "b")}}
    fields = {"use_beam_search": True, "n": 1, "max_tokens": 3, "length_penalty": 0.0, "return_token_ids": True}
    (choice,) = (await running.completion(**fields)).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["text"]) == ([tools.EOS], "stop", "")
    (choice,) = (await running.completion(**fields, ignore_eos=True)).json()["choices"]
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 3


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"bad_words": ["c"]}, ["bed", "axd"]),
        ({"bad_words": ["b", "xd"]}, ["ayd", "axf"]),
        ({"allowed_token_ids": [*b"axycdef"]}, ["axd", "ayd"]),
        ({"min_tokens": 2, "length_penalty": -8.0}, ["bc", "be"]),
    ],
    ids=["a word", "the end of a word", "allowed tokens", "a length"],
)
async def test_rules_on_tokens_are_kept_in_every_beam(
    pools: tuple[Any, Pools], fields: dict[str, Any], texts: list[str]
) -> None:
    """A length penalty far below 0 would end the answer at once."""
    running, client = pools
    body = (await running.completion(use_beam_search=True, n=2, max_tokens=3, logprobs=0, **fields)).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    best = body["choices"][0]["logprobs"]["token_logprobs"]
    known = [client.NEXT.get(texts[0][:i], {"d": -0.2, "f": -2.0}).get(texts[0][i : i + 1], -9.0) for i in range(3)]
    assert best == known  # rules change no log-probability of what is left
    asked = {(one.params.min_tokens, one.params.bad_words, one.params.allowed_token_ids) for one in client.asked}
    assert asked == {(0, (), ())}


async def test_rules_that_leave_no_answer(pools: tuple[Any, Pools]) -> None:
    running, _ = pools
    reply = await running.completion(use_beam_search=True, max_tokens=3, allowed_token_ids=[97], bad_words=["a"])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")


async def test_as_many_alternatives_as_are_asked_for(pools: tuple[Any, Pools]) -> None:
    """More than a search of one beam has candidates."""
    running, _ = pools
    (choice,) = (await running.completion(use_beam_search=True, max_tokens=2, logprobs=7)).json()["choices"]
    assert [len(row) for row in choice["logprobs"]["top_logprobs"]] == [7, 7]


async def test_log_probabilities_of_the_prompt_are_those_of_the_first_step(pools: tuple[Any, Pools]) -> None:
    running, client = pools
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 2, "prompt": "hi", "return_tokens_as_token_ids": True}
    body = (await running.completion(**fields, prompt_logprobs=1)).json()
    assert [choice["prompt_logprobs"][1][str(ord("i"))]["logprob"] for choice in body["choices"]] == [-105.0] * 2
    body = (await running.completion(**fields, echo=True, logprobs=0)).json()
    assert [choice["logprobs"]["token_logprobs"][:2] for choice in body["choices"]] == [[None, -105.0]] * 2
    assert [one.params.prompt_logprobs >= 0 for one in client.asked] == [True, False, False] * 2


@pytest.mark.parametrize("fail_at", [1, 3])
async def test_a_step_that_fails_ends_the_answer(pools: tuple[Any, Pools], fail_at: int) -> None:
    running, client = pools
    client.fail_at = fail_at
    reply = await running.completion(use_beam_search=True, n=2, max_tokens=3)
    assert reply.status_code == 503 and reply.headers["retry-after"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logit_bias": {"5": 1}}, "logit_bias"), ({"repetition_penalty": 1.1}, "repetition_penalty"),
     ({"presence_penalty": 1.0}, "presence_penalty"), ({"guided_regex": "a+"}, "guided_regex"),
     ({"response_format": {"type": "json_object"}}, "response_format"),
     ({"logprobs": 1, "logprob_token_ids": [5]}, "logprob_token_ids"),
     ({"allowed_token_ids": [5] * 1025}, "allowed_token_ids"), ({"allowed_token_ids": [5], "logprobs": 1}, "logprobs")],
)  # fmt: skip
async def test_what_a_beam_search_cannot_do_is_said(running: Any, fields: dict[str, Any], param: str) -> None:
    reply = await running.completion(use_beam_search=True, max_tokens=3, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_fields_that_change_nothing_are_taken(pools: tuple[Any, Pools]) -> None:
    running, _ = pools
    same = {"logit_bias": {}, "bad_words": [], "repetition_penalty": 1.0, "presence_penalty": 0, "guided_json": None}
    assert (await running.completion(use_beam_search=True, max_tokens=3, **same)).status_code == 200
    assert (await running.chat(use_beam_search=True, max_tokens=3, tools=[])).status_code == 200


async def test_every_beam_counts_in_the_bound_on_log_probabilities(start: Any) -> None:
    running = await start(max_logprobs=-1)
    num_tokens = MAX_PROMPT_LOGPROBS // (1 + running.app.state.router_state.models.default.text.vocab_size) // 8
    reply = await running.completion(use_beam_search=True, logprobs=-1, max_tokens=num_tokens, best_of=9)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprobs")
    assert f" {9 * num_tokens:,} tokens" in reply.json()["error"]["message"]


async def test_a_length_penalty_needs_beams(running: Any) -> None:
    assert (await running.completion(length_penalty=2.0)).json()["error"]["param"] == "length_penalty"
    assert (await running.completion(length_penalty=1.0)).status_code == 200
