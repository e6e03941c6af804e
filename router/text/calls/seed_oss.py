"""The format of Seed-OSS: Qwen3-Coder's with other outer tags, and with values in Python's notation:

<seed:tool_call>
<function=get_weather>
<parameter=city>Paris</parameter>
<parameter=days>[1, 2]</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

from router.text.calls.qwen_coder import END_PARAMETER, FUNCTION, PARAMETER, QwenCoderForm, function_layouts
from router.text.calls.tagged_scanner import ArgumentTags

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"


class SeedOSSForm(QwenCoderForm):
    name = "seed-oss"
    marks = (OPEN, CLOSE)
    openings = (OPEN, FUNCTION)
    tags = ArgumentTags(PARAMETER, ">", "", END_PARAMETER, python=True)
    layouts = function_layouts(OPEN, CLOSE)
