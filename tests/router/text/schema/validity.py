"""Whether a document matches a schema, as the library jsonschema has it, with decimal numbers."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

DIGITS = 1_000
"""Of a number over a `multipleOf`, within which the remainder can be found."""


class Validity:
    """Judges documents by one schema. Numbers are decimal: 0.3 is a multiple of 0.1."""

    def __init__(self, schema: Any) -> None:
        """Raises ValueError for what is no schema."""
        from jsonschema import Draft202012Validator  # seconds to import: its formats compile grammars of addresses
        from jsonschema.validators import extend, validator_for

        decimal = json.loads(json.dumps(schema), parse_float=Decimal)
        cls = validator_for(decimal, default=Draft202012Validator)
        try:
            cls.check_schema(schema)
        except Exception as error:  # of a pattern or a reference, too
            raise ValueError(f"is no JSON schema: {str(error)[:200]}") from error
        checker = cls.TYPE_CHECKER.redefine("integer", lambda _, value: _is_integer(value))
        self._validator = extend(cls, type_checker=checker)(decimal)

    def problem(self, text: bytes) -> str:
        """Why a document does not match, or "". Raises LookupError where that cannot be found out."""
        try:
            document = json.loads(text, parse_float=_decimal)
        except ValueError as error:
            return f"is no JSON: {error}"
        try:
            with localcontext(prec=DIGITS):
                found = next(self._validator.iter_errors(document), None)
        except Exception as error:  # patterns that Python cannot read, references to elsewhere, endless recursion
            raise LookupError(str(error)[:200]) from error
        return "" if found is None else f"{found.json_path}: {found.message[:200]}"


def _decimal(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        return float(text)


def _is_integer(value: object) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite() and value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)
