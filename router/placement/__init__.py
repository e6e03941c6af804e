"""Where a request runs: candidates, bookings, moves after a death, hand-overs between decode workers."""
