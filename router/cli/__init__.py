"""Commands of `diptych`."""
