"""`transformers serve` with continuous batching. It takes text only: prompts are words of one token each."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.compare.peer import Launch, Peer, Process, Site, url


class Transformers(Peer):
    """One server."""

    name = "transformers"
    variants = {"bf16": "hf"}
    packages = ("transformers[serving]", "accelerate", "torch")
    distribution = "transformers"

    def launch(self, variant: str, site: Site, ports: Sequence[int]) -> Launch:
        model = str(site.weights[self.variants[variant]])
        argv = (
            *(str(site.env / "bin" / "transformers"), "serve", model),
            *("--host", "127.0.0.1", "--port", str(ports[0])),
            *("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"),
        )
        process = Process("transformers", argv, url(ports[0], "/health"), {"HF_HUB_OFFLINE": "1"})
        return Launch(url(ports[0]), (process,), model, text_only=True)
