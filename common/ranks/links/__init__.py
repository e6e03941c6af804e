"""How the ranks of a worker reach each other: messages, connections between hosts, and who may open one."""
