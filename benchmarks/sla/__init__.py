"""`make sla`: how well goals are met, and at what cost, in tables and plots."""
