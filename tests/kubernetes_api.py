"""A small Kubernetes API server over real HTTP: EndpointSlices to list and watch, pods to patch, and faults to order.

It runs in a thread, so that tests of real processes can use it too. All of its state belongs to its event loop.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PATIENCE_S = 60.0
T = TypeVar("T")


class WatchDropped(Exception):
    """Ends a watch as a dying proxy does: in the middle."""


class KubernetesAPI:
    """`folder` gets the credentials that a pod would have. Faults are attributes; they hold until they are changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace = "serving"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "namespace").write_text(self.namespace)
        self.tokens: set[str] = set()
        self.rotate_token("first")
        self.refusal = 0
        self.garbage: bytes | None = None
        self.slow_s = 0.0
        self.page_size = 1000
        self.history_starts_at = 0
        self.expired_as_status = False
        self.lists = 0
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.annotations: dict[str, dict[str, str]] = {}
        self.slices: dict[str, dict[str, Any]] = {}
        self.replicas: dict[str, int] = {}
        self.unschedulable: dict[str, int] = {}
        self.leases: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._watches: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self.port = 0
        self.ssl: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ the server

    @property
    def url(self) -> str:
        return f"{'https' if self.ssl else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> KubernetesAPI:
        """Listen; after `stop` on the same port again."""
        listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only where the protocol is named
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        app = Starlette(
            routes=[
                Route("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", self._slices),
                Route("/api/v1/namespaces/{namespace}/pods/{name}", self._pod, methods=["PATCH"]),
                Route("/api/v1/namespaces/{namespace}/pods", self._pods),
                Route(
                    "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale",
                    self._scale,
                    methods=["GET", "PATCH"],
                ),
                Route(
                    "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets/{name}/scale",
                    self._scale_of_set,
                    methods=["GET", "PATCH"],
                ),
                Route("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases", self._leases, methods=["POST"]),
                Route(
                    "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}",
                    self._lease,
                    methods=["GET", "PATCH"],
                ),
            ]
        )
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1, **self.ssl
        )
        self._server = uvicorn.Server(config)
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(listener, started), daemon=True)
        self._thread.start()
        self._loop = started.result(PATIENCE_S)
        return self

    def _run(self, listener: socket.socket, started: Future[asyncio.AbstractEventLoop]) -> None:
        async def main() -> None:
            started.set_result(asyncio.get_running_loop())
            await self._server.serve(sockets=[listener])
            for connection in list(self._server.server_state.connections):  # TLS ones wait for their clients' goodbye
                connection.transport.abort()
            await asyncio.sleep(0.05)

        asyncio.run(main())
        listener.close()

    def stop(self) -> None:
        """Go away: connections break, the port is closed."""
        if self._thread is not None:
            self.drop_watches()
            self._server.should_exit = True
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()
            self._thread = None

    def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the server's loop, or here while it is away."""
        if self._thread is None:
            return work()
        done: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: done.set_result(work()))
        return done.result(PATIENCE_S)

    # ------------------------------------------------------------ what tests order

    def put(self, name: str, service: str, endpoints: list[dict[str, Any]], port: int = 7001, **fields: Any) -> None:
        """Create or change a slice, and tell the watches."""
        slice_ = {
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}, "managedFields": [{}]},
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": [{"name": "http", "port": 7003}, {"name": "control", "port": port, "protocol": "TCP"}],
            **fields,
        }

        def change() -> None:
            kind = "MODIFIED" if name in self.slices else "ADDED"
            self.slices[name] = slice_
            self._emit(kind, slice_)

        self._call(change)

    def put_worker(self, service: str, address: str, **conditions: bool) -> None:
        """A slice of its own for a worker at tcp://host:port."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        family = "IPv6" if host.startswith("[") else "IPv4"
        found = endpoint(host.strip("[]"), **conditions)
        self.put(f"{service}-{port}", service, [found], int(port), addressType=family)

    def delete_worker(self, service: str, address: str) -> None:
        self.delete(f"{service}-{address.rpartition(':')[2]}")

    def delete(self, name: str, *, silently: bool = False) -> None:
        """Delete a slice; `silently`: no watch hears of it."""
        self._call(lambda: self._delete(name, silently))

    def rotate_token(self, token: str) -> None:
        """A new token in the pod's folder, the only one that is accepted."""
        (self.folder / "token").write_text(token)
        self.tokens = {token}

    def drop_watches(self) -> None:
        """Break every watch in the middle."""
        self._call(lambda: [queue.put_nowait(None) for queue in self._watches])

    def send(self, event: dict[str, Any]) -> None:
        """Send an event to the watches as it is."""
        self._call(lambda: [queue.put_nowait(event) for queue in self._watches])

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    # ------------------------------------------------------------ inside

    def _delete(self, name: str, silently: bool) -> None:
        gone = self.slices.pop(name)
        if not silently:
            self._emit("DELETED", gone)

    def _emit(self, kind: str, slice_: dict[str, Any]) -> None:
        self._version += 1
        slice_["metadata"]["resourceVersion"] = str(self._version)
        event = {"type": kind, "object": json.loads(json.dumps(slice_))}
        self._history.append((self._version, event))
        for queue in self._watches:
            queue.put_nowait(event)

    def _refused(self, request: Request) -> Response | None:
        if request.headers.get("authorization") not in {f"Bearer {token}" for token in self.tokens}:
            return status(401, "Unauthorized")
        if self.refusal:
            return status(self.refusal, "endpointslices.discovery.k8s.io is forbidden: no such right")
        if request.path_params["namespace"] != self.namespace:
            return status(404, "no such namespace")
        return None

    async def _slices(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        selector = request.query_params["labelSelector"]
        assert selector.startswith("kubernetes.io/service-name in (")
        services = selector.partition("(")[2].rstrip(")").split(",")
        if request.query_params.get("watch") == "1":
            return self._watch(int(request.query_params["resourceVersion"]), request, services)
        return self._list(request, services)

    def _list(self, request: Request, services: list[str]) -> Response:
        self.lists += 1
        if self.garbage is not None:
            return Response(self.garbage, media_type="application/json")
        found = [slice_ for slice_ in self.slices.values() if service_of(slice_) in services]
        begin = int(request.query_params.get("continue", "0"))
        end = begin + min(self.page_size, int(request.query_params["limit"]))
        metadata = {"resourceVersion": str(self._version), "continue": str(end) if end < len(found) else ""}
        body = json.dumps({"kind": "EndpointSliceList", "metadata": metadata, "items": found[begin:end]}).encode()

        async def drip() -> AsyncIterator[bytes]:
            yield body[:20]
            await asyncio.sleep(self.slow_s)
            yield body[20:]

        return StreamingResponse(drip(), media_type="application/json")

    def _watch(self, version: int, request: Request, services: list[str]) -> Response:
        if version < self.history_starts_at and self.expired_as_status:
            return status(410, "too old resource version")
        return StreamingResponse(self._events(version, request, services), media_type="application/json")

    async def _events(self, version: int, request: Request, services: list[str]) -> AsyncIterator[bytes]:
        if version < self.history_starts_at:
            yield line({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
            return
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for at, event in self._history:
            if at > version:
                queue.put_nowait(event)
        self._watches.add(queue)
        deadline = asyncio.get_running_loop().time() + float(request.query_params["timeoutSeconds"])
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    event = await queue.get()
                if event is None:
                    raise WatchDropped
                if service_of(event["object"]) in (*services, ""):
                    yield line(event)
        except TimeoutError:
            return
        finally:
            self._watches.discard(queue)

    async def _scale(self, request: Request) -> Response:
        return await self._scaled(request, request.path_params["name"])

    async def _scale_of_set(self, request: Request) -> Response:
        """A set's replicas have its kind before its name."""
        return await self._scaled(request, f"leaderworkersets/{request.path_params['name']}")

    async def _scaled(self, request: Request, name: str) -> Response:
        if refused := self._refused(request):
            return refused
        if name not in self.replicas:
            return status(404, "no such deployment")
        if request.method == "PATCH":
            patch = json.loads(await request.body())
            self.patches.append((name, patch))
            self.replicas[name] = patch["spec"]["replicas"]
        found = {"spec": {"replicas": self.replicas[name]}, "status": {"selector": f"app={name}"}}
        return JSONResponse({"kind": "Scale", "metadata": {"name": name}} | found)

    async def _pods(self, request: Request) -> Response:
        """Pods of a Deployment that find no machine, and one that waits for its image."""
        if refused := self._refused(request):
            return refused
        assert request.query_params["fieldSelector"] == "status.phase=Pending"
        stuck = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        placed = {"type": "PodScheduled", "status": "True"}
        num = self.unschedulable.get(request.query_params["labelSelector"].removeprefix("app="), 0)
        items = [{"status": {"conditions": [each]}} for each in (*([stuck] * num), placed)]
        return JSONResponse({"kind": "PodList", "items": [*items, {"status": {}}]})

    async def _leases(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        lease = json.loads(await request.body())
        name = lease["metadata"]["name"]
        if name in self.leases:
            return status(409, "it exists already")
        lease["metadata"]["resourceVersion"] = "1"
        self.leases[name] = lease
        return JSONResponse(lease, status_code=201)

    async def _lease(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        lease = self.leases.get(request.path_params["name"])
        if lease is None:
            return status(404, "no such lease")
        if request.method == "PATCH":
            patch = json.loads(await request.body())
            if patch["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"]:
                return status(409, "the object has been modified")
            lease["metadata"]["resourceVersion"] = str(int(lease["metadata"]["resourceVersion"]) + 1)
            lease["spec"] |= patch["spec"]
        return JSONResponse(lease)

    async def _pod(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        if request.headers["content-type"] != "application/merge-patch+json":
            return status(415, "unsupported media type")
        name, patch = request.path_params["name"], json.loads(await request.body())
        self.patches.append((name, patch))
        self.annotations.setdefault(name, {}).update(patch["metadata"]["annotations"])
        return JSONResponse({"metadata": {"name": name, "annotations": self.annotations[name]}})


def endpoint(address: str, uid: str = "", **conditions: bool) -> dict[str, Any]:
    """One endpoint of a slice. Conditions that are not given are absent, as Kubernetes allows."""
    return {
        "addresses": [address],
        "conditions": {"ready": True, **conditions},
        "targetRef": {"kind": "Pod", "uid": uid or address},
    }


def service_of(slice_: dict[str, Any]) -> str:
    return str(slice_.get("metadata", {}).get("labels", {}).get("kubernetes.io/service-name", ""))


def status(code: int, message: str) -> Response:
    return JSONResponse({"kind": "Status", "code": code, "message": message}, status_code=code)


def line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"
