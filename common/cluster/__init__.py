"""The Kubernetes API, as far as Diptych speaks it."""
