"""`diptych show MODEL`: describe a model on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from common.arguments import CommandParser
from common.errors import ModelError
from common.model_files import (
    ChatTemplate,
    ModelFiles,
    Tokenizer,
    find_model,
    local_models,
    resolve_model,
    served_task,
    summary_of,
)
from common.observe import in_bytes
from router.cli.models.flags import add_models_dir, complete_models
from router.cli.size import ModelSize

KV_BYTES = 2
"""Bytes of a number in the KV cache, unless `--kv-cache-dtype` is set."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych show`."""
    parser = CommandParser("diptych show", description="Describe a model on this machine.")
    parser.add_argument("model", metavar="MODEL", help="name as in `diptych ls` or its last part, folder or GGUF file")
    add_models_dir(parser)
    complete_models(parser)
    parser.add_argument("--template", action="store_true", help="print only the chat template")
    parser.add_argument("--json", action="store_true", help="print the description as JSON")
    return parser


def capabilities(files: ModelFiles) -> list[str]:
    """Return what a model can do: completion, chat, tools, thinking, embedding or score."""
    from router.text import marks_in
    from router.text.calls import dialect_of

    task = served_task(files)
    if not task.generates:
        return ["embedding" if task.name == "embed" else task.name]
    found = ["completion"]
    if files.chat_template is None:
        return found
    template, tokenizer = ChatTemplate.from_files(files), Tokenizer.from_file(files.tokenizer)
    dialect = dialect_of(template.with_tools)
    thinks = dialect.format.has_channels or marks_in(
        template.source, lambda text: tokenizer.token_to_id(text) is not None
    )
    return [*found, "chat", *(["tools"] if dialect.is_known else []), *(["thinking"] if thinks else [])]


def described(files: ModelFiles) -> dict[str, Any]:
    """Return the facts about a model. Raises ModelError."""
    summary = summary_of(files)
    kv_bytes = float(KV_BYTES * summary.kv_numbers)
    size = ModelSize(1, summary.num_bytes, kv_bytes, summary.window or float("inf"))
    return {
        "name": files.model_id,
        "architecture": summary.architecture,
        "parameters": summary.num_parameters,
        "quantization": summary.quantisation,
        "context": files.max_model_len,
        "capabilities": capabilities(files),
        "license": summary.licence,
        "weights_bytes": summary.num_bytes,
        "kv_bytes_per_token": round(kv_bytes),
        "memory_bytes": round(size.memory_bytes(files.max_model_len)) if kv_bytes else summary.num_bytes,
        "unsupported": files.unsupported,
    }


def _text(facts: dict[str, Any]) -> str:
    kv_bytes = facts["kv_bytes_per_token"]
    memory = f"{in_bytes(facts['weights_bytes'])} weights"
    if kv_bytes:
        memory += f" + {kv_bytes / 1e3:,.1f} kB per token = {in_bytes(facts['memory_bytes'])} for one full context"
    rows = {
        "model": facts["name"],
        "architecture": facts["architecture"],
        "parameters": f"{facts['parameters'] / 1e6:,.0f} M",
        "quantization": facts["quantization"],
        "context": f"{facts['context']:,} tokens",
        "capabilities": ", ".join(facts["capabilities"]),
        "license": facts["license"] or "not stated in the files",
        "memory": f"{memory}, for each worker",
        "engine": "vllm (--engine vllm)" if facts["unsupported"] else "diptych",
    }
    return "\n".join(f"  {name:<14}{text}" for name, text in rows.items())


def find_files(name: str, options: argparse.Namespace) -> ModelFiles:
    """Return the files of a model that is on this machine. Raises ModelError."""
    wanted: dict[str, Any] = {"download": False, "weights": False, "supported": False}
    try:
        return resolve_model(name, **wanted)
    except ModelError as error:
        try:
            found = find_model(name, local_models(options.models_dir))
        except ModelError:
            raise error from None
        return resolve_model(found.name, **wanted)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns exit status 0, or 1 if the model is missing, damaged or has no template to print."""
    options = build_parser().parse_args(argv)
    try:
        files = find_files(options.model, options)
        if options.template:
            if files.chat_template is None:
                raise ModelError(f"{files.model_id} has no chat template")
            print(files.chat_template)
            return 0
        facts = described(files)
    except ModelError as error:
        print(f"diptych show: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts, indent=2) if options.json else _text(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
