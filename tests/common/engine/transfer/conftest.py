"""A KV receiver or sender, and the other side's socket."""

from .receiver_rig import make_rig, peer, rig  # noqa: F401
from .sender_rig import make_sender_rig  # noqa: F401
