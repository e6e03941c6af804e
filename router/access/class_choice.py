"""Which class a request is of: by a field of its body or the header `X-Request-Class`, by `service_tier`, by its key.

The field and the header count the same, and then OpenAI's `service_tier`, where a class stands for its value. A request
that names none is of its key's own class: the first of `classes` in the key file, or `default`.
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
"""Characters of a wrong name that an error shows."""
TIERS: Mapping[str, tuple[str, ...]] = {"flex": BATCH_CLASSES, "priority": ("priority", "interactive")}
"""Classes that stand for a service tier: the first that exists. Other tiers ask for the key's own class."""


def class_of(
    classes: Mapping[str, RequestClass],
    key: ApiKey,
    header: str = "",
    field: str | None = None,
    tier: str | None = None,
) -> RequestClass:
    """The class of a request. Raises InvalidRequest for an unknown name, Forbidden for one that the key may not use."""
    if header and field and header != field:
        raise InvalidRequest(
            f"{PARAM}: is {_shown(field)}, but the header {HEADER} says {_shown(header)}",
            param=PARAM,
        )
    if name := field or header:
        return _named(classes, key, name)
    return next(_stands_for(classes, key, tier), _own(classes, key))


def batch_class_of(classes: Mapping[str, RequestClass], key: ApiKey) -> RequestClass:
    """The class of a batch's line that names none: also a built-in one, whose priority is the lowest."""
    built_in = (one for one in classes.values() if one.is_built_in)
    return next(built_in, None) or next(_stands_for(classes, key, "flex"), _own(classes, key))


def caller_of(classes: Mapping[str, RequestClass], key: ApiKey, header: str = "") -> Caller:
    """The caller of a request whose body, which may name any class, is not read yet. Raises like `class_of`."""
    if header:
        return Caller(key.name, (_named(classes, key, header),))
    own = _own(classes, key)
    others = (one for name, one in classes.items() if one is not own and _may_use(key, name) and not one.is_built_in)
    return Caller(key.name, (own, *others))


def _stands_for(classes: Mapping[str, RequestClass], key: ApiKey, tier: str | None) -> Iterator[RequestClass]:
    """The classes that stand for a service tier, of those that are named for this router and allowed to the key."""
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
        raise InvalidRequest(f"{PARAM}: there is no class {_shown(name)} here, only {known}", param=PARAM)
    if not _may_use(key, name) and not classes[name].is_built_in:  # the lowest priority is no privilege
        allowed = ", ".join(key.classes)
        raise Forbidden(f"key {key.name!r} may not use class {name!r}, only {allowed}", param=PARAM)
    return classes[name]


def _shown(name: str) -> str:
    return quoted(name, MAX_SHOWN)
