"""Two vLLM engines with `DiptychConnector`, whose worker processes the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq.asyncio

from common.engine.vllm.link import (
    Admit,
    Announced,
    Arrived,
    ConnectorSettings,
    Done,
    Expect,
    FromRank,
    Load,
    RankLink,
    RankReady,
    Send,
    Sent,
    StepsDone,
    TransferLost,
    TransferParams,
    joined_addresses,
)
from common.wire.messages import KVDone, KVTarget

Result = TypeVar("Result")
EPOCHS = {"p": 5, "d": 7}
PATIENCE_S = 60.0
PATTERN = "([a-f][0-9][A-F])*[a-f]?[0-9]?"
GRAMMAR = "%llguidance {}\nstart: /([a-f][0-9][A-F]){40}/"
"""What it allows next depends on the tokens before, and it does not end within any test."""
CONNECTOR = {
    "kv_connector": "DiptychConnector",
    "kv_connector_module_path": "common.engine.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def write_model(folder: Path, kind: str, fields: Mapping[str, Any]) -> Path:
    """Write a random model in float32. `kind` is the name of its configuration in transformers, without `Config`."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**fields)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def write_llama(folder: Path) -> Path:
    """Write a tiny random model whose heads vLLM's CPU kernels support."""
    fields = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "initializer_range": 0.25, "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    return write_model(folder, "Llama", fields)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes: token 0 ends an answer, and token `n` is byte `n - 1`."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = {byte: 256 + number for number, byte in enumerate(byte for byte in range(256) if byte not in visible)}
    vocab = {"<end>": 0} | {chr(others.get(byte, byte)): byte + 1 for byte in range(256)}
    special = {"id": 0, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special | {"special": True}],
        "normalizer": None, "pre_tokenizer": bytewise, "post_processor": None, "decoder": bytewise,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens of `write_tokenizer`."""
    return bytes(token - 1 for token in tokens).decode()


class Worker:
    """A vLLM engine, and the worker process's end of its link."""

    def __init__(self, name: str, context: zmq.asyncio.Context, kv_transport: str) -> None:
        self.name, self.kv_transport = name, kv_transport
        self.events: list[FromRank] = []
        self.steps: list[StepsDone] = []
        self.link = RankLink(context, self._on_message)
        self._running = asyncio.create_task(self.link.run())

    def _on_message(self, rank: int, message: FromRank) -> None:
        (self.steps if isinstance(message, StepsDone) else self.events).append(message)  # type: ignore[arg-type]
        if isinstance(message, Announced):
            self.link.send(None, Admit(request_id=message.request_id, attempt=message.attempt))

    def num_computed(self, first: int) -> int:
        """Return the tokens of prompts that were computed, from the report `first` on."""
        return sum(shape.num_tokens for done in self.steps[first:] for shape, _ in done.steps)

    async def start(self, model: Path, arguments: Mapping[str, Any], staging_bytes: int) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = ConnectorSettings(
            link_address=self.link.address,
            link_key=self.link.key.hex(),
            silence_s=120,
            worker_id=self.name,
            epoch=EPOCHS[self.name],
            weights="m",
            kv_transport=self.kv_transport,
            staging_bytes=staging_bytes,
        )
        transfer = {**CONNECTOR, "kv_connector_extra_config": settings.extra_config()}
        given = {"dtype": "float32", "enable_prefix_caching": True, **arguments}
        args = AsyncEngineArgs(
            model=str(model),
            skip_tokenizer_init=not (model / "tokenizer.json").exists(),
            enforce_eager=True,
            max_model_len=2048,
            structured_outputs_config={"backend": "guidance"},
            kv_transfer_config=transfer,
            **given,
        )
        self.llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
        self.ready = await self.wait_all(lambda event: isinstance(event, RankReady))

    @property
    def kv_address(self) -> str:
        return joined_addresses([each.kv_address for each in sorted(self.ready, key=lambda each: each.rank)])

    async def wait_all(self, wanted: Callable[[FromRank], bool]) -> list[Any]:
        """Wait for an event of each rank."""
        deadline = time.monotonic() + PATIENCE_S
        size = self.llm.vllm_config.parallel_config.world_size
        while len(found := [event for event in self.events if wanted(event)]) < size:
            assert time.monotonic() < deadline, self.events
            await asyncio.sleep(0.005)
        return found

    async def wait_for(self, name: str, *kinds: type) -> Any:
        """Wait for an event of each rank about a request, and return the first."""
        return (await self.all_of(name, *kinds))[0]

    async def all_of(self, name: str, *kinds: type) -> list[Any]:
        return await self.wait_all(lambda event: isinstance(event, kinds) and getattr(event, "request_id", "") == name)

    async def generate(
        self,
        name: str,
        tokens: list[int],
        count: int,
        params: TransferParams | None = None,
        salt: str | None = None,
        grammar: str = "",
    ) -> list[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        structured = StructuredOutputsParams(grammar=grammar) if grammar else None
        extra = {"kv_transfer_params": params.to_dict()} if params is not None else None
        sampling = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
            structured_outputs=structured,
        )
        prompt: Any = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        result: list[int] = []
        async for output in self.llm.generate(prompt, sampling, name):
            result = list(output.outputs[0].token_ids)
        return result

    async def alone(self, tokens: list[int], count: int, grammar: str = "") -> list[int]:
        """What vLLM generates without a transfer, and without the prefix cache of the other requests."""
        return await self.generate(f"alone-{time.monotonic_ns()}", tokens, count, salt="alone", grammar=grammar)

    async def check_empty(self) -> None:
        """All blocks are free again."""
        deadline = time.monotonic() + PATIENCE_S
        while (last := self.steps[-1]).num_free_blocks < last.num_total_blocks or last.num_running or last.num_waiting:
            assert time.monotonic() < deadline, last
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        if hasattr(self, "llm"):
            self.llm.shutdown()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self.link.close()


