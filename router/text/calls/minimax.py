"""The tool-call format of MiniMax since M2, with one pair of outer tags around consecutive calls:

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from router.text.calls.invoke import InvokeFormat


class MiniMaxFormat(InvokeFormat):
    name = "minimax"
    outer = "minimax:tool_call"
