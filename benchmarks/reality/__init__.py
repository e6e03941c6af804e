"""Real clusters beside the simulator: both get the same requests, and their latencies are compared.

loads -> cluster (real), twin (simulated) -> numbers -> table and JSON (`__main__.py`)
"""
