from router.access.access_control import AccessControl, ClientRequest, CompletionRate
from router.access.class_choice import HEADER, batch_class_of, caller_of, class_of
from router.access.cors import CorsPolicy
from router.access.errors import Forbidden, RateLimited
from router.access.files import FileWatch, check_size, content_of, table_of
from router.access.keys import ANONYMOUS, LIMITS, MAX_LIMIT, ApiKey, Limits
from router.access.startup_check import check_access_files
from router.access.web_pages import check_web_page

__all__ = [
    "ANONYMOUS",
    "ApiKey",
    "FileWatch",
    "Forbidden",
    "AccessControl",
    "HEADER",
    "LIMITS",
    "Limits",
    "MAX_LIMIT",
    "CompletionRate",
    "CorsPolicy",
    "RateLimited",
    "ClientRequest",
    "batch_class_of",
    "caller_of",
    "check_access_files",
    "check_size",
    "check_web_page",
    "class_of",
    "content_of",
    "table_of",
]
