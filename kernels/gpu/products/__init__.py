"""Products of rows with weights that are not one dense matrix: of experts, of adapters, quantised ones."""
