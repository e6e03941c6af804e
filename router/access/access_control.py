"""Access control of HTTP requests: checks keys and limits, and records each request when it ends.

    arrive ─> admit: 401, 403, 429 ─> (the endpoint: take_prompt, spend) ─> leave: metrics, audit log

A changed key file or certificate takes effect within two seconds, or immediately on SIGHUP. Several processes of a
router differ for at most `WATCH_POLL_S`. Errors in a changed file are logged, and the old content remains in force.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.types import Scope

from common.config import RouterConfig
from common.errors import MAX_RETRY_AFTER_S, ConfigError, InvalidRequest, RequestError
from router.access.audit import AuditLog
from router.access.errors import Forbidden, RateLimited, Unauthorized
from router.access.files import FileWatch
from router.access.keys import ANONYMOUS, ApiKey, KeyRing, KeySource, Limits
from router.access.limits import PER, LimitExceeded, ModelLimits, ModelQuota, Quota, quota_of
from router.access.tls import Certificate
from router.observe import RequestRecord, RouterMetrics
from router.siblings import RouterPart, SharedUsage

MAX_SHOWN_CHARS = 200
"""Maximum length, in characters, of a method or a path in the log."""
WINDOW_S, MAX_ENDS = 30.0, 256
"""Window, in seconds, and maximum number of completed requests used to estimate the request rate."""
MIN_ENDS = 4
"""With fewer completed requests there is no estimate."""
log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/", "/dashboard", "/docs", "/live", "/health", "/ready", "/metrics", "/ping"))
OPEN_PREFIX = "/static/"
ADMIN_PATHS = frozenset(
    (
        *("/load", "/load/history", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/api/pull", "/api/delete"),
        *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/weight_info"),
    )
)
WATCH_POLL_S = 0.5
"""Polling interval for changes that sibling processes have accepted."""


@dataclass(slots=True)
class ClientRequest:
    """State of one HTTP request, from its headers to its end.

    `began` is in perf_counter seconds; `client` is an address with port. `admitted` is set while the request counts as
    active for its key. It counts against `model_quotas` while a model answers it. `status` is the status sent, or 499
    if the client disconnected, or 5xx if a stream failed. `record` is set when a generation request has ended.
    """

    request_id: str
    method: str
    path: str
    client: str
    key: ApiKey = ANONYMOUS
    quota: Quota = dataclasses.field(default_factory=lambda: Quota(Limits(), 0.0))
    began: float = dataclasses.field(default_factory=time.perf_counter)
    admitted: bool = False
    model_quotas: tuple[ModelQuota, ...] = ()
    status: int = 0
    error: str = ""
    record: RequestRecord | None = None
    ignored_tools: tuple[str, ...] = ()
    """Types of declared tools that the server has ignored."""
    weight_version: str = ""
    """Version of the weights that compute the answer; "" if no model does, or none has computed a token yet."""

    @property
    def is_open(self) -> bool:
        """Whether the path needs no key."""
        return self.path in OPEN_PATHS or self.path.startswith(OPEN_PREFIX)

    def answered(self, record: RequestRecord) -> None:
        """Store the record of a completed generation request."""
        self.record, self.status, self.error = record, record.status, record.error_name

    def audit_entry(self) -> dict[str, object]:
        """Return the audit log entry: names and numbers only."""
        entry: dict[str, object] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "key": self.key.name or None,
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method[:MAX_SHOWN_CHARS],
            "path": self.path[:MAX_SHOWN_CHARS],
            "model": None,
            "prompt_tokens": 0,
            "output_tokens": 0,
            "status": self.status,
            "finish_reason": None,
            "error": self.error or None,
            "duration_ms": round((time.perf_counter() - self.began) * 1e3, 3),
        }
        if (record := self.record) is not None:
            entry |= {"prompt_tokens": record.num_prompt_tokens, "output_tokens": record.num_output_tokens}
            entry |= {"model": record.model or None, "finish_reason": record.finish_reason or None}
        return entry


class CompletionRate:
    """Estimates the rate at which requests complete, from the most recent completions."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)

    def ended(self, now: float) -> None:
        """Record a completed request."""
        self._ends.append(now)

    def drain_s(self, num_requests: int, now: float) -> float | None:
        """Estimate the seconds until `num_requests` complete, at most MAX_RETRY_AFTER_S; None without enough data."""
        while self._ends and now - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < MIN_ENDS:
            return None
        span_s = max(now - self._ends[0], 1e-3)
        return min(MAX_RETRY_AFTER_S, num_requests * span_s / len(self._ends))


