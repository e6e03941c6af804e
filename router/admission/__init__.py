"""Which requests may come in, which wait, for whom and in which order. Pure: states and `now` in, decisions out."""
