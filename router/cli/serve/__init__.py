"""`diptych serve`: a router and its workers on one machine, supervised; `diptych size`."""
