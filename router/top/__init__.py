"""`diptych top`: what a router says of its load, in a terminal."""
