"""The role of a worker process around a model of its own, from the command line that a worker of a cluster has."""

from __future__ import annotations

from collections.abc import Sequence

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.config.sources import load
from common.observe.logging import setup_logging
from common.worker.duty import DutyOffer
from decode_worker.duty import decode_offer
from prefill_worker.duty import prefill_offer


def offer_of(role: str, flags: Sequence[str], prog: str) -> DutyOffer:
    """The offer of "prefill" or "decode" with these flags; logging is set up. Refused flags end the process."""
    if role == "prefill":
        prefill = load(PrefillWorkerConfig, flags, prog=prog)
        setup_logging(prefill.worker_id, prefill.log_level)
        return prefill_offer(prefill)
    decode = load(DecodeWorkerConfig, flags, prog=prog)
    setup_logging(decode.worker_id, decode.log_level)
    return decode_offer(decode)
