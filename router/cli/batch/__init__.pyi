"""`diptych batch`: sends every request of a file."""

from router.cli.batch.client_flags import DEFAULT_URL, add_api_key

__all__ = [
    "DEFAULT_URL",
    "add_api_key",
]
