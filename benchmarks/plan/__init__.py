"""`diptych plan`: which pools and flags meet the goals for a load at the least cost, by simulation.

spec -> candidate (pools and flags) -> outlook (formulas: what cannot hold, what to try first) -> trials (simulations)
-> search -> reach (what can be met when the goals cannot) -> report, values, plot
"""
