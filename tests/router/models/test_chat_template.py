from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import ConfigError
from common.model_files.resolve import resolve_model
from router.cli.serve.serve import check_settings
from router.models.chat_template import MAX_TEMPLATE_BYTES, read_template, with_chat_template

SOURCE = "{{ messages[0].content }} é"


def test_a_file_replaces_all_templates_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(SOURCE, encoding="utf-8-sig")
    files = replace(resolve_model("tiny-random", weights=False), tool_template="{{ tools }}")
    assert with_chat_template(files, RouterConfig()) is files
    found = with_chat_template(files, RouterConfig(chat_template=str(file)))
    assert (found.chat_template, found.tool_template) == (SOURCE, None)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "a readable file .No such file"),
        (b"\xff", "a UTF-8 text file"),
        (b" " * (MAX_TEMPLATE_BYTES + 1), "a file of at most 1,048,576 bytes"),
        (b"x\n{% if %}", r"a Jinja template that renders a user message .line 2: Expected an expression"),
        (b"", "omits the user's message"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, data: bytes | None, reason: str) -> None:
    file = tmp_path / "own.jinja"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError, match=f"own.jinja': must be {reason}" if data else reason):
        read_template(str(file))


def test_a_service_does_not_start_its_workers_with_a_bad_template(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f'[[model]]\nmodel = "tiny-random"\nchat_template = "{tmp_path}/missing.jinja"\n')
    with pytest.raises(ConfigError, match="missing.jinja"):
        check_settings(RouterConfig(models_file=str(file)))
