"""`diptych top`: the load of a router in the terminal."""
