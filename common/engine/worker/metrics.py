"""Metrics of one worker, under vLLM's names where vLLM has the metric, otherwise prefixed `diptych_`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.cluster import RATE_WINDOW_S, DecodeLoad, backlog_s, prefill_pressure, pressure, unblocked_share
from common.engine.worker.adapters import WorkerAdapters
from common.engine.worker.contract import EngineStatus
from common.machine import register_process
from common.observe import SECONDS, SHORT_SECONDS, DraftMetrics, Families, RecentRate

TIER = ("tier",)
ADAPTER = ("lora_name",)
DRAFT_KINDS = ("ngram", "grammar", "model")
RATES = (1e6, 1e7, 1e8, 2.5e8, 5e8, 1e9, 2e9, 4e9, 8e9, 1.6e10, 5e10)


class TierCollector(Collector):
    """State of the tiers at each scrape. Empty for a worker without tiers."""

    def __init__(self, status: Callable[[], EngineStatus], labels: dict[str, str]) -> None:
        self._status, self._families = status, Families(labels)

    def collect(self) -> Iterator[Metric]:
        if not (tiers := self._status().tiers):
            return
        gauge, counter = self._families.gauge, self._families.counter
        states = [((t.name, "used"), t.num_blocks) for t in tiers]
        states += [((t.name, "free"), max(0, t.num_slots - t.num_blocks) * t.is_on) for t in tiers]
        yield gauge(
            "diptych_kv_tier_blocks",
            "Slots for KV blocks in tiers, by tier (host, disk) and state: used, free",
            states,
            (*TIER, "state"),
        )
        is_on = [((t.name,), int(t.is_on)) for t in tiers]
        yield gauge("diptych_kv_tier_up", "Whether a tier works: 0 after its disk failed or became full", is_on, TIER)
        yield from (
            counter(name, text, [((t.name,), getattr(t, field)) for t in tiers], TIER)
            for name, text, field in (
                ("diptych_kv_tier_blocks_written", "KV blocks written to a tier: host, disk", "num_written"),
                ("diptych_kv_tier_blocks_lost", "KV blocks evicted from memory before they were written", "num_lost"),
                ("diptych_kv_tier_blocks_corrupt", "KV blocks that failed their checksum in a tier", "num_corrupt"),
            )
        )


class AdapterCollector(Collector):
    """Adapters and their requests at each scrape. Empty for a worker without adapter slots."""

    def __init__(
        self,
        adapters: WorkerAdapters,
        status: Callable[[], EngineStatus],
        labels: dict[str, str],
        max_loras: int,
    ) -> None:
        self._adapters, self._status, self._max_loras = adapters, status, max_loras
        self._families = Families(labels)

    def collect(self) -> Iterator[Metric]:
        if not self._max_loras:
            return
        gauge, names, status = self._families.gauge, self._adapters.names, self._status()
        running = {names.get(digest, digest): num for digest, num in status.adapters_running.items()}
        waiting = {names.get(digest, digest): num for digest, num in status.adapters_waiting.items()}
        used = [(("used",), status.num_adapters), (("free",), self._max_loras - status.num_adapters)]
        yield gauge("diptych_lora_places", "Adapter slots, by state: used, free", used, ("state",))
        loaded = [state for state in self._adapters.states if state.status == "loaded"]
        sizes = [((state.name,), state.num_bytes) for state in loaded]
        yield gauge("diptych_lora_bytes", "Memory of an adapter", sizes, ADAPTER)
        requests = [((name, "running"), num) for name, num in running.items()]
        requests += [((name, "waiting"), num) for name, num in waiting.items()]
        yield gauge(
            "diptych_lora_requests", "Requests by adapter and state: running, waiting", requests, (*ADAPTER, "state")
        )
        shown = (str(self._max_loras), ",".join(sorted(running)), ",".join(sorted(waiting)))
        yield gauge(
            "vllm:lora_requests_info",
            "Adapters with running and waiting requests, as labels; the value is the current time",
            [(shown, time.time())],
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )


class _StatusCollector(Collector):
    """Gauges of the engine's last snapshot, and autoscaling signals derived from them, at each scrape."""

    def __init__(
        self,
        status: Callable[[], EngineStatus],
        labels: dict[str, str],
        role: Callable[[], str],
        slo_tpot_s: float,
        computed: RecentRate,
    ) -> None:
        self._status, self._families = status, Families(labels)
        self._role, self._slo_tpot_s, self._computed = role, slo_tpot_s, computed

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        blocks = status.blocks
        usage = blocks.owned / blocks.total if blocks.total else 0.0
        gauge, counter = self._families.gauge, self._families.counter
        yield from (
            gauge("vllm:num_requests_running", "Requests in the running batch", status.num_running),
            gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled", status.num_waiting),
            gauge("vllm:kv_cache_usage_perc", "Share of KV blocks owned by requests, 0 to 1", usage),
            gauge("diptych_num_requests_transferring", "Requests with KV in transfer", status.num_transferring),
            gauge("diptych_waiting_tokens", "Prompt tokens accepted but not computed", status.num_waiting_tokens),
            gauge("diptych_tokens_per_second", "Recent number of tokens computed per second", status.tokens_per_s),
            gauge("diptych_step_seconds", "Recent duration of an engine step", status.step_time_s),
        )
        yield from self._scaling(status, usage)
        states = ((("free",), blocks.free), (("cached",), blocks.cached), (("owned",), blocks.owned))
        yield gauge("diptych_kv_blocks", "KV blocks by state: free, cached, owned", states, ("state",))
        if status.draft_blocks.total:
            drafts = status.draft_blocks
            states = ((("free",), drafts.free), (("cached",), drafts.cached), (("owned",), drafts.owned))
            yield gauge(
                "diptych_draft_kv_blocks",
                "KV blocks of the draft model by state: free, cached, owned",
                states,
                ("state",),
            )
            yield counter("diptych_draft_model_seconds", "Compute time of the draft model", status.draft_seconds)
        dropped, refused = status.num_dropped_frames, status.num_refused_connections
        yield counter("diptych_frames_dropped", "Frames that were invalid or late", dropped)
        yield counter("diptych_connections_refused", "Connections rejected because of an unauthorised key", refused)

    def _scaling(self, status: EngineStatus, usage: float) -> Iterator[Metric]:
        active, gauge = status.num_active, self._families.gauge
        yield gauge("diptych_active_requests", "Requests that would be cut if this worker stopped now", active)
        role = self._role()
        if role == "prefill":
            share = unblocked_share(usage, status.num_running, status.num_transferring)
            waiting_s = backlog_s(share * status.num_waiting_tokens, status.full_tokens_per_s)
            yield gauge("diptych_prefill_backlog_seconds", "Time to compute the queued prompts", waiting_s)
            busy = backlog_s(self._computed.per_s(time.monotonic()), status.full_tokens_per_s)
            full = prefill_pressure(busy, waiting_s)
            yield gauge("diptych_prefill_pressure", "Number of workers that the prompts here would fill", full)
        elif role == "decode":
            full = pressure(_decode_work(status, usage), self._slo_tpot_s)
            yield gauge("diptych_decode_pressure", "Utilisation of this worker, 1 at its limit", full)


