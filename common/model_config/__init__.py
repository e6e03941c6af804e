"""Parts of a model's architecture, as config.json describes them. No torch."""
