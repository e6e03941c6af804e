"""The tool-call format of DeepSeek V3.2, whose tags state whether a value is a string, otherwise JSON:

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>

V4 has the outer tag `tool_calls`.
"""

from __future__ import annotations

from router.text.calls.invoke import InvokeFormat


class DeepSeekV32Format(InvokeFormat):
    name = "deepseek-v3.2"
    prefix = "｜DSML｜"
    outer = "function_calls"


class DeepSeekV4Format(DeepSeekV32Format):
    name = "deepseek-v4"
    outer = "tool_calls"
