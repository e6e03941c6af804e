"""`make gpu`: everything that a bare GPU node can tell about Diptych, in one run, a verdict for each."""

FIRST = {
    "chip": 30, "agreement": 60, "engine": 120, "kernels": 90, "quantised": 45, "moe": 45, "mla": 45, "graphs": 60,
}  # fmt: skip
SECOND = {
    "transfer": 40, "ipc": 20, "serving": 110, "landing": 40, "invariance": 60, "families": 90, "boxes": 40,
    "launches": 40, "ranks": 60,
}  # fmt: skip
PARTS = FIRST | SECOND
"""Deadlines of the parts, in seconds. Parts run in this order, the most useful first. Each half fits into a command of
ten minutes."""
MORE_PARTS = {"tiles": 240}
"""Parts that run only if they are named."""
