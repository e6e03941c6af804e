"""The tool-call format of Granite 3. Granite 4 has that of Hermes:

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

from __future__ import annotations

from router.text.calls.json_calls import JSONFormat, JSONSyntax


class GraniteFormat(JSONFormat):
    """A JSON list without an end. Granite 3.1 writes `<tool_call>` as text, and arguments before names."""

    name = "granite"
    hints = ("<|tool_call|> followed by a JSON list",)
    syntax = JSONSyntax((("<|tool_call|>",), ""), ((("<tool_call>",), ""),), is_list=True, any_order=True)
