"""Prefill duty: builds scheduler, KV sender and engine from settings and model."""

from __future__ import annotations

from common.config import PrefillWorkerConfig
from common.engine.kv import SMALL_DTYPES, quantised_outgoing
from common.engine.run import LoadedModel
from common.engine.sampling import Sampler, max_prompt_logprobs
from common.engine.sequences import EngineParts, hidden_state_slots
from common.engine.transfer import blocks_in_queues
from common.engine.worker import DutyOffer, LoopDuty, LoopModel, Send, WorkerParts, free_memory
from common.grammar import Grammars
from common.model_files import ModelFiles
from prefill_worker.engine import PrefillEngine
from prefill_worker.launcher import Pooler, PromptLauncher
from prefill_worker.scheduler import PrefillScheduler


class PrefillDuty(LoopDuty):
    """Duty that computes the KV cache of prompts and sends it, or pools their hidden states."""

    role = "prefill"

    def __init__(self, config: PrefillWorkerConfig, parts: WorkerParts) -> None:
        super().__init__(config, parts)
        self.settings = config

    def new_engine(self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, send: Send) -> PrefillEngine:
        settings = self.settings
        pool = self.new_pool(loaded)
        tiers = self.new_tiers(loaded, pool, lambda event: engine.notify(event))
        scheduler = PrefillScheduler(
            pool,
            max_num_batched_tokens=settings.step_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_prompt_logprobs=max_prompt_logprobs(loaded.vocab_size),
            window=loaded.window,
        )
        quantise = None
        if settings.kv_wire_dtype == "fp8" and loaded.kv.dtype not in SMALL_DTYPES.values():
            quantise = quantised_outgoing(loaded.kv, blocks_in_queues(loaded.kv.wire_bytes)).views
        sender = self.new_sender(
            loaded,
            lambda event: engine.notify(event),
            lease_s=settings.kv_lease_s,
            num_streams=settings.kv_streams,
            quantise=quantise,
        )
        peers = self.new_peers(loaded, pool, lambda event: engine.notify(event))
        hidden = hidden_state_slots(loaded.drafting)
        pooler = None if loaded.task.generates else Pooler(loaded.task.pooling, loaded.score)
        engine = PrefillEngine(
            send,
            self.engine_config(files, loaded),
            scheduler,
            PromptLauncher(loaded.runner, Sampler(loaded.vocab_size), pooler, hidden),
            sender,
            self.parts.metrics,
            EngineParts(grammars, tiers, loaded.adapters, peers, hidden),
        )
        sender.start()
        return engine


def prefill_offer(config: PrefillWorkerConfig) -> DutyOffer[LoopModel]:
    """Return the offer of a process to compute prompts with these settings."""
    return DutyOffer(
        "prefill",
        config,
        lambda files: LoopModel.load(files, config),
        lambda parts: PrefillDuty(config, parts),
        renew=lambda model, files: model.renew(files, config),
        free=free_memory,
    )
