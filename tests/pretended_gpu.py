"""A GPU that is none: tensors of the CPU that say they are on one, and refuse whatever a host would wait for.

Refused are reads of a device's numbers, operations whose results have sizes that the device knows alone, and copies
that block. So it shows on any machine that code launches its work and goes on. `torch.cuda.set_sync_debug_mode` does
the same on a chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.backends import FOUND, look_up
from kernels.interface.draws import SamplingTensors
from kernels.interface.pinned_memory import PinnedMemory
from kernels.plain.sampling import masked, sample_by_sorting

GPU = torch.device("cuda")
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
SIZED_BY_DATA = {"nonzero", "unique", "masked_select", "bincount", "argwhere", "repeat_interleave"}


class OnGPU(Tensor):
    """Numbers on the device. Results of operations on them are on it too."""


class HostWaited(AssertionError):
    """The host would have waited for the device."""


class PretendedGPU(TorchFunctionMode):
    """What torch does on the device, until the end of the `with` block."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return GPU if isinstance(args[0], OnGPU) else torch.device("cpu")
        on_gpu = any(isinstance(each, OnGPU) for each in args)
        if on_gpu and (name in READS or name in SIZED_BY_DATA):
            raise HostWaited(f"{name} of a tensor on the device")
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], OnGPU):
            _check_index(args[1])
        if name == "__iter__" and on_gpu:
            return iter([each.as_subclass(OnGPU) for each in args[0].as_subclass(Tensor).unbind(0)])
        if name == "to" and any(isinstance(each, torch.device) and each.type == "cuda" for each in args[1:]):
            if not options.get("non_blocking"):
                raise HostWaited("a copy to the device that blocks")
            return args[0].clone().as_subclass(OnGPU)
        if name == "copy_" and isinstance(args[0], OnGPU) != isinstance(args[1], OnGPU):
            if not options.get("non_blocking"):
                raise HostWaited("a copy that blocks")
            with torch._C.DisableTorchFunctionSubclass():
                args[0].copy_(args[1])
            return args[0]
        if options.pop("pin_memory", False):
            assert "device" not in options
        if torch.device(options.get("device") or "cpu").type == "cuda":
            if name in ("tensor", "as_tensor"):
                raise HostWaited("a tensor of the host's numbers, made on the device: a copy that blocks")
            return func(*args, **options | {"device": "cpu"}).as_subclass(OnGPU)
        return func(*args, **options)


class Event:
    """A mark in the stream. The pretended device has done everything as soon as it is launched."""

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Drawn:
    """The backend, but for the sampling kernel: whatever its arithmetic, the host launches it and goes on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(look_up("cuda"), name)

    @staticmethod
    def sample(logits: Tensor, rows: SamplingTensors, allowed: Sequence[Tensor | None]) -> Tensor:
        logits = masked(logits, allowed)
        assert isinstance(logits, OnGPU)
        with torch._C.DisableTorchFunction():
            columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position)
            plain = SamplingTensors(*(column.as_subclass(Tensor) for column in columns), rows.searches)
            return sample_by_sorting(logits.as_subclass(Tensor), plain).as_subclass(OnGPU)


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Samplers see a GPU where `on_gpu` says so."""
    with monkeypatch.context() as patched:
        patched.setattr("common.engine.sampling.sampler.on_device", lambda device: nullcontext())
        patched.setitem(FOUND, "cuda", Drawn())
        patched.setattr(torch.cuda, "Event", Event)
        patched.setattr(torch.cuda, "current_stream", lambda device: None)
        patched.setattr("kernels.interface.pinned_memory._PINNED", PinnedMemory())
        with PretendedGPU():
            yield


def on_gpu(tensor: Tensor) -> Tensor:
    """These numbers, as if they were there."""
    return tensor.as_subclass(OnGPU)


def _check_index(index: Any) -> None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list) or (isinstance(part, Tensor) and not isinstance(part, OnGPU)):
            raise HostWaited("an index that the host holds: a copy that blocks")
        if isinstance(part, Tensor) and part.dtype == torch.bool:
            raise HostWaited("an index by truth: the host must know how many there are")
