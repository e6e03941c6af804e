"""Request fields that become sampling parameters of the same name."""

from __future__ import annotations

from common.wire import SamplingParams
from router.request import COPIED
from router.request.fields import CompletionRequest


def test_each_copied_field_is_a_sampling_parameter() -> None:
    assert {*COPIED} <= {*SamplingParams.__struct_fields__}
    assert {*COPIED} <= CompletionRequest.model_fields.keys()
