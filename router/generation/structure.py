"""Output constraints: converts a request's constraints to the grammar that its answer must match."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from common.errors import InvalidRequest
from router.generation.context import RequestContext
from router.generation.served_model import ServedModel
from router.generation.thoughts import prelude_of
from router.request import JsonSchema
from router.request.errors import InvalidField
from router.request.fields import ChatRequest, NamedTool, ResponseFormat, SamplingFields, Tool
from router.text import ANY_OBJECT, CallsDemand, ChoiceDemand, Demand, JsonDemand, Prelude, RegexDemand, RulesDemand
from router.text.calls import Function, Wanted
from router.text.schema import Unenforceable

MANY_FUNCTIONS = 64
"""Above this number, schemas are encoded in a thread, because that takes milliseconds."""


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """The functions that an answer may call, or with `required` must call. `several` allows more than one call."""

    functions: tuple[Function, ...]
    required: bool
    several: bool

    def read_schemas(self) -> None:
        """Parse and cache the argument schemas of all functions."""
        for function in self.functions:
            with suppress(Unenforceable):
                function.read()


@dataclass(frozen=True, slots=True)
class Form:
    """An output constraint and the request field that sets it. `schema` is its JSON schema, if any."""

    param: str
    demand: Callable[[], Demand]
    schema: JsonSchema | None = None


def tool_calling(fields: ChatRequest) -> ToolCalling | None:
    """Return the callable functions; None if there are none. Raises InvalidRequest if the chosen tool is missing."""
    choice, functions = fields.tool_choice or "auto", functions_of(fields.tools or ())
    if isinstance(choice, NamedTool):
        named = tuple(function for function in functions if function.name == choice.function.name)
        if not named:
            what = f"tool_choice.function.name: the function {choice.function.name[:64]!r} is not in tools"
            raise InvalidRequest(what, param="tool_choice.function.name")
        return ToolCalling(named, required=True, several=False)
    if choice == "required" and not functions:
        raise InvalidRequest("tool_choice: 'required' needs at least one tool in tools", param="tool_choice")
    if not fields.offers_tools:
        return None
    return ToolCalling(functions, required=choice == "required", several=fields.parallel_tool_calls is not False)


def functions_of(tools: Sequence[Tool]) -> tuple[Function, ...]:
    """Return the functions of tools. Raises InvalidRequest for duplicate names."""
    known: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in known:
            raise InvalidRequest(f"tools[{i}].function.name: duplicate function name {name!r}", param="tools")
        known.add(name)
    return tuple(tool.function.called for tool in tools)


def is_constrained(fields: ChatRequest, calling: ToolCalling | None) -> bool:
    """Whether the answer must have a form: from its first token, or after a thought."""
    return bool(_forms(fields)) or (calling is not None and calling.required)


def begins_in_form(model: ServedModel, fields: SamplingFields) -> bool:
    """Whether a required form begins with the first token of an answer, even if the prompt ends within a thought."""
    if isinstance(fields, ChatRequest):
        return model.config.reasoning_in_form and is_constrained(fields, tool_calling(fields))
    return bool(_forms(fields))


def takes_breaks(fields: ChatRequest, calling: ToolCalling | None) -> bool:
    """Whether line breaks may precede the form of the answer. No JSON and no required call begins with one."""
    return (calling is not None and calling.required) or any(form.schema is not None for form in _forms(fields))


async def answer_grammar(
    model: ServedModel,
    fields: SamplingFields,
    context: RequestContext,
    calling: ToolCalling | None = None,
    prompt: Sequence[int] = (),
) -> str:
    """Return the grammar that the answer must match; "" for none. Raises InvalidRequest, Unavailable.

    In an answer to a chat request, whose tokens are `prompt`, a thought may precede the form.

    A separate process compiles the grammar within the workers' limits, so workers receive only usable grammars. The
    results are cached, and shared only between requests with the same salt.
    """
    forms = _forms(fields)
    if calling is not None and not model.dialect.parses:
        if calling.required:
            what = "this server does not parse tool calls (--tool-parser none): must be 'auto' or 'none'"
            raise InvalidRequest(f"tool_choice: {what}", param="tool_choice")
        calling = None
    if len(forms) > 1:
        names = ", ".join(form.param for form in forms)
        raise InvalidRequest(f"{names}: only one of these can be used at a time", param=forms[1].param)
    if not forms and calling is None:
        return ""
    if not model.text.eos_token_ids:
        param = forms[0].param if forms else "tools"
        raise InvalidRequest(f"{param}: this model has no end token, so the answer could not end", param=param)
    wanted = forms[0] if calling is None else _form_of_calls(model, calling, forms[0] if forms else None)
    param = wanted.param
    try:
        is_long = calling is not None and len(calling.functions) > MANY_FUNCTIONS
        demand = await model.text.apart(wanted.demand) if is_long else wanted.demand()
        prelude = _prelude(model, fields, calling, prompt) if isinstance(fields, ChatRequest) else None
        grammar = await model.text.grammar(demand, prelude, salt=context.salt, owner=context.key.name)
    except ValueError as error:
        raise InvalidField(f"{param}: cannot be used", f": {error}", param=param) from error
    except RecursionError as error:
        raise InvalidRequest(f"{param}: nested too deeply", param=param) from error
    if calling is not None and model.dialect.format.reads_schemas:
        await model.text.apart(calling.read_schemas)  # reading long schemas would block the event loop
    return grammar


def _form_of_calls(model: ServedModel, calling: ToolCalling, form: Form | None) -> Form:
    answer = None if form is None else form.schema
    if form is not None and not calling.required and not isinstance(answer, dict):
        raise InvalidRequest(f"{form.param}: with tools, only a JSON schema is supported", param=form.param)
    schema = answer if isinstance(answer, dict) else None
    wanted = Wanted(calling.functions, calling.required, calling.several, schema)
    return Form("tools", partial(CallsDemand.of, model.dialect.format, model.text.spell, wanted))


def _prelude(
    model: ServedModel, fields: ChatRequest, calling: ToolCalling | None, prompt: Sequence[int]
) -> Prelude | None:
    """Return the text that may precede the form, as a grammar."""
    if calling is not None and model.dialect.format.has_channels:
        return None  # part of the format's own grammar
    prelude = prelude_of(model, fields, prompt, takes_breaks=takes_breaks(fields, calling))
    is_free = not is_constrained(fields, calling)
    marks = model.thoughts_of(with_tools=calling is not None)
    num_tokens = 0 if marks is None else len(model.thought_tokens[marks])
    if prelude is not None and is_free and prelude.is_optional and num_tokens < 2:
        return None  # free text that begins with the mark would match the form too
    return prelude


def _forms(fields: SamplingFields) -> list[Form]:
    """Return all output constraints in the fields."""
    outputs = fields.structured_outputs
    forms = [] if fields.response_format is None else _response_form(fields.response_format)
    if outputs is not None:
        if outputs.json_object:
            forms.append(_json("structured_outputs.json_object", ANY_OBJECT))
        forms += _named("structured_outputs.", outputs.json_schema, outputs.regex, outputs.choice, outputs.grammar)
    guided = (fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    forms += _named("guided_", *guided)
    if fields.json_schema not in (None, ""):
        forms.append(_json("json_schema", _parsed(fields.json_schema, "json_schema")))
    forms += _named("", None, fields.regex or None, None, fields.grammar or None)
    if ebnf := fields.ebnf:
        forms.append(Form("ebnf", partial(RulesDemand, ebnf)))
    return forms


def _response_form(wanted: ResponseFormat) -> list[Form]:
    """Return the constraint of a `response_format`, with the schema where OpenAI, llama.cpp or TGI expect it."""
    named, kind = wanted.json_schema, wanted.type
    places: dict[str, JsonSchema | str | None] = {
        "json_schema.schema": None if named is None else named.json_schema,
        "schema": wanted.bare_schema,
        "value": wanted.value,
    }
    given = [(f"response_format.{name}", value) for name, value in places.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0][0]}, {given[1][0]}: only one of these is allowed", param=given[1][0])
    if not given:
        if kind in ("json_schema", "json", "regex"):
            place = "json_schema.schema" if kind == "json_schema" else "value"
            raise InvalidRequest(f"response_format.{place}: is required with type {kind!r}", param="response_format")
        return [_json("response_format", ANY_OBJECT)] if kind == "json_object" else []
    ((param, value),) = given
    if kind == "text" or (kind == "regex") is not isinstance(value, str):
        raise InvalidRequest(f"{param}: not allowed with type {kind!r}", param=param)
    if isinstance(value, str):
        return [Form(param, partial(RegexDemand, value))]
    if kind == "json_schema" and isinstance(value, dict) and isinstance(inner := value.get("schema"), dict):
        value = inner  # TGI's value may also contain the name
    return [_json(param, value)]


def _named(
    prefix: str, schema: JsonSchema | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Form]:
    forms: list[Form] = []
    if schema is not None:
        forms.append(_json(f"{prefix}json", _parsed(schema, f"{prefix}json")))
    if regex is not None:
        forms.append(Form(f"{prefix}regex", partial(RegexDemand, regex)))
    if choice is not None:
        forms.append(Form(f"{prefix}choice", partial(ChoiceDemand, tuple(choice))))
    if grammar is not None:
        forms.append(Form(f"{prefix}grammar", partial(RulesDemand, grammar)))
    return forms


def _json(param: str, schema: JsonSchema) -> Form:
    return Form(param, partial(JsonDemand.of, schema), schema)


def _parsed(schema: JsonSchema | str, param: str) -> JsonSchema:
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: invalid JSON: {str(error)[:200]}", param=param) from error
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(f"{param}: must be a JSON schema (an object)", param=param)
    return parsed
