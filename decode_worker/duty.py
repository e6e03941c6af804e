"""Decode duty: builds scheduler, KV receiver, KV sender and engine from settings and model."""

from __future__ import annotations

import logging

from common.config import DecodeWorkerConfig
from common.engine.kv import SMALL_DTYPES, incoming_blocks, quantised_incoming
from common.engine.run import GraphRunner, LoadedModel, ModelRunner, StepLauncher, StepThread
from common.engine.sampling import Sampler, max_prompt_logprobs
from common.engine.sequences import EngineParts, HiddenStateSlots, hidden_state_slots
from common.engine.transfer import (
    IncomingTransfers,
    KVListener,
    KVReceiver,
    TransferAdvanced,
    TransferCompleted,
    TransferEnded,
    TransferEndpoints,
    TransferFailed,
    TransferOpened,
    blocks_per_message,
)
from common.engine.worker import DutyOffer, LoopDuty, LoopModel, Send, WorkerParts, free_memory
from common.grammar import Grammars
from common.model_files import ModelFiles
from decode_worker.drafting.drafter import DraftCache, Drafter
from decode_worker.drafting.head_drafter import HeadDrafter
from decode_worker.drafting.model_drafts import TokenDrafter
from decode_worker.engine import DecodeEngine, DecodeLimits
from decode_worker.handover import HANDOVER_TIMEOUT_S
from decode_worker.pipeline import DecodeModel, Launcher
from decode_worker.scheduler import DecodeScheduler

log = logging.getLogger(__name__)


class DecodeDuty(LoopDuty):
    """Duty that receives KV and generates tokens."""

    role = "decode"

    def __init__(self, config: DecodeWorkerConfig, parts: WorkerParts) -> None:
        super().__init__(config, parts)
        self.settings = config
        self._listener: KVListener | None = None
        self._receiver: KVReceiver | None = None

    def bind_kv(self) -> str:
        self._listener = KVListener(self.parts.context, self.settings.host, self.settings.kv_port, self.parts.curve)
        return self._listener.address

    def close_kv(self) -> None:
        super().close_kv()
        if self._receiver is not None:
            self._receiver.close()
        elif self._listener is not None:
            self._listener.close()

    def new_engine(self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, send: Send) -> DecodeEngine:
        assert self._listener is not None  # set by `bind_kv`
        pool = self.new_pool(loaded)
        tiers = self.new_tiers(loaded, pool, lambda event: self._engine.notify(event))
        settings, in_message = self.settings, blocks_per_message(loaded.kv.wire_bytes)
        blocks, quantised = incoming_blocks(loaded.kv, in_message), None
        incoming = self.transport.incoming(loaded.kv, blocks)
        if loaded.kv.dtype not in SMALL_DTYPES.values():  # otherwise blocks already have 8 bits
            quantised = quantised_incoming(loaded.kv, in_message)
        places = settings.places_within(loaded.kv.num_blocks * loaded.kv.block_size)
        scheduler = DecodeScheduler(
            pool,
            max_num_seqs=places,
            local_prefill_chunk=settings.step_tokens,
            watermark=settings.watermark,
            max_prompt_logprobs=max_prompt_logprobs(loaded.vocab_size),
            slo_tpot_s=settings.slo_tpot_ms / 1000,
            usual_num_seqs=min(places, settings.usual_places),
            usual_chunk=settings.usual_step_tokens,
            window=loaded.window,
        )
        self._receiver = receiver = KVReceiver(
            self.parts.context,
            self._listener,
            blocks,
            self._on_transfer,
            transports=() if incoming is None else (incoming,),
            quantised=quantised,
        )
        transfers = IncomingTransfers(
            receiver,
            epoch=self.parts.identity.epoch,
            fingerprint=loaded.fingerprint,
            required=self.transport.name if self.transport.is_required else "",
        )
        sender = self.new_sender(
            loaded,
            self._on_transfer,
            on_advanced=self._on_transfer,
            lease_s=HANDOVER_TIMEOUT_S,
            num_streams=1,
        )
        peers = self.new_peers(loaded, pool, lambda event: self._engine.notify(event))
        hidden = hidden_state_slots(loaded.drafting)
        self._engine = DecodeEngine(
            send,
            self.engine_config(files, loaded),
            DecodeLimits(
                grant_timeout_s=settings.grant_timeout_s,
                transfer_timeout_s=settings.transfer_timeout_s,
                max_draft_tokens=settings.max_draft_tokens,
            ),
            scheduler,
            self._model(loaded, hidden),
            TransferEndpoints(transfers, sender),
            self.parts.metrics,
            EngineParts(grammars, tiers, loaded.adapters, peers, hidden),
        )
        receiver.start()
        sender.start()
        return self._engine

    def _model(self, loaded: LoadedModel, hidden: HiddenStateSlots | None) -> DecodeModel:
        runner, sampler = loaded.runner, Sampler(loaded.vocab_size)
        return DecodeModel(runner, sampler, step_launcher(runner, sampler), self._drafter(loaded, sampler, hidden))

    def _drafter(self, loaded: LoadedModel, sampler: Sampler, hidden: HiddenStateSlots | None) -> TokenDrafter | None:
        draft, drafting = loaded.draft, loaded.drafting
        if drafting is not None and hidden is not None:
            return HeadDrafter(loaded.runner, drafting, sampler, hidden)
        if draft is None:
            if self.settings.draft_model:
                log.warning(
                    "worker decodes without a draft model: it was started as a prefill worker, which does not load one"
                )
            return None
        kv, caching = draft.runner.kv, self.settings.enable_prefix_caching
        cache = DraftCache(kv.num_blocks, kv.block_size, enable_prefix_caching=caching)
        return Drafter(draft.runner, sampler, cache, step_s=draft.step_s, token_s=draft.token_s)

    def _on_transfer(
        self, event: TransferOpened | TransferCompleted | TransferFailed | TransferAdvanced | TransferEnded
    ) -> None:
        if isinstance(event, TransferOpened) or (isinstance(event, TransferFailed) and event.by_peer):
            self._engine.submit(event)  # dropped if the inbox is full, because peers can send any number of these
        else:
            self._engine.notify(event)


def decode_offer(config: DecodeWorkerConfig) -> DutyOffer[LoopModel]:
    """Return the offer of a process to decode with these settings."""
    return DutyOffer(
        "decode",
        config,
        lambda files: LoopModel.load(files, config),
        lambda parts: DecodeDuty(config, parts),
        renew=lambda model, files: model.renew(files, config),
        free=free_memory,
    )


def step_launcher(runner: ModelRunner, sampler: Sampler) -> Launcher | None:
    """Return the launcher of steps ahead: a thread on a CPU, recorded steps on a GPU, None otherwise."""
    if runner.kv.device.type == "cpu":
        return StepThread(runner, sampler)
    return StepLauncher(runner, sampler) if isinstance(runner, GraphRunner) else None
