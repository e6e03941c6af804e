"""The program of `helm test` sends what the model's task needs, and says at once what only an operator can change."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType

import pytest

from common.errors import InvalidRequest
from router.request.errors import error_object

from .chart import CHART

FILE = CHART / "files" / "check_request.py"
OTHER_TASK = (400, error_object(InvalidRequest("The model 'm' has another task.", param="model")))
Replies = Mapping[str, tuple[int, object]]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_request", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def router(replies: Replies) -> Iterator[tuple[str, list[str]]]:
    """Serve the status and the body of each path; yields the address, and the paths of the requests so far."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            status, body = replies[self.path]
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing to the test's output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def options(url: str) -> Namespace:
    return Namespace(url=url, model="m", prefill=[], decode=[], timeout_s=0.0)


@pytest.mark.parametrize("path", ("/v1/embeddings", "/v1/score"))
def test_a_model_that_embeds_or_scores_passes_by_an_answer_of_its_endpoint(program: ModuleType, path: str) -> None:
    replies = dict.fromkeys(("/v1/completions", "/v1/embeddings", "/v1/score"), OTHER_TASK) | {path: (200, {})}
    with router(replies) as (url, asked):
        assert program.check(options(url)) == ""
    assert asked[-1] == path


def test_what_another_attempt_would_get_too_ends_the_test(program: ModuleType) -> None:
    replies = {"/v1/completions": (404, {"error": {"message": "no such model"}})}
    refused = pytest.raises(SystemExit, match="the router answered 404: .*no such model")
    with router(replies) as (url, asked), refused:
        program.check(options(url))
    assert asked == ["/v1/completions"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "said"),
    (("", "this test has none: set test.apiKeySecret"), ("old", "this test has the one of test.apiKeySecret")),
)
def test_a_missing_key_is_said_and_not_waited_for(key: str, said: str) -> None:
    with router({"/v1/completions": (401, {})}) as (url, _):
        line = [sys.executable, "-P", str(FILE), f"--url={url}", "--model=m", "--timeout-s=300"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, env={**os.environ, "API_KEY": key})
    assert done.returncode == 1
    assert done.stderr.strip() == f"the router answered 401: it requires an API key, and {said}"
