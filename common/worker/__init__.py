"""What prefill and decode workers share: process, engine loop, control channel, probes and metrics."""
