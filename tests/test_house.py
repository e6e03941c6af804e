"""One meaning a name: no class of the product has the name of another one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGES = ("kernels", "common", "prefill_worker", "decode_worker", "router")
# The shapes of bodies that clients send and get have the names of their APIs.
SHAPES = ("router/api/openai_answers.py", "router/api/anthropic_answers.py", "router/api/service_answers.py")
# name -> why two classes may have it
SHARED = {
    "Message": "between processes; in OpenAI's requests, whose schema shows the name",
    "Metadata": "in Anthropic's requests, whose schema shows the name; of a Kubernetes object",
    "SchedulerOutput": "the same of either worker's scheduler",
}


def test_no_two_classes_have_one_name(repository: Path) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((repository / package).rglob("*.py")):
            name = file.relative_to(repository).as_posix()
            if name in SHAPES:
                continue
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(name)
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert twice.keys() == SHARED.keys(), twice
