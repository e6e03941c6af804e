"""The `diptych` commands."""