class AccessControl:
    """Access control of a router process. Owned by one event loop.

    Raises ConfigError if a key file, certificate or audit log cannot be used.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
        usage: SharedUsage | None = None,
        part: RouterPart | None = None,
    ) -> None:
        """`part` identifies this process among the several of a router. `usage` is the key usage of all of them."""
        self._config, self._metrics, self._clock, self._usage = config, metrics, clock, usage
        self._watches: list[tuple[str, FileWatch | KeySource, Callable[[], Awaitable[None]]]] = []
        self._reload_requested = asyncio.Event()
        self._keys = KeySource(config, part)
        self.ring: KeyRing | None = self._keys.ring
        if config.api_key_file:
            self._watches.append(("api_key_file", self._keys, self._reload_keys))
        self.certificate: Certificate | None = None
        if config.tls_cert:
            watch = FileWatch([config.tls_cert, config.tls_key])
            certificate = self.certificate = Certificate(config.tls_cert, config.tls_key)
            self._watches.append(("tls_cert", watch, certificate.reload))
            metrics.watch_certificate(lambda: certificate.left_s)
        self._audit = AuditLog(config.audit_log, metrics.count_audit_dropped) if config.audit_log else None
        self._anonymous = Quota(ANONYMOUS.limits, clock())
        self._quotas: dict[str, Quota] = {}
        self.models = ModelLimits(metrics.count_rate_limited, clock, usage)

    # ------------------------------------------------------------ a request

    def arrive(self, scope: Scope, request_id: str) -> ClientRequest:
        """Create the state of a request whose headers have arrived."""
        host, port = scope.get("client") or ("", 0)
        return ClientRequest(request_id, scope["method"], scope["path"], f"{host}:{port}", ANONYMOUS, self._anonymous)

    def admit(self, client_request: ClientRequest, given: bytes) -> None:
        """Check the key `given` (may be empty) and its limits. Raises Unauthorized, Forbidden or RateLimited."""
        if client_request.is_open:
            return
        if self.ring is not None:
            key = self.ring.find(given)
            if key is None:
                raise Unauthorized("The API key is missing or incorrect. Send the header 'Authorization: Bearer KEY'.")
            client_request.key, client_request.quota = key, self._quota(key)
        if client_request.path in ADMIN_PATHS and not client_request.key.admin:
            raise Forbidden(f"{client_request.path} requires an API key with admin = true.")
        exceeded = client_request.quota.enter(self._clock())
        if exceeded is not None:
            raise self._refusal(client_request, exceeded)
        client_request.admitted = True

    def internal_request(
        self, owner: str, request_id: str, *, method: str, path: str, client: str
    ) -> ClientRequest | None:
        """Create the state of a request that the router makes for the holder of the key `owner`; None if it is gone.

        The request uses the key's tokens but does not count against its request limits.
        """
        key = self.key_of_owner(owner)
        if key is None:
            return None
        quota = self._anonymous if self.ring is None else self._quota(key)
        return ClientRequest(request_id, method, path, client, key, quota)

    def key_of_owner(self, owner: str) -> ApiKey | None:
        """Return the key with the name `owner`, which is "" for a router without keys; None if it is gone."""
        if self.ring is None:
            return None if owner else ANONYMOUS
        return self.ring.named(owner)

    def check_tokens(self, client_request: ClientRequest) -> None:
        """Raise RateLimited if the key has no tokens left."""
        exceeded = client_request.quota.check_tokens(self._clock())
        if exceeded is not None:
            raise self._refusal(client_request, exceeded)

    def take_prompt(self, client_request: ClientRequest, num_tokens: int) -> None:
        """Count a prompt against the limits of its model and its key.

        Raises RateLimited, or InvalidRequest for a single prompt that is larger than a limit.
        """
        self.models.take_prompt(client_request, num_tokens)
        exceeded = client_request.quota.take_prompt(num_tokens, self._clock())
        if exceeded is None:
            return
        self.models.spend(client_request, -num_tokens)
        if math.isinf(exceeded.retry_after_s):
            raise InvalidRequest(
                f"The prompt has {num_tokens:,} tokens, but this key is limited to {exceeded.allowed:,} per minute.",
                code="rate_limit_exceeded",
            )
        raise self._refusal(client_request, exceeded)

    def spend(self, client_request: ClientRequest, num_tokens: int) -> None:
        """Count generated tokens. A negative number refunds a prompt that was not computed."""
        client_request.quota.spend(num_tokens, self._clock())
        if client_request.model_quotas:
            self.models.spend(client_request, num_tokens)

    def headers(self, client_request: ClientRequest) -> dict[str, str]:
        """Return the response headers about the limits of the key."""
        return client_request.quota.headers(self._clock())

    def leave(self, client_request: ClientRequest) -> None:
        """Record the end of a request in the metrics and the audit log."""
        if client_request.admitted:
            client_request.admitted = False
            client_request.quota.leave()
        self.models.leave(client_request)
        if client_request.is_open:
            return
        self._metrics.count_key_request(client_request.key.name, client_request.status)
        if self._audit is not None:
            self._audit.write(client_request.audit_entry())

    # ------------------------------------------------------------ the files

    def add_watch(self, field: str, watch: FileWatch, reload: Callable[[], Awaitable[None]]) -> None:
        """Make `watch` apply changes of another setting's file. `reload` raises ConfigError for invalid content."""
        self._watches.append((field, watch, reload))

    async def watch(self) -> None:
        """Poll the files and apply their changes until cancelled."""
        while True:
            try:
                async with asyncio.timeout(WATCH_POLL_S):
                    await self._reload_requested.wait()
            except TimeoutError:
                pass
            if self._usage is not None:
                self._apply_sibling_usage()
            reload_requested = self._reload_requested.is_set()
            self._reload_requested.clear()
            if self.certificate is not None:
                self.certificate.log_expiry()
            for field, watch, reload in self._watches:
                if await asyncio.to_thread(watch.look) or reload_requested:
                    await self._apply(field, reload)

    def reload(self) -> None:
        """Make `watch` reload all files immediately, changed or not, and reopen the audit log (SIGHUP)."""
        self._reload_requested.set()
        if self._audit is not None:
            self._audit.reopen()

    @property
    def reloads(self) -> bool:
        """Whether SIGHUP has any effect."""
        return bool(self._watches) or self._audit is not None

    def close(self) -> None:
        """Write the queued entries of the audit log and close it."""
        if self._audit is not None:
            self._audit.close()

    async def _apply(self, field: str, reload: Callable[[], Awaitable[None]]) -> None:
        try:
            await reload()
        except ConfigError as error:
            self._metrics.count_reload(field, ok=False)
            log.error("changed file rejected, the old content remains in force: %s", error)
            return
        self._metrics.count_reload(field, ok=True)
        log.info("changed file loaded", extra={"setting": field})

    async def _reload_keys(self) -> None:
        """Parse the key file in a thread, because ten thousand keys take long, and apply the new limits."""
        before, self.ring = self.ring, await asyncio.to_thread(self._keys.read)
        if before is not None and self.ring is not None:
            file, changes = self._config.api_key_file, self.ring.changes_since(before)
            log.info("API keys: %d are valid after the change of %s: %s", len(self.ring.keys), file, changes)
        now = self._clock()
        known = {key.name: key for key in self.ring.keys} if self.ring is not None else {}
        for name, quota in list(self._quotas.items()):
            if name in known:
                quota.change(known[name].limits, now)
            elif not quota.num_active:
                del self._quotas[name]
        self.models.change_keys(tuple(known.values()))

    def _quota(self, key: ApiKey) -> Quota:
        quota = self._quotas.get(key.name)
        if quota is None:
            quota = self._quotas[key.name] = quota_of(key.name, key.limits, self._clock(), self._usage)
        return quota

    def _apply_sibling_usage(self) -> None:
        now = self._clock()
        for quota in self._quotas.values():
            quota.look(now)
        self.models.look(now)

    def _refusal(self, client_request: ClientRequest, exceeded: LimitExceeded) -> RequestError:
        self._metrics.count_rate_limited(client_request.key.name, exceeded.limit)
        return RateLimited(
            f"Rate limit reached for key {client_request.key.name!r}: limit {exceeded.allowed:,} {PER[exceeded.limit]}."
            f" Please try again in {max(1, math.ceil(exceeded.retry_after_s)):,} s.",
            limit=exceeded.limit,
            retry_after_s=exceeded.retry_after_s,
        )
