"""Run the checks of all kernels that a model's steps and transfers use."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.agreement.attention import SPLIT_CHUNK, attention_checks
from kernels.agreement.elementwise import elementwise_checks
from kernels.agreement.gate import Check, Finding, Poisoned
from kernels.agreement.poisoned_cache import PoisonedCache
from kernels.agreement.shape import CheckedShape
from kernels.device import on_device

SEED = 20_251_125
"""Arbitrary, but fixed, so that failures are reproducible."""
TOKENS_BESIDE = 1200
"""Total tokens of a check's sequences other than the longest one."""
HOST_TOKENS = 192
"""Tokens of a check on a CPU. Small, because touching a block commits its memory, and CPU kernels do not split keys."""


def check_kernels(shape: CheckedShape, kv: Tensor, more: Iterable[Check] = ()) -> list[Finding]:
    """Compare each kernel with plain torch on random inputs, at the shapes of `kv` and `shape`.

    Uses blocks of `kv`, which must be an unused KV cache, and zeroes them afterwards. If a kernel raises, its finding
    is the last one, and the cache must not be used any more. The inputs are the same in every run.
    """
    random = torch.Generator().manual_seed(SEED)
    windows = [kind.rule.window for kind in shape.rules]
    on_host = kv.device.type == "cpu"
    tokens = HOST_TOKENS if on_host else TOKENS_BESIDE + max(SPLIT_CHUNK, *windows, 0)
    with on_device(kv.device), torch.inference_mode():
        cache = PoisonedCache(kv, -(-tokens // kv.shape[3]) + 8, random, shape.latent_dim)
        findings: list[Finding] = []
        with Poisoned():
            for check in (*attention_checks(shape, cache), *elementwise_checks(shape, cache), *more):
                try:
                    findings.append(check())
                except Exception as error:  # of a compiler, or of a device that is lost
                    return [*findings, Finding.of_failure(name_of(check), error)]
        cache.clear()
    return findings


def name_of(check: Check) -> str:
    """Return the name of the kernel that a check tests."""
    arguments, function = getattr(check, "args", ()), getattr(check, "func", check)
    return arguments[0] if arguments and isinstance(arguments[0], str) else function.__name__
