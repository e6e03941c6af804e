"""The load generator: `diptych bench`, its workloads, its client, its figures."""
