"""How much the HTTP front door costs: a real router between stand-ins for workers and a lean load."""