class Engines:
    """A prefill worker `p`, and a decode worker `d`, on an event loop of their own thread."""

    p: Worker
    d: Worker

    def __init__(self, kv_transport: str) -> None:
        self._kv_transport = kv_transport
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float = 120) -> Result:
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout_s)

    async def start(self, model: Path, prefill: Mapping[str, Any], decode: Mapping[str, Any], staging: int) -> None:
        self._context = zmq.asyncio.Context()
        self.p, self.d = (Worker(name, self._context, self._kv_transport) for name in "pd")
        await self.p.start(model, prefill, staging)
        await self.d.start(model, decode, staging)

    @property
    def target(self) -> KVTarget:
        return KVTarget("d", EPOCHS["d"], self.d.kv_address)

    async def prefill(self, name: str, tokens: list[int], target: KVTarget | None = None, grammar: str = "") -> int:
        """Compute a prompt, send its KV, and return the first token."""
        send = Send(request_id=name, attempt=0, target=target or self.target)
        (first,) = await self.p.generate(f"{name}-p", tokens, 1, TransferParams(send=send), grammar=grammar)
        done = KVDone(request_id=name, attempt=0, first_token=first)
        self.p.link.send(None, Done(request_id=name, attempt=0, done=done))
        return first

    async def both(
        self, name: str, tokens: list[int], count: int, first_block: int = 0, grammar: str = ""
    ) -> tuple[list[int], Any]:
        """Compute a prompt on `p` and decode on `d`. Returns the tokens, and the end of the transfer."""
        named: dict[str, Any] = {"request_id": name, "attempt": 0}
        self.d.link.send(None, Expect(**named, num_tokens=len(tokens), first_block=first_block))
        first = await self.prefill(name, tokens, grammar=grammar)
        arrived = await self.d.all_of(name, Arrived, TransferLost)
        assert all(isinstance(each, Arrived) for each in arrived), arrived
        load = Load(**named, num_tokens=len(tokens), first_block=first_block)
        params = TransferParams(load=load, earlier=1)
        rest = await self.d.generate(f"{name}-d", [*tokens, first], count - 1, params, grammar=grammar)
        return [first, *rest], await self.p.wait_for(name, Sent)

    async def stop(self) -> None:
        for worker in (self.p, self.d):
            await worker.stop()

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self.run(self.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@contextlib.contextmanager
def running(
    model: Path, prefill: Mapping[str, Any], decode: Mapping[str, Any], staging_bytes: int, kv_transport: str = "auto"
) -> Iterator[Engines]:
    """Start the engines, which takes a minute or two."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[4]),
        }.items():
            patch.setenv(name, value)
        engines = Engines(kv_transport)
        try:
            engines.run(engines.start(model, prefill, decode, staging_bytes), 400)
            yield engines
        finally:
            engines.close()
