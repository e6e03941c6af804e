"""The tensors of a mixture of experts, in the layouts of the families that have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from common.engine.models.mlp import MixtureOfExperts, SharedExpert
from common.engine.models.tensor_reader import TensorReader, reordered
from common.model_files.architecture import ExpertsConfig, ExpertStack
from kernels import Expert, Experts, Linear, Routing, Weight


class ExpertsReader:
    """Reads the experts of one layer, whose tensors' names begin with `prefix`."""

    def __init__(self, reader: TensorReader, config: ExpertsConfig, prefix: str) -> None:
        self.reader, self.config, self.prefix = reader, config, prefix
        self.hidden, self.inner = reader.config.hidden_size, config.intermediate_size
        self.names = reader.config.family.experts

    def read(self) -> MixtureOfExperts:
        config, source = self.config, self.reader
        name = self.prefix + self.names.router
        bias = source.bias({f"{name}.bias": config.count}) if config.biased else None
        router = source.product(Linear, source.matrix(f"{name}.weight", config.count, self.hidden), bias)
        stack = self.names.stack
        if stack is not None and source.source.has(self.prefix + stack.gate_up):
            experts = self._stacked(stack)
        else:  # so do GGUF files of any family
            experts = [self._expert(i) for i in range(config.count)]
        made = Experts(experts, dtype=source.dtype, batch_invariant=source.batch_invariant)
        return MixtureOfExperts(router, made, self._routing(name), self._shared())

    def _routing(self, router: str) -> Routing:
        config, source = self.config, self.reader
        correction: Tensor | None = None
        if config.corrected:
            own = self.names.correction
            holder = f"{self.prefix}{own}" if own else router
            found = source.checked(f"{holder}.e_score_correction_bias", (config.count,), (1, config.count)).flatten()
            correction = found.to(device=source.device, dtype=torch.float32).contiguous()
        return Routing(
            config.per_token,
            config.normalised,
            config.sigmoid,
            correction,
            config.groups,
            config.kept_groups,
            config.scale,
        )

    def _expert(self, index: int) -> Expert:
        """One whose matrices are tensors of their own."""
        source, name = self.reader, f"{self.prefix}{self.names.module}.{index}."
        gates = {f"{name}{part}": self.inner for part in self.names.gates}
        return Expert(
            source.weight(_named(gates, "weight"), self.hidden, source.quantization),
            source.weight({f"{name}{self.names.down}.weight": self.hidden}, self.inner, source.quantization),
            source.bias(_named(gates, "bias")) if self.config.biased else None,
            source.bias({f"{name}{self.names.down}.bias": self.hidden}) if self.config.biased else None,
        )

    def _stacked(self, stack: ExpertStack) -> list[Expert]:
        """One tensor of all experts, by whose name and "_bias" that of their biases is called."""
        count, gates, downs = self.config.count, self.prefix + stack.gate_up, self.prefix + stack.down
        gate_up = self._matrices(stack, gates, 2 * self.inner, self.hidden)
        down = self._matrices(stack, downs, self.hidden, self.inner)
        biases: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * count
        if self.config.biased:
            of_gates = self.reader.matrix(f"{gates}_bias", count, 2 * self.inner)
            of_downs = self.reader.matrix(f"{downs}_bias", count, self.hidden)
            biases = list(zip(of_gates, of_downs, strict=True))
        if stack.alternating:
            rows = torch.arange(2 * self.inner, device=self.reader.device).view(self.inner, 2).T.flatten()
            gate_up = [reordered(one, rows) for one in gate_up]  # gates, then ups
            biases = [(None if first is None else first[rows], second) for first, second in biases]
        return [Expert(gate_up[i], down[i], *biases[i]) for i in range(count)]

    def _matrices(self, stack: ExpertStack, name: str, outputs: int, inputs: int) -> Sequence[Weight]:
        """[out, in] of each expert."""
        reader, count = self.reader, self.config.count
        if (held := reader.held_stack(name, count, outputs, inputs)) is not None:
            return held
        in_file = reader.source.is_quantised(name)
        dense = reader.checked(name, (count, outputs, inputs), *([] if in_file else [(count, inputs, outputs)]))
        if not in_file and stack.is_turned(dense.shape, outputs, inputs):
            dense = dense.transpose(1, 2)
        return [reader.as_asked(one, in_file) for one in dense]

    def _shared(self) -> SharedExpert | None:
        if not self.config.shared_size:
            return None
        if not self.config.shared_gated:
            return SharedExpert(self.reader.mlp(f"{self.prefix}mlp.shared_experts.", self.config.shared_size), None)
        gate = self.reader.matrix(f"{self.prefix}mlp.shared_expert_gate.weight", 1, self.hidden)
        mlp = self.reader.mlp(f"{self.prefix}mlp.shared_expert.", self.config.shared_size)
        return SharedExpert(mlp, self.reader.product(Linear, gate))


def _named(parts: Mapping[str, int], kind: str) -> dict[str, int]:
    return {f"{part}.{kind}": rows for part, rows in parts.items()}
