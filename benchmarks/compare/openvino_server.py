"""A thin HTTP front for OpenVINO GenAI's continuous batching, which has no server of its own: completions of token ids.

Runs in OpenVINO's environment on the standard library alone. Its one thread reads requests between two steps of the
pipeline and writes one event a new token after a step, without text, so that no time goes to detokenising.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

MODELS = json.dumps({"object": "list", "data": [{"id": "model", "object": "model"}]}).encode()
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"x","finish_reason":"length"}]}\n\n'


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


class Stream:
    """One answer: its connection, its handle in the pipeline and how many tokens were written."""

    def __init__(self, writer: asyncio.StreamWriter, handle: Any, num_prompt: int, num_wanted: int) -> None:
        self.writer, self.handle = writer, handle
        self.num_prompt, self.num_wanted, self.num_written = num_prompt, num_wanted, 0

    def write_new(self, ended: bool) -> bool:
        """Write the tokens of the last step; True when the answer is complete, or the pipeline has `ended` it."""
        while self.handle.can_read():
            for output in self.handle.read().values():
                for _ in output.generated_ids:
                    self.num_written += 1
                    self.writer.write(LAST if self.num_written == self.num_wanted else TOKEN)
        if ended or self.num_written >= self.num_wanted:
            self.writer.write(usage_event(self.num_prompt, self.num_written))
            self.writer.close()
            return True
        return False

    def drop_if_left(self) -> bool:
        """Stop the request if its client has left; True if it has."""
        if self.writer.is_closing():
            self.handle.stop()
            return True
        return False


class Front:
    """Owns the pipeline: `submit` adds requests, `run` steps while there are any."""

    def __init__(self, pipeline: Any, make_tensor: Any, make_config: Any) -> None:
        self._pipeline, self._make_tensor, self._make_config = pipeline, make_tensor, make_config
        self._streams: list[Stream] = []
        self._count = 0
        self._work = asyncio.Event()

    def submit(self, writer: asyncio.StreamWriter, prompt: list[int], num_wanted: int) -> None:
        self._count += 1
        config = self._make_config(num_wanted)
        handle = self._pipeline.add_request(self._count, self._make_tensor(prompt), config)
        writer.write(STREAM_HEAD)
        self._streams.append(Stream(writer, handle, len(prompt), num_wanted))
        self._work.set()

    async def run(self) -> None:
        while True:
            if not self._streams:
                self._work.clear()
                await self._work.wait()
            self._pipeline.step()
            ended = not self._pipeline.has_non_finished_requests()
            self._streams = [
                stream for stream in self._streams if not stream.drop_if_left() and not stream.write_new(ended)
            ]
            for _ in range(3):  # accept, read and parse what came during the step
                await asyncio.sleep(0)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Path and body of an HTTP request. Raises ValueError or asyncio.IncompleteReadError."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    path = head.split(" ", 2)[1]
    length = 0
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return path, await reader.readexactly(length)


def answer(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + body


async def handle(front: Front, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, one request."""
    try:
        path, body = await read_request(reader)
        if path == "/v1/completions":
            fields = json.loads(body)
            front.submit(writer, [int(token) for token in fields["prompt"]], int(fields["max_tokens"]))
            return
        known = {"/health": b"{}", "/v1/models": MODELS}
        writer.write(answer("200 OK", known[path]) if path in known else answer("404 Not Found", b"{}"))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        message = json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}}).encode()
        writer.write(answer("400 Bad Request", message))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()


def open_pipeline(options: argparse.Namespace) -> Front:
    genai, openvino, numpy = import_module("openvino_genai"), import_module("openvino"), import_module("numpy")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = options.cache_gib
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": options.threads, **json.loads(options.properties)}
    pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)

    def make_config(num_wanted: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_wanted, True, False
        return config

    return Front(pipeline, lambda prompt: openvino.Tensor(numpy.array([prompt], numpy.int64)), make_config)


async def serve(front: Front, port: int) -> None:
    server = await asyncio.start_server(lambda reader, writer: handle(front, reader, writer), "127.0.0.1", port)
    async with server:
        await front.run()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("openvino_server", description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file or folder for OpenVINO GenAI")
    parser.add_argument("--port", type=int, required=True, help="port on the loopback address")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads")
    parser.add_argument("--cache-gib", type=int, default=4, help="size of the KV cache in GiB")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="maximum number of sequences per batch")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="maximum number of tokens per step")
    parser.add_argument("--properties", default="{}", help="additional device properties as JSON")
    options = parser.parse_args(argv)
    asyncio.run(serve(open_pipeline(options), options.port))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
