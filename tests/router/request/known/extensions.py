"""Fields of vLLM, SGLang and of our other APIs that an API's own documents do not have."""

from __future__ import annotations

from .outcome import Table, each, no_effect, refused, served

EVERYWHERE: Table = {
    "request_class": served(request_class="default"),
    "top_k": served(top_k=5),
    "min_p": served(min_p=0.1),
    "seed": served(seed=7),
    "presence_penalty": served(presence_penalty=0.5),
    "frequency_penalty": served(frequency_penalty=0.5),
    "repetition_penalty": served(repetition_penalty=1.5),
    "logit_bias": served(logit_bias={"65": 5}),
    "min_tokens": served(min_tokens=1),
    "ignore_eos": served(ignore_eos=True),
    "stop_token_ids": served(stop_token_ids=[65]),
    "include_stop_str_in_output": served(include_stop_str_in_output=True),
    "skip_special_tokens": served(skip_special_tokens=False),
    "cache_salt": served(cache_salt="a"),
    "structured_outputs": served(structured_outputs={"regex": "a+"}),
    "structured_outputs.regex": served(structured_outputs={"regex": "a+"}),
    "structured_outputs.choice": served(structured_outputs={"choice": ["a"]}),
    "structured_outputs.grammar": served(structured_outputs={"grammar": 'start: "a"'}),
    "structured_outputs.json": served(structured_outputs={"json": {"type": "integer"}}),
    "structured_outputs.json_object": served(structured_outputs={"json_object": True}),
    "structured_outputs.structural_tag": refused(structured_outputs={"structural_tag": {"type": "x"}}),
    "structured_outputs.whitespace_pattern": refused(structured_outputs={"regex": "a", "whitespace_pattern": " "}),
    "guided_json": served(guided_json={"type": "integer"}),
    "guided_regex": served(guided_regex="a+"),
    "guided_choice": served(guided_choice=["a"]),
    "guided_grammar": served(guided_grammar='start: "a"'),
    "structured_outputs.disable_any_whitespace": refused(structured_outputs={"disable_any_whitespace": True}),
    "json_schema": served(json_schema={"type": "integer"}),
    "grammar": served(grammar='root ::= "a"'),
    "regex": served(regex="a+"),
    "ebnf": served(ebnf='root ::= "a"'),
    "allowed_token_ids": served(allowed_token_ids=[65]),
    "bad_words": served(bad_words=["x"]),
    "truncate_prompt_tokens": served(truncate_prompt_tokens=1),
    "truncation_side": served(truncate_prompt_tokens=1, truncation_side="right"),
    "thinking_token_budget": served(thinking_token_budget=-1),
    "best_of": refused(best_of=2),
    "length_penalty": refused(length_penalty=0.5),
    "separate_reasoning": refused(separate_reasoning=False),
    **each(
        ("use_beam_search", "no_stop_trim", "return_hidden_states"), "{}", lambda name: refused(**{name: True})
    ),
    **each(
        (
            *("logits_processors", "custom_logit_processor", "guided_whitespace_pattern", "structural_tag"),
            *("documents", "vllm_xargs", "input_ids", "stop_regex", "lora_path"),
            *("session_params",),
        ),
        "{}",
        lambda name: refused(**{name: [1]}),
    ),
    **each(
        (
            *("priority", "request_id", "rid", "data_parallel_rank", "kv_transfer_params", "mm_processor_kwargs"),
            *("guided_decoding_backend", "spaces_between_special_tokens", "stream_reasoning"),
        ),
        "{}",
        lambda name: no_effect(**{name: 1}),
    ),
}  # fmt: skip

OPENAI: Table = EVERYWHERE | {
    "use_beam_search": served(use_beam_search=True),
    "length_penalty": served(use_beam_search=True, length_penalty=0.5),
    "return_token_ids": served(return_token_ids=True),
    "return_tokens_as_token_ids": served(return_tokens_as_token_ids=True),
    "prompt_logprobs": served(prompt_logprobs=1),
    "logprob_token_ids": served(logprobs=1, logprob_token_ids=[65]),
    "response_format": served(response_format={"type": "json_object"}),
    "response_format.schema": served(response_format={"type": "json_object", "schema": {"type": "object"}}),
    "response_format.value": served(response_format={"type": "regex", "value": "a+"}),
    "stream_options.continuous_usage_stats": served(stream=True, stream_options={"continuous_usage_stats": True}),
}

COMPLETIONS: Table = OPENAI | {
    "service_tier": no_effect(service_tier="flex"),
    "add_special_tokens": served(add_special_tokens=False),
    "best_of": served(best_of=2),
}

CHAT: Table = OPENAI | {
    "add_generation_prompt": served(add_generation_prompt=False),
    "continue_final_message": served(continue_final_message=True),
    "chat_template_kwargs": served(chat_template_kwargs={"enable_thinking": False}),
    "include_reasoning": served(include_reasoning=False),
    "messages.reasoning": served(
        messages=[{"role": "assistant", "content": "a", "reasoning": "b"}, {"role": "user", "content": "c"}]
    ),
    "messages.reasoning_content": served(
        messages=[{"role": "assistant", "content": "a", "reasoning_content": "b"}, {"role": "user", "content": "c"}]
    ),
    "chat_template": refused(chat_template="{{ messages }}"),
    "tool_prompt": refused(tool_prompt="Use a tool:"),  # huggingface_hub
    "echo": served(echo=True),
    "logprob_token_ids": served(logprobs=True, logprob_token_ids=[65]),
    "add_special_tokens": refused(add_special_tokens=True),
}

RESPONSES: Table = EVERYWHERE | {
    "stop": served(stop="x"),
    "chat_template_kwargs": served(chat_template_kwargs={"enable_thinking": False}),
    "n": refused(n=2),
    "max_tokens": refused(max_tokens=5),
    "messages": refused(messages=[{"role": "user", "content": "hi"}]),
    "response_format": refused(response_format={"type": "json_object"}),
    "reasoning_effort": refused(reasoning_effort="low"),
}

COUNT_TOKENS: Table = {
    "chat_template_kwargs": served(chat_template_kwargs={"enable_thinking": False}),
    "output_format": served(output_format={"type": "json_schema", "schema": {"type": "object"}}),
    "output_format.schema": served(output_format={"type": "json_schema", "schema": {"type": "object"}}),
    "thread": refused(thread={"type": "create"}),
    "container": refused(container="c"),
    "context_management.edits": served(context_management={"edits": [{"type": "clear_thinking_20251015"}]}),
}

MESSAGES: Table = {
    **EVERYWHERE,
    **COUNT_TOKENS,
    "temperature": served(temperature=0.5),  # of older clients
    "top_p": served(top_p=0.5),
    "n": refused(n=2),
    "stop": refused(stop="x"),
    "response_format": refused(response_format={"type": "json_object"}),
}
