from router.siblings.part import NOT_OWNED, OWNER, AgreedFile, RouterPart
from router.siblings.siblings import Siblings
from router.siblings.usage import KeyUsage, SharedUsage, UsedUp

__all__ = [
    "AgreedFile",
    "KeyUsage",
    "NOT_OWNED",
    "OWNER",
    "RouterPart",
    "SharedUsage",
    "Siblings",
    "UsedUp",
]
