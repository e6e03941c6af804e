"""How many workers a load needs: waiting times of queues, times of steps, splits between roles. Pure."""
