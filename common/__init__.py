"""Code shared by several Diptych processes: configuration, errors, messages, transport, blocks and the model."""

from common.version import version_of

__version__ = version_of()
