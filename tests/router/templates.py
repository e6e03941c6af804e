"""Chat templates as those of model families that call functions, as short as they can be."""

from __future__ import annotations

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
ANSWER = "{% if add_generation_prompt %}[assistant]{% endif %}"


def template(call: str, *, first: str = "", last: str = "", between: str = "") -> str:
    """`call` writes `name` and `arguments`; `first` and `last` stand around the calls of a message."""
    calls = (
        "{% if m.tool_calls %}" + first + "{% for c in m.tool_calls %}{% set f = c.function %}" + call
        + "{% if not loop.last %}" + between + "{% endif %}{% endfor %}" + last + "{% endif %}"
    )  # fmt: skip
    return TOOLS + "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + calls + "\n{% endfor %}" + ANSWER


LINE = "{{ '\\n' }}"
JSON = "{{ f.arguments | tojson }}"
SHORT_ID = "{% if c.id is not string or c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
KEYWORDS = (
    "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}"
)

HERMES = template('<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + JSON + "}\n</tool_call>")
LLAMA3 = template('{"name": "{{ f.name }}", "parameters": ' + JSON + "}", between="; ")
MISTRAL = template(
    SHORT_ID + '{"name": "{{ f.name }}", "arguments": ' + JSON + ', "id": "{{ c.id }}"}',
    first="[TOOL_CALLS] [", last="]", between=", ",
)  # fmt: skip
MISTRAL_COMPACT = template("[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON)
PYTHONIC = template("{{ f.name }}(" + KEYWORDS + ")", first="[", last="]", between=", ")
TAGGED = template(
    "{{ f.name }}(" + KEYWORDS + ")", first="<function_calls>\n", last="{{ '\\n</function_calls>' }}", between=LINE
)
DEEPSEEK = template(
    "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}",
    first="<｜tool▁calls▁begin｜>", last="<｜tool▁calls▁end｜>",
)  # fmt: skip
FENCED = template(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n" + JSON + "\n```<｜tool▁call▁end｜>",
    first="<｜tool▁calls▁begin｜>", last="<｜tool▁calls▁end｜>",
)  # fmt: skip
HARMONY = (
    TOOLS + "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json"
    "<|message|>" + JSON + "<|call|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MEMBERS = "{% for k, v in f.arguments.items() %}"
TEXT = "{{ v if v is string else v | tojson }}"
QWEN_CODER = template(
    "<tool_call>\n<function={{ f.name }}>\n"
    + MEMBERS + "<parameter={{ k }}>\n" + TEXT + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)  # fmt: skip
GLM = template(
    "<tool_call>{{ f.name }}\n"
    + MEMBERS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>\n{% endfor %}</tool_call>"
)  # fmt: skip
MINIMAX = template(
    '<invoke name="{{ f.name }}">\n'
    + MEMBERS + '<parameter name="{{ k }}">' + TEXT + "</parameter>\n{% endfor %}</invoke>\n",
    first="<minimax:tool_call>\n", last="</minimax:tool_call>",
)  # fmt: skip
KIMI = template(
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>",
    first="<|tool_calls_section_begin|>", last="<|tool_calls_section_end|>",
)  # fmt: skip
GLM_COMPACT = template(
    "<tool_call>{{ f.name }}"
    + MEMBERS + "<arg_key>{{ k }}</arg_key><arg_value>" + TEXT + "</arg_value>{% endfor %}</tool_call>"
)  # fmt: skip
PRINTED = "{{ v if v is string else v | string }}"
JSON_OR_PRINTED = "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
QWEN_CODER_PRINTED = template(
    "<tool_call>\n<function={{ f.name }}>\n"
    + MEMBERS + "<parameter={{ k }}>\n" + JSON_OR_PRINTED + "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    between=LINE,
)  # fmt: skip
SEED_OSS = template(
    "<seed:tool_call>\n<function={{ f.name }}>\n"
    + MEMBERS + "<parameter={{ k }}>" + PRINTED + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
    between=LINE,
)  # fmt: skip
EXAONE = template('<tool_call>{"name": "{{ f.name }}", "arguments": ' + JSON + "}</tool_call>", between=LINE)
LLAMA3_SINGLE = (
    TOOLS + "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}[assistant]{"name": "{{ f.name }}", "parameters": ' + JSON + "}\n"
    "{% else %}[{{ m.role }}]{{ m.content }}\n{% endif %}{% endfor %}" + ANSWER
)
OBJECT = '{"name": "{{ f.name }}", "arguments": ' + JSON + "}"
GRANITE = template(OBJECT, first="<|tool_call|>[", last="]", between=", ")
FUNCTOOLS = template(OBJECT, first="functools[", last="]", between=", ")
PHI4_MINI = template(OBJECT, first="<|tool_call|>[", last="]<|/tool_call|>", between=", ")
XLAM = template(OBJECT, first="[", last="]", between=", ")
INTERNLM = template('<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": ' + JSON + "}<|action_end|>")
COMMAND = template(
    LINE + '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": ' + JSON + "}",
    first="<|START_ACTION|>[", last="{{ '\\n]' }}<|END_ACTION|>", between=",",
)  # fmt: skip
COMMAND_FENCED = template(
    LINE + '    {\n        "tool_name": "{{ f.name }}",\n        "parameters": ' + JSON + "\n    }",
    first="Action:\n```json\n[", last="{{ '\\n]' }}```", between=",",
)  # fmt: skip
SOLAR = template(
    "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>" + JSON + "<|tool_call:end|>",
    first="<|tool_calls|>", last="<|calls|>",
)  # fmt: skip
LFM2 = template("{{ f.name }}(" + KEYWORDS + ")", first="<|tool_call_start|>[", last="]<|tool_call_end|>", between=", ")
DSML = template(
    '<｜DSML｜invoke name="{{ f.name }}">\n'
    + MEMBERS + '<｜DSML｜parameter name="{{ k }}" string="{{ (v is string) | tojson }}">' + TEXT
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n",
    first="<｜DSML｜function_calls>\n", last="</｜DSML｜function_calls>",
)  # fmt: skip
GEMMA_VALUE = (
    '{% macro shown(v) %}{% if v is none %}None{% elif v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}'
    "{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:{{ shown(w) }}{% if not loop.last %},{% endif %}{% endfor %}"
    "{{ '}' }}"
    "{% elif v is iterable %}[{% for w in v %}{{ shown(w) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
GEMMA = GEMMA_VALUE + template(
    "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}{{ k }}:{{ shown(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>"
)
FUNCTION_GEMMA = GEMMA.replace("<|tool_call>", "<start_function_call>").replace(
    "<tool_call|>", "<end_function_call>"
).replace('<|"|>', "<escape>")  # fmt: skip
GLM4 = (
    "{% if tools %}# 可用工具{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.metadata }}\n"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}" + ANSWER
STRICT = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}hi"

TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral, compact": MISTRAL_COMPACT,
    "pythonic": PYTHONIC,
    "olmo3": TAGGED,
    "deepseek": DEEPSEEK,
    "deepseek, fenced": FENCED,
    "harmony": HARMONY,
    "qwen3-coder": QWEN_CODER,
    "glm": GLM,
    "minimax": MINIMAX,
    "kimi": KIMI,
    "granite": GRANITE,
    "phi4-mini": PHI4_MINI,
    "phi4-mini, functools": FUNCTOOLS,
    "xlam": XLAM,
    "internlm": INTERNLM,
    "command": COMMAND,
    "command, fenced": COMMAND_FENCED,
    "solar": SOLAR,
    "lfm2": LFM2,
    "deepseek-v3.2": DSML,
    "deepseek-v4": DSML.replace("function_calls", "tool_calls"),
    "gemma4": GEMMA,
    "functiongemma": FUNCTION_GEMMA,
}

VARIANTS = {
    "hermes": EXAONE,
    "glm": GLM_COMPACT,
    "qwen3-coder": QWEN_CODER_PRINTED,
    "seed-oss": SEED_OSS,
    "llama3": LLAMA3_SINGLE,
}
"""Templates of the same formats that differ in white space, in how values are printed, or in what they refuse."""
MESSAGES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
WRITTEN = {
    "kimi": TOOLS + "{# <|tool_calls_section_begin|> #}" + MESSAGES,
    "lfm2": "List of tools: [" + TOOLS + "]" + MESSAGES,
    "granite": "Respond with <|tool_call|> followed by a JSON list of tools." + TOOLS + MESSAGES,
    "glm4": GLM4,
}  # fmt: skip
"""Templates that describe tools, show the format in their text, and omit calls."""
