"""KV blocks from one worker to another: both ends, and the frames between them."""
