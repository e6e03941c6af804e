"""Files and batches: what clients upload, and how its lines are answered without them."""
