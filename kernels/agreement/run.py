"""Every kernel that a model's steps and transfers use, one after the other."""

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
"""Any number: a check that fails must fail again."""
TOKENS_BESIDE = 1200
"""Of the shorter sequences of a check, beside its longest."""
HOST_TOKENS = 192
"""Of a check on a CPU, where every block that it touches takes memory from then on, and kernels cut no splits."""


def check_kernels(shape: CheckedShape, kv: Tensor, more: Iterable[Check] = ()) -> list[Finding]:
    """What each kernel makes of random inputs beside plain torch, at the shapes of `kv` and of `shape`.

    Uses blocks of `kv`, a KV cache that holds nothing yet, and leaves zeros in them. A kernel that fails is
    the last finding, and the cache of no use. The inputs are the same each time.
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
    """Of the kernel that a check is about."""
    arguments, function = getattr(check, "args", ()), getattr(check, "func", check)
    return arguments[0] if arguments and isinstance(arguments[0], str) else function.__name__
