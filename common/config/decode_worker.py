"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.config.field import GOAL_MS, PORT, setting
from common.config.worker import WorkerConfig
from common.errors import ConfigError

USUAL_SEQS, MOST_SEQS, USUAL_CHUNK, MOST_CHUNK = 64, 256, 128, 1024
"""Where flags that are not given stand, and how far a goal may turn the knob: what a step takes beside weights and KV
cache, and the number of recorded steps, grow with it."""
SEQ_TOKENS = 512
"""KV tokens per concurrent request on a GPU. With fewer, long answers would preempt each other."""


@dataclass(frozen=True)
class DecodeWorkerConfig(WorkerConfig):
    """A decode worker: receives KV and generates tokens."""

    section: ClassVar[str] = "decode_worker"
    env_prefix: ClassVar[str] = "DECODE"
    about: ClassVar[str] = "Receives the KV cache of prompts and generates tokens; computes short prompts itself."

    slo_tpot_ms: float = setting(
        0.0,
        "milliseconds that a token after the first should take: as many sequences run, and as many prompt and draft "
        "tokens are computed beside them, as keep it; also for diptych_decode_pressure and for the pace of steps while "
        "prompts are computed on the same cores; 0: no such goal",
        group="Scaling",
        **GOAL_MS,
    )
    cuda_graphs: bool = setting(
        True, "record decode steps as CUDA graphs at start and launch each as a whole; only on cuda", group="Device"
    )
    kv_port: int = setting(0, "port that KV blocks arrive on; 0 picks a free one", group="Sockets", **PORT)
    max_num_seqs: int = setting(
        0,
        f"maximum concurrent requests; --slo-tpot-ms may lower it; 0: {USUAL_SEQS}, or up to {MOST_SEQS} on a GPU or "
        f"with --slo-tpot-ms; on a GPU at most one for each {SEQ_TOKENS} tokens of the KV cache",
        group="Scheduling",
        ge=0,
        le=4096,
    )
    local_prefill_chunk: int = setting(
        0,
        "prompt tokens computed between two decode steps when this worker prefills itself, at most: --slo-tpot-ms may "
        f"allow fewer; 0: {USUAL_CHUNK}, or with --slo-tpot-ms as many as it allows, up to {MOST_CHUNK}",
        group="Scheduling",
        ge=0,
        le=1_000_000,
    )
    max_draft_tokens: int = setting(
        6,
        "tokens that a step may draft for each answer, from what followed the same tokens before; the step checks "
        "them all, so answers stay the same; 0: none",
        group="Scheduling",
        ge=0,
        le=64,
    )
    draft_model: str = setting(
        "",
        "a smaller model of the same vocabulary, a name as --model takes, that drafts tokens where that pays more than "
        "those that followed the same tokens before; its KV takes a part of --kv-memory-gib; empty: none",
        group="Scheduling",
        metavar="NAME",
    )
    draft_quantization: str = setting(
        "auto",
        "how the draft model's weights are kept: none (the dtype), int8, int4, or auto (of a quantised model as its "
        "file holds them, of others int8 on a CPU and none on a GPU)",
        group="Scheduling",
        choices=("none", "int8", "int4", "auto"),
    )
    watermark: float = setting(
        0.02,
        "share of the KV blocks that stays free for running requests when new ones come in",
        group="KV cache",
        ge=0,
        le=0.5,
    )
    grant_timeout_s: float = setting(
        30.0, "seconds a prompt may wait here for free KV blocks", group="Transfer", ge=0.05, le=3600
    )
    transfer_timeout_s: float = setting(
        30.0,
        "seconds between two arriving KV frames after which a transfer has failed",
        group="Transfer",
        ge=0.05,
        le=3600,
    )

    def check(self) -> None:
        super().check()
        if self.draft_model and not self.max_draft_tokens:
            raise ConfigError(
                "draft_model", self.draft_model, "empty with --max-draft-tokens 0: it would draft nothing"
            )
        if self.batch_invariant and self.on_gpu and self.max_draft_tokens:
            allowed = f"0 on {self.device} with --batch-invariant: rows that are checked together attend otherwise"
            raise ConfigError("max_draft_tokens", self.max_draft_tokens, allowed)
        if self.draft_model and self.draft_head:
            raise ConfigError("draft_model", self.draft_model, f"empty with --draft-head {self.draft_head}: one drafts")
        if self.on_gpu and self.draft_quantization in ("int8", "int4"):
            raise ConfigError("draft_quantization", self.draft_quantization, f"auto or none on {self.device}")

    @property
    def places(self) -> int:
        return self.max_num_seqs or (MOST_SEQS if self.slo_tpot_ms or self.on_gpu else USUAL_SEQS)

    def places_within(self, kv_tokens: int) -> int:
        """Return `places`. On a GPU the default is limited to one for each `SEQ_TOKENS` of `kv_tokens`."""
        if self.max_num_seqs or not self.on_gpu:
            return self.places
        return max(1, min(self.places, kv_tokens // SEQ_TOKENS))

    @property
    def usual_places(self) -> int:
        """Requests that run side by side while no prediction says how many the goal allows."""
        return USUAL_SEQS if self.slo_tpot_ms and not self.max_num_seqs else self.places

    @property
    def step_tokens(self) -> int:
        return self.local_prefill_chunk or (MOST_CHUNK if self.slo_tpot_ms else USUAL_CHUNK)

    @property
    def usual_step_tokens(self) -> int:
        """Prompt tokens of a step while no prediction says how many the goal allows."""
        return self.local_prefill_chunk or USUAL_CHUNK

    @property
    def shares_kv(self) -> bool:
        return self.maps_memory and not self.on_gpu
