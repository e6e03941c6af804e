"""`make gpu`: everything that a bare GPU node can tell about Diptych, in one run, a verdict for each."""

PARTS = ("chip", "agreement", "graphs", "landing", "checks", "kernels", "engine", "serving", "transfer", "families")
"""In the order in which they are run."""
