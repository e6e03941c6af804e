"""`diptych serve`: a router and its workers on one machine, and their supervisor."""
