"""Checks the key and the limits of each HTTP request, and records the request at its end.

    arrive ─> admit: 401, 403, 429 ─> (the endpoint: take_prompt, spend) ─> leave: metrics, audit log

A changed key file or certificate takes effect within two seconds, or at once on SIGHUP; of several processes, none goes
by old keys for more than a look (`LOOK_EVERY_S`) longer than another. A file with an error is logged and has no effect.
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
from router.access.limits import PER, Denied, ModelLimits, ModelQuota, Quota, quota_of
from router.access.tls import Certificate
from router.observe import RequestRecord, RouterMetrics
from router.siblings import RouterPart, SharedUsage

MAX_SHOWN_CHARS = 200
"""Of a method or a path in the log."""
WINDOW_S, MAX_ENDS = 30.0, 256
"""The estimate counts the ends of this long, and no more than these."""
MIN_ENDS = 4
"""Fewer ends give no estimate."""
log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/", "/dashboard", "/live", "/health", "/ready", "/metrics", "/ping"))
ADMIN_PATHS = frozenset(("/load", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
LOOK_EVERY_S = 0.5
"""Between two looks at what other processes know of the files: at most so long one goes by old keys."""


@dataclass(slots=True)
class Visit:
    """Made when the request's head is here; `began` is perf_counter seconds, `client` an address and port.

    `admitted` is set while the request counts among the active ones of its key, and it counts against `model_quotas`
    while a model answers it. `status` is what the client was told, or in the end was not: 499 for one that went away,
    5xx for a stream that broke. `record` is there once a generation request has ended.
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
    left_out: tuple[str, ...] = ()
    """Types of declared tools that the server ignored."""

    def answered(self, record: RequestRecord) -> None:
        """A generation request has ended."""
        self.record, self.status, self.error = record, record.status, record.error_name

    def audit_entry(self) -> dict[str, object]:
        """Names and numbers only."""
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


