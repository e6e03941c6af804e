from router.text.schema.canonical_form import Document, canonical
from router.text.schema.control_characters import has_controls, with_exact_sets, without_open_objects
from router.text.schema.keywords import TYPES, Unenforceable
from router.text.schema.patterns import ANY, names_lexeme, portable, searched
from router.text.schema.rewrite import enforceable
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
    "enforceable",
    "has_controls",
    "names_lexeme",
    "portable",
    "searched",
    "with_exact_sets",
    "without_open_objects",
]
