"""JSON schemas, rewritten so that llguidance enforces all that they say, or refused with the place that it cannot."""

from router.text.schema.canonical_form import Document, canonical
from router.text.schema.keywords import TYPES, Unenforceable
from router.text.schema.regexes import ANY, names_lexeme, searched
from router.text.schema.shapes import ArrayShape, Case, ObjectShape, Schemas, Shapes, UnlistedMembers

__all__ = [
    "ANY",
    "ArrayShape",
    "Case",
    "Document",
    "ObjectShape",
    "Schemas",
    "Shapes",
    "TYPES",
    "Unenforceable",
    "UnlistedMembers",
    "canonical",
    "names_lexeme",
    "searched",
]
