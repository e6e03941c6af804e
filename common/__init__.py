"""What at least two Diptych processes import: configuration, errors, messages, transport, blocks and the model."""

__version__ = "0.1.0"
