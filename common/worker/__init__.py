"""What the processes of both workers share: start and end, engine loop, control channel, probes and metrics."""