def _decode_work(status: EngineStatus, usage: float) -> DecodeLoad:
    return DecodeLoad(
        usage,
        status.num_running + status.num_transferring,
        status.num_waiting,
        status.num_running,
        status.num_context_tokens,
        status.step_model,
    )


class WorkerMetrics:
    """Counters and histograms updated by an engine; `/metrics` exposes `registry`."""

    def __init__(
        self,
        model_name: str,
        worker_id: str,
        status: Callable[[], EngineStatus],
        *,
        role: str = "",
        slo_tpot_s: float = 0.0,
    ) -> None:
        """`slo_tpot_s`: target time per output token; 0 for none. `role`: the initial role."""
        self._role = role
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": worker_id}
        self._computed = RecentRate(RATE_WINDOW_S)
        self.registry.register(_StatusCollector(status, self._labels, lambda: self._role, slo_tpot_s, self._computed))
        self.registry.register(TierCollector(status, self._labels))
        register_process(self.registry, self._labels)
        histogram, counter = self._histogram, self._counter
        self.queue_seconds = histogram("vllm:request_queue_time_seconds", "From acceptance to the first computed token")
        self.prefill_seconds = histogram("vllm:request_prefill_time_seconds", "From admission to the first token")
        self.decode_seconds = histogram("vllm:request_decode_time_seconds", "From the first token to the last")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens computed or received")
        self.computed_tokens = counter("diptych_prompt_tokens_computed", "Prompt tokens whose KV this worker computed")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self.drafts = DraftMetrics(self.registry, self._labels, DRAFT_KINDS)
        self.preemptions = counter("vllm:num_preemptions", "Sequences preempted: blocks freed and recomputed")
        self._finished = self._labelled(
            "vllm:request_success",
            "Requests finished on this worker, by reason: stop, length, transferred (to a decode worker)",
            "finished_reason",
        )
        self._failed = self._labelled(
            "diptych_requests_failed",
            "Requests failed, by phase: queue, grant, prefill, transfer, decode, grammar, sampling, handover",
            "phase",
        )
        self.steps = counter("diptych_engine_steps", "Engine steps computed")
        self.step_seconds = histogram("diptych_engine_step_seconds", "Duration of an engine step", SHORT_SECONDS)
        self.grant_wait_seconds = histogram("diptych_kv_grant_wait_seconds", "From KVOpen to KVGrant", SHORT_SECONDS)
        self.transfer_seconds = histogram(
            "diptych_kv_transfer_seconds", "From KVGrant to the last block", SHORT_SECONDS
        )
        self.exposed_seconds = histogram(
            "diptych_kv_exposed_transfer_seconds", "From the end of prefill to the last block received", SHORT_SECONDS
        )
        self.transfer_bytes = counter("diptych_kv_transfer_bytes", "Bytes of KV blocks received or sent")
        self.transfer_rate = histogram(
            "diptych_kv_transfer_bytes_per_second", "Bytes of a transfer per second of its busy time (receiver)", RATES
        )
        self._transfers = self._labelled(
            "diptych_kv_transfers",
            "Prompts whose KV was transferred, by KV transport: shm, tcp, nixl, cuda-ipc",
            "transport",
        )
        self.handover_pause_seconds = histogram(
            "diptych_handover_pause_seconds",
            "From a stream's last token on this worker to its arrival on another worker",
            SHORT_SECONDS,
        )
        self._tier_hits, self._tier_reads, self._pulls = self._tiers()
        self._knob, self._knob_changes = self._knobs()
        self.skipped_blocks = counter("diptych_kv_blocks_skipped", "Blocks not sent because the receiver had them")

    def register(self, collector: Callable[[dict[str, str]], Collector]) -> None:
        """Register a collector created with the labels of this worker."""
        self.registry.register(collector(self._labels))

    def count_computed(self, num_tokens: int) -> None:
        """Count the prompt tokens of a prefill worker whose KV it has computed."""
        self.computed_tokens.inc(num_tokens)
        self._computed.add(num_tokens, time.monotonic())

    def change_role(self, role: str) -> None:
        """Switch the autoscaling signals to this role."""
        self._role = role
        self._knob.clear()  # values of the previous role

    def describe_cache(self, block_size: int, num_blocks: int, dtype: str) -> None:
        """Export the cache's shape as labels, like vLLM."""
        info = Gauge(
            "vllm:cache_config_info",
            "Layout of the KV cache",
            [*self._labels, "block_size", "cache_dtype", "num_gpu_blocks"],
            registry=self.registry,
        )
        info.labels(*self._labels.values(), str(block_size), dtype, str(num_blocks)).set(1)

    def show_pinned(self, num_bytes: Callable[[], int]) -> None:
        """Export the amount of pinned memory of a loaded model."""
        text = "Host memory pinned for copies to and from the GPU"
        gauge = Gauge("diptych_pinned_bytes", text, list(self._labels), registry=self.registry)
        gauge.labels(*self._labels.values()).set_function(num_bytes)

    def set_knob(self, name: str, value: int, reason: str, *, is_new_reason: bool) -> None:
        self._knob.labels(*self._labels.values(), name).set(value)
        if is_new_reason:
            self._knob_changes.labels(*self._labels.values(), name, reason).inc()

    def count_finished(self, reason: str) -> None:
        self._finished.labels(*self._labels.values(), reason).inc()

    def count_hits(self, num_tokens: int, tier: str = "memory") -> None:
        """Count prompt tokens found in `tier`."""
        self._tier_hits.labels(*self._labels.values(), tier).inc(num_tokens)

    def count_tier_read(self, outcome: str) -> None:
        self._tier_reads.labels(*self._labels.values(), outcome).inc()

    def count_pull(self, outcome: str) -> None:
        self._pulls.labels(*self._labels.values(), outcome).inc()

    def count_failed(self, phase: str) -> None:
        self._failed.labels(*self._labels.values(), phase).inc()

    def count_transfer(self, transport: str) -> None:
        """Count a prompt whose KV was transferred by the KV transport `transport`."""
        self._transfers.labels(*self._labels.values(), transport).inc()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(*self._labels.values())

    def _knobs(self) -> tuple[Gauge, Counter]:
        text = "Self-tuned parameters of the worker: step_tokens, batch_cap, draft_tokens"
        changes = (
            "Changes of the reason for a self-tuned parameter, by the new reason: bound (the flag's limit), goal, "
            "least, missed (no value meets the goal), efficiency, gain, cost"
        )
        knob = Gauge("diptych_knob", text, [*self._labels, "knob"], registry=self.registry)
        return knob, self._labelled("diptych_knob_changes", changes, "knob", "reason")

    def _tiers(self) -> tuple[Counter, Counter, Counter]:
        hits = "Prompt tokens found in a prefix cache, by tier: memory, host, disk, or a peer's"
        reads = "Prompts with blocks in a tier, by outcome: read, late, missing, or slower than computing"
        pulls = "Prompts with blocks at a peer, by outcome: pulled, late, missing, refused, or slower than computing"
        return (
            self._labelled("diptych_prefix_hit_tokens", hits, "tier"),
            self._labelled("diptych_kv_tier_reads", reads, "outcome"),
            self._labelled("diptych_kv_pulls", pulls, "outcome"),
        )

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        """Create a counter with additional labels."""
        return Counter(name, text, [*self._labels, *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, text, list(self._labels), buckets=buckets, registry=self.registry).labels(
            *self._labels.values()
        )
