"""Roles of a worker whose model vLLM computes."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

from common.config import WorkerConfig
from common.engine.kv import BlockLog
from common.engine.worker import DutyOffer, Engine, Send, WorkerParts
from common.model_files import ModelFiles
from common.wire import Role

if TYPE_CHECKING:
    from common.engine.vllm.model import VllmModel

log = logging.getLogger(__name__)


class VllmDuty:
    """One run of a role. The ranks bind the KV sockets, so its address is known once the model is loaded."""

    def __init__(self, role: Role, config: WorkerConfig, parts: WorkerParts) -> None:
        self.role, self.config, self.parts = role, config, parts
        self.block_log = BlockLog(parts.identity.epoch)
        self.kv_address = self.lend_address = ""

    def bind(self) -> None:
        """Do nothing: the ranks bind the sockets."""

    def close_kv(self) -> None:
        """Do nothing: the model closes the sockets."""

    def build_engine(self, model: VllmModel, send: Send) -> Engine:
        from common.engine.vllm.engine import VllmEngine

        if self.role == "decode":
            self.kv_address = model.kv_address
        identity = self.parts.identity
        return VllmEngine(
            self.role,
            model,
            send,
            (identity.worker_id, identity.epoch),
            self.parts.metrics,
            max_waiting=self.config.max_waiting,
            stall_timeout_s=self.config.stall_timeout_s,
        )


class _Offer:
    """Loads the model for the duty that the process has begun, because the ranks need its identity."""

    def __init__(self, role: Role, config: WorkerConfig) -> None:
        self._role, self._config = role, config
        self._duty: VllmDuty | None = None

    def begin(self, parts: WorkerParts) -> VllmDuty:
        self._duty = VllmDuty(self._role, self._config, parts)
        return self._duty

    def load(self, files: ModelFiles) -> VllmModel:
        from common.engine.vllm.model import load_vllm

        assert self._duty is not None  # the process begins the duty first
        return load_vllm(files, self._config, self._duty.parts, self._duty.block_log)

    def free(self) -> None:
        """Wait until vLLM's processes have ended, which frees their memory and ports."""
        from common.engine.vllm.launch import end_processes, process_tree

        end_processes(process_tree())
        gc.collect()

    def abandon(self) -> None:
        """Kill vLLM's processes, which import modules for seconds before they notice the end of their parent."""
        from common.engine.vllm.launch import kill_processes, process_tree

        kill_processes(process_tree())


def vllm_offer(role: Role, config: WorkerConfig) -> DutyOffer[VllmModel]:
    """Return the offer of a process to serve a role with vLLM."""
    offer = _Offer(role, config)
    free = offer.free if config.rank_hosts == 1 else None
    return DutyOffer(role, config, offer.load, offer.begin, offer.abandon, free=free)
