"""A worker's engine on a real vLLM: an answer is the same whole, continued from its own tokens, and alone."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.vllm.duty import vllm_offer
from common.engine.vllm.launch import process_tree
from common.engine.worker import EngineStatus, RequestReceived, WorkerMetrics, WorkerParts
from common.engine.worker.vitals import WorkerIdentity
from common.model_files import resolve_model
from common.wire import BadWord, Curve, Gatekeeper, Role, SamplingParams, pack_tokens
from common.wire.messages import DecodeRequest, KVTarget, Message, PrefillRequest, RequestFailed, TokenOutput

from ....waiting import until
from .engines import GRAMMAR, PATTERN, text_of, write_llama, write_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
PROMPT = [(7 * place) % 200 + 5 for place in range(300)]
NUM_TOKENS, EARLIER = 12, 5


class Worker:
    """A worker's engine. `settings` are those of its process."""

    def __init__(self, folder: Path, role: Role = "decode", **settings: Any) -> None:
        write_tokenizer(folder)
        values: dict[str, Any] = {"engine": "vllm", "dtype": "float32", "device": "cpu"} | settings
        kind = {"decode": DecodeWorkerConfig, "prefill": PrefillWorkerConfig}[role]
        values["engine_args"] = ("--enforce-eager", *values.get("engine_args", ()))
        config = kind(model=str(folder), **values)
        files = resolve_model(str(folder), progress=False, supported=False)
        self.sent: list[tuple[bytes, Message]] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        offer, name = vllm_offer(role, config), role[0]
        metrics = self.metrics = WorkerMetrics("m", name, EngineStatus, role=role)
        curve = Curve.load(config.curve_key)
        self.gatekeeper = Gatekeeper(self.context, curve) if curve is not None else None
        if self.gatekeeper is not None:
            self.gatekeeper.start()
        duty = offer.begin(WorkerParts(WorkerIdentity(name, role, role, 1), self.context, curve, metrics))
        earlier = process_tree()
        self.model = offer.load(files)
        self.model._processes -= earlier  # of other workers in this process
        self.engine: Any = duty.build_engine(self.model, self.sent.extend)
        self.engine.start()
        self.number = 0

    async def ask(self, prompt: list[int], earlier: int = 0, prefill: Worker | None = None, **given: Any) -> list[int]:
        """Return the tokens of an answer, which begins with the last `earlier` tokens of `prompt`."""
        self.number += 1
        name = f"r{self.number}"
        params = SamplingParams(max_tokens=NUM_TOKENS, **{"temperature": 0.0, "ignore_eos": True} | given)
        values: dict[str, Any] = {
            "request_id": name, "attempt": 1, "prompt": pack_tokens(prompt), "params": params,
            "num_output_tokens": earlier,
        }  # fmt: skip
        request = DecodeRequest(**values, prefill_worker="p" if prefill is not None else "")
        self.engine.submit(RequestReceived(b"router", request))
        if prefill is not None:
            target = KVTarget("d", 1, self.model.kv_address)
            prefill.engine.submit(RequestReceived(b"router", PrefillRequest(**values, decode=target)))
        await until(lambda: self.has_ended(name), patience_s=60.0)
        return [token for delta in self.deltas(name) for token in delta.token_ids]

    @property
    def num_received_bytes(self) -> float:
        samples = [sample for family in self.metrics.registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name.endswith("transfer_bytes_total"))

    def deltas(self, name: str) -> list[Any]:
        outputs = [message for _, message in self.sent if isinstance(message, TokenOutput)]
        return [delta for each in outputs for delta in each.outputs if delta.request_id == name]

    def has_ended(self, name: str) -> bool:
        failed = [message for _, message in self.sent if isinstance(message, RequestFailed)]
        assert not failed, failed
        return any(delta.finish_reason for delta in self.deltas(name))

    def close(self) -> None:
        assert self.engine.stop()
        self.model.close()
        if self.gatekeeper is not None:
            self.gatekeeper.stop()
        self.context.term()


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """Return the greedy answer of transformers."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder).float()
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    answer: list[int] = whole[0, len(prompt) :].tolist()
    return answer


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    in_steps = ("--max-num-batched-tokens", "256", "--max-num-seqs", "16")
    made = Worker(write_llama(tmp_path_factory.mktemp("llama")), engine_args=in_steps)
    yield made
    made.close()


async def test_greedy_tokens_are_those_of_transformers(worker: Worker) -> None:
    assert await worker.ask(PROMPT) == greedy(Path(worker.model._llm.model_config.model), PROMPT)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"presence_penalty": 1.5, "frequency_penalty": 1.2},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.7},
        {"min_tokens": 9, "stop_token_ids": tuple(range(100))},
        {"bad_words": tuple(BadWord.of([token]) for token in range(0, 512, 3))},
    ],
)
async def test_an_answer_continues_from_its_tokens(worker: Worker, given: dict[str, Any]) -> None:
    whole = await worker.ask(PROMPT, **given)
    assert await worker.ask(PROMPT + whole[:EARLIER], EARLIER, **given) == whole[EARLIER:]


async def test_a_grammar_continues_after_the_tokens_of_an_answer(worker: Worker) -> None:
    whole = await worker.ask(PROMPT, grammar=GRAMMAR)
    assert re.fullmatch(PATTERN, text_of(whole))
    for earlier in range(1, 4):
        assert await worker.ask(PROMPT + whole[:earlier], earlier, grammar=GRAMMAR) == whole[earlier:]


async def test_seeds_decide_draws(worker: Worker) -> None:
    """The prompt takes two steps, and one when most of it is cached."""
    prompt = [token + 1 for token in PROMPT]
    draws = [await worker.ask(prompt, temperature=1.0, seed=seed) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


async def test_cached_blocks_are_those_of_the_prompt(worker: Worker) -> None:
    await worker.ask(PROMPT)
    await until(lambda: len(worker.model.cached) >= 2)
    assert worker.engine.status.blocks.cached >= 2
    await until(lambda: worker.engine.status.step_model.num_steps > 0)


async def test_drafts_are_counted_and_change_no_token(tmp_path: Path, worker: Worker) -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    speculating = Worker(write_llama(tmp_path), engine_args=("--speculative-config", json.dumps(drafting)))
    metrics = speculating.metrics
    try:
        assert await speculating.ask(PROMPT) == await worker.ask(PROMPT)
        timeline = speculating.deltas("r1")[-1].timeline
        assert timeline.num_draft_tokens >= timeline.num_drafts > 0
        name, labels = "vllm:spec_decode_num_drafts_total", {"model_name": "m", "engine": "d", "kind": "ngram"}
        await until(lambda: metrics.registry.get_sample_value(name, labels) == timeline.num_drafts)
    finally:
        speculating.close()
