"""The tool-call format of Seed-OSS: like Qwen3-Coder's, with other outer tags and values in Python syntax:

<seed:tool_call>
<function=get_weather>
<parameter=city>Paris</parameter>
<parameter=days>[1, 2]</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

from router.text.calls.format import PROBE_NAME
from router.text.calls.qwen_coder import END_PARAMETER, FUNCTION, PARAMETER, QwenCoderFormat, function_layouts
from router.text.calls.tagged import ArgumentTags

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"


class SeedOSSFormat(QwenCoderFormat):
    name = "seed-oss"
    marks = (OPEN, CLOSE)
    openings = (OPEN, FUNCTION)
    tags = ArgumentTags(PARAMETER, ">", "", END_PARAMETER, python=True, writes_python=True)
    layouts = function_layouts(OPEN, CLOSE)
    rendered_call = rf"{OPEN}\s*{FUNCTION}{PROBE_NAME}>"
