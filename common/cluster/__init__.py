"""The part of the Kubernetes API that Diptych uses."""
