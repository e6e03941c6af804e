"""The prefill worker process: wires configuration, model, scheduler, KV sender and engine together."""

from __future__ import annotations

from common.config import PrefillWorkerConfig
from common.errors import ConfigError
from common.grammar.grammars import Grammars
from common.kv.block_pool import BlockPool
from common.kv.quantised_staging import quantised_outgoing
from common.kv.staging import outgoing_blocks
from common.model_files.files import ModelFiles
from common.runner.loaded import LoadedModel
from common.sampling.logprobs import max_prompt_logprobs
from common.sampling.sampler import Sampler
from common.transfer.outgoing import TransferEnded
from common.transfer.sender import KVSender
from common.worker.engine import Engine
from common.worker.process import Send, WorkerProcess
from prefill_worker.engine import PrefillEngine
from prefill_worker.scheduler import PrefillScheduler


class PrefillWorker(WorkerProcess):
    """One prefill worker."""

    role = "prefill"

    def __init__(self, config: PrefillWorkerConfig) -> None:
        super().__init__(config)
        self.settings = config

    def build_engine(self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, send: Send) -> Engine:
        settings, identity = self.settings, self.identity
        if settings.kv_transport == "shm" and loaded.kv.shared is None:
            raise ConfigError("kv_transport", "shm", "auto or tcp: this system has no memory to share")
        pool = BlockPool(
            loaded.kv.num_blocks, loaded.kv.block_size, enable_prefix_caching=settings.enable_prefix_caching
        )
        scheduler = PrefillScheduler(
            pool,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_prompt_logprobs=max_prompt_logprobs(loaded.vocab_size),
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
            grammars=grammars,
        )
        engine.metrics = self.metrics
        sender.start()
        return engine
