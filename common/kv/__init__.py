"""KV blocks of one worker: who owns which, how they are hashed, and the memory that they lie in."""
