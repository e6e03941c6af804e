"""Authentication of connections to the CURVE sockets of one ZeroMQ context (ZAP, https://rfc.zeromq.org/spec/27/).

ZeroMQ has verified before that the peer owns the secret key of the public key it presents.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq

from common.wire.curve import Curve
from common.wire.drop_log import DropLog

log = logging.getLogger(__name__)
ZAP_ADDRESS = "inproc://zeromq.zap.01"
VERSION = b"1.0"
NUM_PARTS = 7
"""version, request id, domain, address, routing id, mechanism, and for CURVE one credential: the raw public key."""


class Gatekeeper:
    """A thread that accepts or rejects new connections. Without it, ZeroMQ rejects all.

    pyzmq's authenticators do not provide the peer's address, which is needed to log rejections.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> None:
        self._curve = curve
        self._drops = DropLog(log, "a connection")
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        stop = f"inproc://gatekeeper-{id(self)}"
        self._stop_in = context.socket(zmq.PAIR)
        self._stop_in.bind(stop)
        self._stop_out = context.socket(zmq.PAIR)
        self._stop_out.set(zmq.LINGER, 0)
        self._stop_out.connect(stop)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="gatekeeper", daemon=True)

    @property
    def num_refused(self) -> int:
        """Number of connections rejected since the start."""
        return self._drops.num_dropped

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the thread and close its sockets. ZeroMQ rejects all connections afterwards."""
        self._stop_out.send(b"", zmq.NOBLOCK)
        self._thread.join(timeout_s)
        self._stop_out.close()

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_in, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(1000))
                if self._stop_in in ready:
                    break
                if self._socket in ready:
                    self._answer(self._socket.recv_multipart(), time.monotonic())
                self._drops.flush(time.monotonic())
        except BaseException as error:
            log.exception("gatekeeper: failed: all further connections are rejected")
            self.failure = error
        finally:
            self._socket.close()
            self._stop_in.close()

    def _answer(self, request: list[bytes], now: float) -> None:
        refusal = self._refusal(request)
        if refusal:
            self._drops.add(refusal, now)
        request_id = request[1] if len(request) > 1 else b""
        status, text = (b"400", b"not an authorised key") if refusal else (b"200", b"OK")
        self._socket.send_multipart([VERSION, request_id, status, text, b"", b""], zmq.NOBLOCK)

    def _refusal(self, request: list[bytes]) -> str:
        """Return why the connection is rejected, or ""."""
        if len(request) != NUM_PARTS or request[0] != VERSION or request[5] != b"CURVE":
            return f"ZAP request of {len(request)} parts without CURVE"
        key = zmq.utils.z85.encode(request[6])
        if key in self._curve.trusted():
            return ""
        return f"{request[3].decode(errors='replace')}: public key {key.decode()} is not authorised"
