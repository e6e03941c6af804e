"""What programs of several kernels do with a tile in registers: rounding, products, gates."""
