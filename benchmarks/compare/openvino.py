"""OpenVINO GenAI: its continuous-batching pipeline behind the thin front of `openvino_server`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.peer import Launch, Peer, Process, Site, url

PROPERTIES = {"bf16": {"INFERENCE_PRECISION_HINT": "bf16"}}


class OpenVino(Peer):
    """Reads GGUF files itself."""

    name = "openvino"
    variants = {"q4_1": "gguf", "bf16": "gguf-f16", "int8": "gguf-q8_0"}
    packages = ("openvino-genai", "openvino", "openvino-tokenizers")
    distribution = "openvino-genai"

    def launch(self, variant: str, site: Site, ports: Sequence[int]) -> Launch:
        argv = (
            *(site.python, "-P", str(Path(__file__).with_name("openvino_server.py"))),
            *("--model", str(site.weights[self.variants[variant]]), "--port", str(ports[0])),
            *("--threads", str(len(site.cores)), "--cache-gib", str(site.kv_gib)),
            *("--max-num-seqs", str(site.max_num_seqs)),
            *("--properties", json.dumps(PROPERTIES.get(variant, {}))),
        )
        return Launch(url(ports[0]), (Process(f"openvino-{variant}", argv, url(ports[0], "/health")),))
