"""How long steps and KV transfers take: models that workers fit to their own, and that routers predict with. Pure."""
