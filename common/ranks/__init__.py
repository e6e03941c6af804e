"""A tensor parallel worker: one process for each rank, all of which run the same steps on their shard of a model."""
