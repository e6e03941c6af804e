"""Chat template of `--chat-template`, which replaces the templates of a model."""

from __future__ import annotations

from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import ConfigError
from common.model_files import ChatTemplate, ModelFiles
from router.access import check_size, content_of

TEMPLATE_FIELD = "chat_template"
MAX_TEMPLATE_BYTES = 1024 * 1024
"""Maximum size of the file, more than ten times that of the largest published template."""


def read_template(path: str) -> str:
    """Read a chat template.

    Raises ConfigError, with the line and the reason, if it is unreadable, not valid Jinja, or cannot render a user
    message.
    """
    data = content_of(TEMPLATE_FIELD, path, MAX_TEMPLATE_BYTES)
    check_size(TEMPLATE_FIELD, path, data, MAX_TEMPLATE_BYTES)
    try:
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(TEMPLATE_FIELD, path, f"a UTF-8 text file ({error})") from error
    if problem := ChatTemplate.problem_of(source):
        raise ConfigError(TEMPLATE_FIELD, path, f"a Jinja template that renders a user message ({problem})")
    return source


def with_chat_template(files: ModelFiles, config: RouterConfig) -> ModelFiles:
    """Return the model with the template of `--chat-template`, if set, for requests with and without tools.

    Raises ConfigError as `read_template` does.
    """
    if not config.chat_template:
        return files
    return replace(files, chat_template=read_template(config.chat_template), tool_template=None)
