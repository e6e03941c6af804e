"""Code shared by several Diptych processes: configuration, errors, messages, transport, blocks and the model."""

__version__ = "0.1.0"
