"""Memory of GPUs that processes of one host share: the driver's calls, descriptors that are given, maps."""
