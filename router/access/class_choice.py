"""Selection of a request's class: by the body's `request_class` or the header `X-Request-Class`, by tier, or by key.

The field and the header are equivalent and take precedence over OpenAI's `service_tier`, which some classes represent.
Other requests get the key's own class: the first of `classes` in the key file, or `default`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from common.config import BATCH_CLASSES, DEFAULT, RequestClass
from common.errors import InvalidRequest, quoted
from router.access.errors import Forbidden
from router.access.keys import ApiKey
from router.dispatch import Caller

HEADER = "x-request-class"
PARAM = "request_class"
MAX_SHOWN = 40
"""Maximum length, in characters, of an invalid name quoted in an error."""
TIERS: Mapping[str, tuple[str, ...]] = {"flex": BATCH_CLASSES, "priority": ("priority", "interactive")}
"""Classes that represent a service tier: the first that exists. Other tiers select the key's own class."""


def class_of(
    classes: Mapping[str, RequestClass],
    key: ApiKey,
    header: str = "",
    field: str | None = None,
    tier: str | None = None,
) -> RequestClass:
    """Return the class of a request. Raises InvalidRequest if it is unknown, Forbidden if the key may not use it."""
    if header and field and header != field:
        raise InvalidRequest(
            f"{PARAM}: the body names {_shown(field)}, but the header {HEADER} names {_shown(header)}",
            param=PARAM,
        )
    if name := field or header:
        return _named(classes, key, name)
    return next(_stands_for(classes, key, tier), _own(classes, key))


def batch_class_of(classes: Mapping[str, RequestClass], key: ApiKey) -> RequestClass:
    """Return the class of a batch line that names none: a built-in class (lowest priority), or that of tier "flex"."""
    built_in = (one for one in classes.values() if one.is_built_in)
    return next(built_in, None) or next(_stands_for(classes, key, "flex"), _own(classes, key))


def caller_of(classes: Mapping[str, RequestClass], key: ApiKey, header: str = "") -> Caller:
    """Return the caller of a request whose body, which may name any class, is not read yet. Raises like `class_of`."""
    if header:
        return Caller(key.name, (_named(classes, key, header),))
    own = _own(classes, key)
    others = (one for name, one in classes.items() if one is not own and _may_use(key, name) and not one.is_built_in)
    return Caller(key.name, (own, *others))


def _stands_for(classes: Mapping[str, RequestClass], key: ApiKey, tier: str | None) -> Iterator[RequestClass]:
    """Yield the classes that represent a service tier, are configured, and are allowed for the key."""
    for name in TIERS.get(tier or "", ()):
        if (one := classes.get(name)) is not None and _may_use(key, name) and not one.is_built_in:
            yield one


def _own(classes: Mapping[str, RequestClass], key: ApiKey) -> RequestClass:
    return classes[key.classes[0] if key.classes else DEFAULT]


def _may_use(key: ApiKey, name: str) -> bool:
    return not key.classes or name in key.classes


def _named(classes: Mapping[str, RequestClass], key: ApiKey, name: str) -> RequestClass:
    if name not in classes:
        known = ", ".join(classes)
        raise InvalidRequest(
            f"{PARAM}: the class {_shown(name)} does not exist; available classes: {known}", param=PARAM
        )
    if not _may_use(key, name) and not classes[name].is_built_in:  # every key may use the lowest priority
        allowed = ", ".join(key.classes)
        raise Forbidden(f"key {key.name!r} may not use class {name!r}; allowed classes: {allowed}", param=PARAM)
    return classes[name]


def _shown(name: str) -> str:
    return quoted(name, MAX_SHOWN)
