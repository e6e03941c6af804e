"""`diptych tune`: the settings that meet latency goals best on a fixed number of workers.

options -> schedule (deadline of each part) -> service (real workers: measured latencies, fitted step times) -> search
(simulations of other settings) -> service again (the best two) -> report (table, limits, configuration file)
"""
