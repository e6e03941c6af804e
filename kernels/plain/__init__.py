"""Plain torch for every device, and slow references for tests."""
