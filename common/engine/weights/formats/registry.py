"""Registry of weight formats. Add new formats to `FORMATS`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from common.engine.weights.formats.awq import AWQ
from common.engine.weights.formats.compressed_tensors import CompressedTensors
from common.engine.weights.formats.float8 import Float8
from common.engine.weights.formats.format import WeightFormat
from common.engine.weights.formats.gptq import GPTQ
from common.engine.weights.formats.mxfp4 import MXFP4
from common.model_files import FormatName, read_weight_scheme

FORMATS: Mapping[FormatName, type[WeightFormat]] = {
    each.name: each for each in (GPTQ, AWQ, CompressedTensors, Float8, MXFP4)
}


def read_weight_format(path: Path) -> WeightFormat | None:
    """Return the format of a config.json; None if weights are not quantised. Raises ModelError if not supported."""
    scheme = read_weight_scheme(path)
    return None if scheme is None else FORMATS[scheme.format].of(scheme)
