"""One machine: `diptych serve`, its processes and their supervisor; `diptych size`."""
