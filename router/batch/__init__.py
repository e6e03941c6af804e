"""`diptych batch`: many requests from a file, their answers into another."""
