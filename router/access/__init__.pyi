"""Who may do what: API keys, limits, request classes, TLS, web pages, the audit log."""

from router.access.class_choice import HEADER, batch_class_of, caller_of, class_of
from router.access.end_rate import Pace
from router.access.errors import Forbidden, RateLimited
from router.access.gate import Gate
from router.access.key_file import LIMITS, MAX_LIMIT
from router.access.keys import ANONYMOUS, ApiKey, Limits
from router.access.toml_file import content_of, table_of
from router.access.visit import Visit
from router.access.watch import FileWatch
from router.access.web_pages import check_web_page

__all__ = [
    "ANONYMOUS",
    "ApiKey",
    "FileWatch",
    "Forbidden",
    "Gate",
    "HEADER",
    "LIMITS",
    "Limits",
    "MAX_LIMIT",
    "Pace",
    "RateLimited",
    "Visit",
    "batch_class_of",
    "caller_of",
    "check_web_page",
    "class_of",
    "content_of",
    "table_of",
]
