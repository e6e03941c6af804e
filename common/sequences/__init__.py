"""Requests on a worker: the parts of sequence, scheduler and engine that prefill and decode workers share."""
