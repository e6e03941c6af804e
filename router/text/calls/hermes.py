"""The tool-call format of the Hermes and Qwen families, SmolLM3, Granite 4, ERNIE, and of EXAONE, without line breaks:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from router.text.calls.json_calls import JSONFormat, JSONSyntax

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(JSONFormat):
    name = "hermes"
    syntax = JSONSyntax(((OPEN,), CLOSE), gaps=("\n", "", ""))
