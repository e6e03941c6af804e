"""The program of `helm test` says at once what only an operator can change."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from .chart import CHART

pytestmark = pytest.mark.slow


class Refusal(BaseHTTPRequestHandler):
    """A router that asks for a key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing to the test's output."""


@pytest.mark.parametrize(
    ("key", "said"),
    (("", "this test has none: set test.apiKeySecret"), ("old", "this test has the one of test.apiKeySecret")),
)
def test_a_missing_key_is_said_and_not_waited_for(key: str, said: str) -> None:
    server = HTTPServer(("127.0.0.1", 0), Refusal)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"--url=http://127.0.0.1:{server.server_port}"
        line = [sys.executable, "-P", str(CHART / "files" / "check_request.py"), url, "--model=m", "--timeout-s=300"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, env={**os.environ, "API_KEY": key})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.returncode == 1
    assert done.stderr.strip() == f"the router answered 401: it requires an API key, and {said}"