class Pace:
    """The times at which the last requests ended."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)

    def ended(self, now: float) -> None:
        """Note that a request ended."""
        self._ends.append(now)

    def drain_s(self, num_requests: int, now: float) -> float | None:
        """Seconds until `num_requests` will have ended, at most MAX_RETRY_AFTER_S; None without enough recent ends."""
        while self._ends and now - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < MIN_ENDS:
            return None
        span_s = max(now - self._ends[0], 1e-3)
        return min(MAX_RETRY_AFTER_S, num_requests * span_s / len(self._ends))


class Gate:
    """Owned by one event loop. Raises ConfigError for a key file, certificate or audit log that cannot be used."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
        usage: SharedUsage | None = None,
        part: RouterPart | None = None,
    ) -> None:
        """`part`: which process of a router this is, of several, and `usage` that of the keys at all of them."""
        self._config, self._metrics, self._clock, self._usage = config, metrics, clock, usage
        self._watches: list[tuple[str, FileWatch | KeySource, Callable[[], Awaitable[None]]]] = []
        self._hurry = asyncio.Event()
        self._keys = KeySource(config, part)
        self.ring: KeyRing | None = self._keys.ring
        if config.api_key_file:
            self._watches.append(("api_key_file", self._keys, self._reload_keys))
        self.certificate: Certificate | None = None
        if config.tls_cert:
            watch = FileWatch([config.tls_cert, config.tls_key])
            self.certificate = Certificate(config.tls_cert, config.tls_key)
            self._watches.append(("tls_cert", watch, self.certificate.reload))
        self._audit = AuditLog(config.audit_log, metrics.count_audit_dropped) if config.audit_log else None
        self._anonymous = Quota(ANONYMOUS.limits, clock())
        self._quotas: dict[str, Quota] = {}
        self.models = ModelLimits(metrics.count_rate_limited, clock, usage)

    # ------------------------------------------------------------ a request

    def arrive(self, scope: Scope, request_id: str) -> Visit:
        """The visit of a request whose head has arrived."""
        host, port = scope.get("client") or ("", 0)
        return Visit(request_id, scope["method"], scope["path"], f"{host}:{port}", ANONYMOUS, self._anonymous)

    def admit(self, visit: Visit, given: bytes) -> None:
        """Admit the holder of the key `given` (may be empty). Raises Unauthorized, Forbidden or RateLimited."""
        if visit.path in OPEN_PATHS:
            return
        if self.ring is not None:
            key = self.ring.find(given)
            if key is None:
                raise Unauthorized("the API key is missing or wrong: send Authorization: Bearer KEY")
            visit.key, visit.quota = key, self._quota(key)
        if visit.path in ADMIN_PATHS and not visit.key.admin:
            raise Forbidden(f"{visit.path} is only for keys with admin = true")
        denied = visit.quota.enter(self._clock())
        if denied is not None:
            raise self._refusal(visit, denied)
        visit.admitted = True

    def on_behalf(self, owner: str, request_id: str, *, method: str, path: str, client: str) -> Visit | None:
        """The visit of a request that the router makes for the holder of the key of this name; None without the key.

        It takes the key's tokens like any other. The limits of its requests are not touched: the router has its own.
        """
        if self.ring is None:
            return None if owner else Visit(request_id, method, path, client, ANONYMOUS, self._anonymous)
        key = self.ring.named(owner)
        return None if key is None else Visit(request_id, method, path, client, key, self._quota(key))

    def check_tokens(self, visit: Visit) -> None:
        """Raises RateLimited when the key has no token left."""
        denied = visit.quota.check_tokens(self._clock())
        if denied is not None:
            raise self._refusal(visit, denied)

    def take_prompt(self, visit: Visit, num_tokens: int) -> None:
        """Count a prompt for its model and its key.

        Raises RateLimited, or InvalidRequest for a prompt that always exceeds a limit.
        """
        self.models.take_prompt(visit, num_tokens)
        denied = visit.quota.take_prompt(num_tokens, self._clock())
        if denied is None:
            return
        self.models.spend(visit, -num_tokens)
        if math.isinf(denied.retry_after_s):
            raise InvalidRequest(
                f"the prompt has {num_tokens:,} tokens, and this key may use {denied.allowed:,} tokens per minute",
                code="rate_limit_exceeded",
            )
        raise self._refusal(visit, denied)

    def spend(self, visit: Visit, num_tokens: int) -> None:
        """Count generated tokens; a negative number gives back those of a prompt that was not computed."""
        visit.quota.spend(num_tokens, self._clock())
        if visit.model_quotas:
            self.models.spend(visit, num_tokens)

    def headers(self, visit: Visit) -> dict[str, str]:
        """The headers of an answer about the limits of its key."""
        return visit.quota.headers(self._clock())

    def leave(self, visit: Visit) -> None:
        """Record the end of a request."""
        if visit.admitted:
            visit.admitted = False
            visit.quota.leave()
        self.models.leave(visit)
        if visit.path in OPEN_PATHS:
            return
        self._metrics.count_key_request(visit.key.name, visit.status)
        if self._audit is not None:
            self._audit.write(visit.audit_entry())

    # ------------------------------------------------------------ the files

    def also_watch(self, field: str, watch: FileWatch, reload: Callable[[], Awaitable[None]]) -> None:
        """Have `watch` apply changes of another setting's file. `reload` raises ConfigError for one that is refused."""
        self._watches.append((field, watch, reload))

    async def watch(self) -> None:
        """Watch the files until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            if self._usage is not None:
                self._look_at_others()
            hurry = self._hurry.is_set()
            self._hurry.clear()
            for field, watch, reload in self._watches:
                if await asyncio.to_thread(watch.look) or hurry:
                    await self._apply(field, reload)

    def reload(self) -> None:
        """Make `watch` read every file at once, changed or not, and reopen the audit log (SIGHUP)."""
        self._hurry.set()
        if self._audit is not None:
            self._audit.reopen()

    @property
    def reloads(self) -> bool:
        """Whether SIGHUP has any effect."""
        return bool(self._watches) or self._audit is not None

    def close(self) -> None:
        """Write the queued entries of the audit log."""
        if self._audit is not None:
            self._audit.close()

    async def _apply(self, field: str, reload: Callable[[], Awaitable[None]]) -> None:
        try:
            await reload()
        except ConfigError as error:
            self._metrics.count_reload(field, ok=False)
            log.error("a changed file is refused, its old content stays in force: %s", error)
            return
        self._metrics.count_reload(field, ok=True)
        log.info("read a changed file", extra={"setting": field})

    async def _reload_keys(self) -> None:
        """Parse the key file in a thread, because ten thousand keys take long, and apply the new limits."""
        self.ring = await asyncio.to_thread(self._keys.read)
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

    def _look_at_others(self) -> None:
        now = self._clock()
        for quota in self._quotas.values():
            quota.look(now)
        self.models.look(now)

    def _refusal(self, visit: Visit, denied: Denied) -> RequestError:
        self._metrics.count_rate_limited(visit.key.name, denied.limit)
        return RateLimited(
            f"key {visit.key.name!r} may have {denied.allowed:,} {PER[denied.limit]}; try again in "
            f"{max(1, math.ceil(denied.retry_after_s)):,} s",
            limit=denied.limit,
            retry_after_s=denied.retry_after_s,
        )
