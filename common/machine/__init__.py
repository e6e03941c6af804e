"""What a process asks of its machine: cores, memory, descriptors, child processes."""
