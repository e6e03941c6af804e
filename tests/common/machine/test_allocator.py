from __future__ import annotations

import ctypes

from common.machine.memory import keep_large_buffers


def test_it_says_whether_the_setting_took() -> None:
    assert keep_large_buffers() is hasattr(ctypes.CDLL(None), "mallopt")
