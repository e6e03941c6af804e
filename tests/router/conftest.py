"""The real application on a real socket. It is imported when a test starts it: most tests need none of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model

from . import answers

if TYPE_CHECKING:
    import openai

    from router.text.text_pipeline import TextPipeline

    from .application import Running, Start, Tools


@pytest.fixture(scope="session", autouse=True)
def grammars_are_closed() -> Iterator[None]:
    """The process that compiles what tests ask about ends with them."""
    yield
    answers.close()


@pytest.fixture
def unread_bytes_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client still sends is read however long this process gets no core."""
    monkeypatch.setattr("router.server.http_connection.LINGER_S", 3600.0)


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    return resolve_model("tiny-random")


@pytest.fixture(scope="session")
def text(files: ModelFiles) -> Iterator[TextPipeline]:
    from router.text.text_pipeline import TextPipeline

    pipeline = TextPipeline.from_files(files, threads=2)
    yield pipeline
    pipeline.close()


@pytest.fixture
def response_store() -> str:
    """Where applications keep what outlives a request: nowhere. Files of tests about that say "memory", which takes
    databases and threads, half of the time of a small test."""
    return "off"


@pytest.fixture
async def start(files: ModelFiles, text: TextPipeline, response_store: str) -> AsyncIterator[Start]:
    """Starts the application with the settings of a test."""
    from .application import applications

    async with applications(files, text, response_store) as start:
        yield start


@pytest.fixture
async def running(start: Start) -> Running:
    return await start()


@pytest.fixture
async def several(start: Start, files: ModelFiles, text: TextPipeline) -> Callable[..., Awaitable[Any]]:
    """Starts an application of two models; `small` and `large` change what is said of a model."""
    from .several import starter

    return starter(start, files, text)


@pytest.fixture
async def sdk(running: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's official client, which takes a second to import."""
    from .sdk import client_of

    async with client_of(running) as client:
        yield client


@pytest.fixture
def tools() -> type[Tools]:
    from .application import Tools

    return Tools


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[Any], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]]:
    """Opens plain connections to a running server; all are closed at the end."""
    opened: list[asyncio.StreamWriter] = []

    async def to(running: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        opened.append(writer)
        return reader, writer

    yield to
    for writer in opened:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
