"""The tool-call format of InternLM 2 to 3:

<|action_start|><|plugin|>
{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>
"""

from __future__ import annotations

from router.text.calls.json_calls import JSONFormat, JSONSyntax


class InternLMFormat(JSONFormat):
    name = "internlm"
    hints = ("<|action_start|>",)
    syntax = JSONSyntax(
        (("<|action_start|>", "<|plugin|>"), "<|action_end|>"),
        argument_keys=("parameters", "arguments"),
        gaps=("\n", "", ""),
    )
