"""Which form of calls a model speaks, and how its chat template takes calls: found out by rendering one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import InvalidRequest
from common.model_files import ChatTemplate
from router.text.calls.deepseek import DeepSeekForm
from router.text.calls.form import CallForm, Message
from router.text.calls.function import Function
from router.text.calls.glm import GLMForm
from router.text.calls.harmony import HarmonyForm
from router.text.calls.hermes import HermesForm
from router.text.calls.kimi import KimiForm
from router.text.calls.llama3 import Llama3Form
from router.text.calls.minimax import MiniMaxForm
from router.text.calls.mistral import MistralForm
from router.text.calls.pythonic import PythonicForm
from router.text.calls.qwen_coder import QwenCoderForm
from router.text.calls.seed_oss import SeedOSSForm

AUTO, NONE = "auto", "none"
NAME, ARGUMENT = "probe_function", "probe_argument"
PROBE = Function(NAME, "a probe", {"type": "object", "properties": {ARGUMENT: {"type": "string"}}})
VALUES = ("probe value", "another value")
CALL_IDS = ("probe0001", "probe0002")
USABLE = re.compile(
    rf'"{ARGUMENT}":\s*"{VALUES[0]}"|{ARGUMENT}=["\']{VALUES[0]}["\']'
    rf'|{ARGUMENT}"?>\s*{VALUES[0]}|{ARGUMENT}</arg_key>\s*<arg_value>{VALUES[0]}'
)
"""Arguments as JSON, keywords or texts between tags, and not as a text inside JSON."""
FORMS: Mapping[str, Callable[[], CallForm]] = {
    "hermes": HermesForm,
    "llama3": Llama3Form,
    "mistral": MistralForm,
    "pythonic": PythonicForm,
    "deepseek": DeepSeekForm,
    "harmony": HarmonyForm,
    "qwen3-coder": QwenCoderForm,
    "glm": GLMForm,
    "minimax": MiniMaxForm,
    "seed-oss": SeedOSSForm,
    "kimi": KimiForm,
}
RENDERED: Sequence[tuple[re.Pattern[str], Callable[[], CallForm]]] = [
    (re.compile(rf"to=functions\.{NAME}\b.{{0,40}}<\|message\|>"), HarmonyForm),
    (re.compile(rf"<｜tool▁sep｜>{NAME}\s*```"), lambda: DeepSeekForm(fenced=True)),
    (re.compile(rf"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>"), DeepSeekForm),
    (re.compile(rf"\[TOOL_CALLS\]\s*{NAME}"), lambda: MistralForm(compact=True)),
    (re.compile(rf"\[TOOL_CALLS\]\s*\[.{{0,80}}{NAME}", re.DOTALL), MistralForm),
    (re.compile(rf"<\|tool_call_begin\|>(functions\.{NAME}:0|{CALL_IDS[0]})<\|tool_call_argument_begin\|>"), KimiForm),
    (re.compile(rf"<seed:tool_call>\s*<function={NAME}>"), SeedOSSForm),
    (re.compile(rf"<function={NAME}>"), QwenCoderForm),
    (re.compile(rf"<tool_call>\s*{NAME}\s*<arg_key>"), GLMForm),
    (re.compile(rf'<invoke name="{NAME}">'), MiniMaxForm),
    (re.compile(rf"<tool_call>.{{0,80}}{NAME}", re.DOTALL), HermesForm),
    (re.compile(rf"<function_calls>\s*{NAME}\("), lambda: PythonicForm(tagged=True)),
    (re.compile(rf"\[{NAME}\("), PythonicForm),
    (re.compile(rf'\{{\s*"name":\s*"{NAME}",\s*"parameters":'), Llama3Form),
]
"""How each form is recognised in a rendered call."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a served model learns of functions from its prompt, and how it calls them.

    `native`: its template describes functions and renders calls; for other models, the prompt describes both. With
    `text_arguments` the template takes arguments as JSON text, with `single_calls` at most one call in each message.
    Without `parses`, answers are not searched for calls.
    """

    form: CallForm
    native: bool = False
    text_arguments: bool = False
    parses: bool = True
    single_calls: bool = False

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages, whose calls have arguments as objects, as a native template wants them."""
        adapted = self.form.messages(messages)
        if self.single_calls:
            adapted = _with_single_calls(adapted)
        return [_with_text_arguments(message) for message in adapted] if self.text_arguments else adapted


def dialect_of(template: ChatTemplate, parser: str = AUTO) -> Dialect:
    """The dialect of a template's model. `parser` names the form, or is auto or none."""
    form, text_arguments = None, False
    if template.source is not None:
        for as_text in (False, True):
            form = _form_in(_rendered_call(template, as_text))
            if form is not None:
                text_arguments = as_text
                break
    single_calls = form is not None and _takes_single_calls(template, Dialect(form, True, text_arguments))
    described = template.source is not None and NAME in _rendered(template, [{"role": "user", "content": "hi"}])
    if parser in (AUTO, NONE):
        native = form is not None and described
        chosen = form if form is not None and (native or form.has_channels) else HermesForm()
        return Dialect(chosen, native, text_arguments, parser == AUTO, single_calls)
    chosen = form if form is not None and form.name == parser else FORMS[parser]()
    return Dialect(chosen, described, text_arguments, single_calls=single_calls)


def _form_in(rendered: str) -> CallForm | None:
    return next((form() for mark, form in RENDERED if mark.search(rendered)), None)


def _rendered_call(template: ChatTemplate, as_text: bool) -> str:
    """A conversation with a call; "" where the template refuses it or shows the arguments in no usable form."""
    shown = _rendered(template, _conversation(1, as_text))
    return shown if USABLE.search(shown) else ""


def _takes_single_calls(template: ChatTemplate, dialect: Dialect) -> bool:
    """Whether a template renders both of two calls only if they are in separate messages."""
    calls = _conversation(2, as_text=False)

    def shows(dialect: Dialect) -> bool:
        shown = _rendered(template, dialect.messages(calls))
        return all(value in shown for value in VALUES)

    return not shows(dialect) and shows(replace(dialect, single_calls=True))


def _conversation(num_calls: int, as_text: bool) -> list[dict[str, Any]]:
    """Create a conversation: a question, its calls in one message, and their results."""
    calls, results = [], []
    for call_id, value in zip(CALL_IDS[:num_calls], VALUES, strict=False):
        arguments: Any = {ARGUMENT: value}
        function = {"name": NAME, "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "content": "done", "tool_call_id": call_id, "name": NAME})
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    try:
        return template.render(messages, tools=[PROBE.as_tool()], add_generation_prompt=False)
    except InvalidRequest:
        return ""


def _with_single_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Split messages into one call each, followed by its result. Other fields stay with the first call."""
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    placed: set[int] = set()
    plain: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if id(message) not in placed:
                plain.append(dict(message))
            continue
        for number, call in enumerate(calls):
            rest = message if number == 0 else {"role": message["role"], "content": ""}
            plain.append({**rest, "tool_calls": [call]})
            result = results.get(call.get("id"))
            if result is not None and id(result) not in placed:
                placed.add(id(result))
                plain.append(dict(result))
    return plain


def _with_text_arguments(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [{**call, "function": _as_text(call["function"])} for call in calls]}


def _as_text(function: Message) -> dict[str, Any]:
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {**function, "arguments": written}
