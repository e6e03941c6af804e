"""Diptych with `--engine vllm`, in an environment that also has vLLM's CPU build."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.peer import Launch, Process, Site, url
from benchmarks.compare.vllm import Vllm, vllm_env

ROOT = Path(__file__).resolve().parents[2]


class DiptychVllm(Vllm):
    """A router and one decode worker that also computes the prompts: what Diptych adds to vLLM."""

    name = "diptych-vllm"
    is_own = True
    num_prefill = 0

    def steps(self, env: Path) -> list[tuple[str, ...]]:
        return [*super().steps(env), (str(env / "bin" / "python"), "-m", "pip", "install", f"{ROOT}[router,worker]")]

    def launch(self, variant: str, site: Site, ports: Sequence[int]) -> Launch:
        argv = (
            *(site.python, "-P", "-m", "common.cli", "serve", "--engine", "vllm"),
            *("--prefill", str(self.num_prefill), "--local-prefill-threshold", "0"),
            *("--model", str(site.weights[self.variants[variant]]), "--dtype", "bfloat16"),
            *("--host", "127.0.0.1", "--port", str(ports[0])),
            *("--max-model-len", str(site.max_model_len), "--max-num-seqs", str(site.max_num_seqs)),
            "--no-enable-prefix-caching",
        )
        env = {**vllm_env(site, site.kv_gib // (1 + self.num_prefill)), "PYTHONPATH": str(ROOT)}
        return Launch(url(ports[0]), (Process(self.name, argv, url(ports[0], "/ready"), env),))


class DiptychVllm1P1D(DiptychVllm):
    """A router, a prefill and a decode worker on half the cores each; KV travels rank to rank."""

    name = "diptych-vllm-1p1d"
    num_prefill = 1
