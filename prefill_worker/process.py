"""The prefill worker process: wires configuration, model, scheduler, KV sender and engine together."""

from __future__ import annotations

from diptych.common.block_pool import BlockPool
from diptych.common.engine import Engine
from diptych.common.errors import ConfigError
from diptych.common.kv_sender import KVSender
from diptych.common.model.files import ModelFiles
from diptych.common.model.grammar import Grammars
from diptych.common.model.loaded import LoadedModel
from diptych.common.model.quantised_staging import quantised_outgoing
from diptych.common.model.sampler import Sampler
from diptych.common.model.scores import max_scored_tokens
from diptych.common.model.staging import outgoing_blocks
from diptych.common.outgoing_transfer import TransferEnded
from diptych.common.settings import PrefillWorkerConfig
from diptych.common.worker_process import Send, WorkerProcess
from diptych.prefill_worker.engine import PrefillEngine
from diptych.prefill_worker.scheduler import PrefillScheduler


class PrefillWorker(WorkerProcess):
    """One prefill worker."""

    role = "prefill"

    def __init__(self, config: PrefillWorkerConfig) -> None:
        super().__init__(config)
        self.settings = config

    def build_engine(self, files: ModelFiles, loaded: LoadedModel, send: Send) -> Engine:
        settings, identity = self.settings, self.identity
        if settings.kv_transport == "shm" and loaded.kv.shared is None:
            raise ConfigError("kv_transport", "shm", "auto or tcp: this system has no memory to share")
        pool = BlockPool(loaded.kv.num_blocks, enable_prefix_caching=settings.enable_prefix_caching)
        scheduler = PrefillScheduler(
            pool,
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_scored_tokens=max_scored_tokens(loaded.vocab_size),
        )

        def on_ended(event: TransferEnded) -> None:
            engine.notify(event)

        sender = KVSender(
            self.blocking_context,
            outgoing_blocks(loaded.kv).view,
            loaded.kv.block_bytes,
            (identity.worker_id, identity.epoch, loaded.fingerprint),
            on_ended,
            lease_s=settings.kv_lease_s,
            num_streams=settings.kv_streams,
            memory=loaded.kv.shared.offer if loaded.kv.shared else None,
            require_shared=settings.kv_transport == "shm",
            curve=self.curve,
            quantise=quantised_outgoing(loaded.kv).view if settings.kv_wire_dtype == "fp8" else None,
        )
        engine = PrefillEngine(
            send,
            (identity.worker_id, identity.epoch),
            scheduler,
            loaded.runner,
            Sampler(loaded.vocab_size),
            sender,
            eos_token_ids=files.eos_token_ids,
            max_model_len=loaded.max_model_len,
            max_waiting=settings.max_waiting,
            grammars=Grammars(files, loaded.vocab_size),
        )
        engine.metrics = self.metrics
        sender.start()
        return engine
