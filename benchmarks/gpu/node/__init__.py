"""`make gpu`: everything that a bare GPU node can tell about Diptych, in one run, a verdict for each."""

PARTS = (
    "chip", "agreement", "graphs", "invariance", "landing", "checks", "kernels", "boxes", "launches", "engine",
    "serving", "transfer", "ipc", "families", "ranks",
)  # fmt: skip
"""In the order in which they are run."""
