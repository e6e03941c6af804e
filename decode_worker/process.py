"""The decode worker process: wires configuration, model, scheduler, KV receiver and engine together."""

from __future__ import annotations

from common.config import DecodeWorkerConfig
from common.errors import ConfigError
from common.grammar.grammars import Grammars
from common.kv.block_pool import BlockPool
from common.kv.quantised_staging import quantised_incoming
from common.kv.staging import IncomingBlocks, incoming_blocks, outgoing_blocks
from common.model_files.files import ModelFiles
from common.runner.loaded import LoadedModel
from common.runner.runner import ModelRunner
from common.runner.step_thread import StepThread
from common.sampling.logprobs import max_prompt_logprobs
from common.sampling.sampler import Sampler
from common.transfer.outgoing import TransferAdvanced, TransferEnded
from common.transfer.receiver import KVReceiver, TransferCompleted, TransferFailed, TransferOpened
from common.transfer.sender import KVSender
from common.worker.engine import Engine
from common.worker.process import Send, WorkerProcess
from decode_worker.engine import DecodeEngine
from decode_worker.engine_config import DecodeEngineConfig
from decode_worker.grants import IncomingTransfers
from decode_worker.pipeline import Launcher
from decode_worker.recorder import Recorder
from decode_worker.scheduler import DecodeScheduler


class DecodeWorker(WorkerProcess):
    """One decode worker."""

    role = "decode"

    def __init__(self, config: DecodeWorkerConfig) -> None:
        super().__init__(config)
        self.settings = config
        self._receiver: KVReceiver | None = None
        self._blocks: IncomingBlocks  # set when the model is loaded, before the receiver starts

    def bind_kv(self) -> str:
        self._receiver = KVReceiver(
            self.blocking_context,
            self.settings.host,
            self.settings.kv_port,
            lambda index: self._blocks.view(index),
            self._on_transfer,
            share=self.settings.kv_transport != "tcp" and self.settings.device == "cpu",
            commit=lambda blocks: self._blocks.commit(blocks),
            curve=self.curve,
        )
        return self._receiver.address

    def close_kv(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def build_engine(self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, send: Send) -> Engine:
        settings, identity, receiver = self.settings, self.identity, self._receiver
        assert receiver is not None  # bound before the model is loaded
        if settings.kv_transport == "shm" and loaded.kv.shared is None:
            raise ConfigError("kv_transport", "shm", "auto or tcp: this system has no memory to share")
        self.loaded, self._blocks = loaded, incoming_blocks(loaded.kv)
        if settings.kv_cache_dtype == "auto":  # else blocks are of 8 bits already
            receiver.take_quantised(quantised_incoming(loaded.kv))
        sender = self._sender(loaded)
        sampler = Sampler(loaded.vocab_size)
        pool = BlockPool(
            loaded.kv.num_blocks, loaded.kv.block_size, enable_prefix_caching=settings.enable_prefix_caching
        )
        engine = DecodeEngine(
            send,
            DecodeEngineConfig(
                identity=(identity.worker_id, identity.epoch),
                eos_token_ids=files.eos_token_ids,
                max_model_len=loaded.max_model_len,
                max_waiting=settings.max_waiting,
                grant_timeout_s=settings.grant_timeout_s,
                transfer_timeout_s=settings.transfer_timeout_s,
                handover_timeout_s=settings.handover_timeout_s,
                max_draft_tokens=settings.max_draft_tokens,
            ),
            DecodeScheduler(
                pool,
                max_num_seqs=settings.max_num_seqs,
                local_prefill_chunk=settings.local_prefill_chunk,
                watermark=settings.watermark,
                max_prompt_logprobs=max_prompt_logprobs(loaded.vocab_size),
            ),
            loaded.runner,
            sampler,
            IncomingTransfers(
                receiver,
                epoch=identity.epoch,
                fingerprint=loaded.fingerprint,
                require_shared=settings.kv_transport == "shm",
            ),
            Recorder(self.metrics, block_size=settings.block_size),
            sender,
            launcher=step_launcher(loaded.runner, sampler),
            grammars=grammars,
        )
        self._engine = engine
        receiver.start()
        sender.start()
        return engine

    def _sender(self, loaded: LoadedModel) -> KVSender:
        """What hands running sequences over to other decode workers."""
        settings, identity = self.settings, self.identity
        return KVSender(
            self.blocking_context,
            outgoing_blocks(loaded.kv).view,
            loaded.kv.block_bytes,
            (identity.worker_id, identity.epoch, loaded.fingerprint),
            self._on_transfer,
            lease_s=settings.handover_timeout_s,
            num_streams=1,
            memory=loaded.kv.shared.offer if loaded.kv.shared else None,
            require_shared=settings.kv_transport == "shm",
            on_advanced=self._on_transfer,
            curve=self.curve,
        )

    def _on_transfer(
        self, event: TransferOpened | TransferCompleted | TransferFailed | TransferAdvanced | TransferEnded
    ) -> None:
        if isinstance(event, TransferOpened) or (isinstance(event, TransferFailed) and event.by_peer):
            self._engine.submit(event)  # peers can send any number of these: what there is no room for is lost
        else:
            self._engine.notify(event)


def step_launcher(runner: ModelRunner, sampler: Sampler) -> Launcher | None:
    """What launches steps ahead: on a CPU a thread, on a GPU the device itself, where steps are recorded."""
    if runner.kv.device.type == "cpu":
        return StepThread(runner, sampler)
    if type(runner) is ModelRunner:
        return None
    # Imported here: they need Triton, which a machine without a GPU may lack.
    from common.runner.graph_runner import GraphRunner
    from common.runner.step_launcher import StepLauncher

    return StepLauncher(runner, sampler) if isinstance(runner, GraphRunner) else None
