from router.api.adapters import LoadAdapterRequest, UnloadAdapterRequest, adapter_routes
from router.api.info import model_routes, probe_routes, token_routes
from router.api.inner import ABLE, inner_app
from router.api.openapi import install_openapi

__all__ = [
    "ABLE",
    "LoadAdapterRequest",
    "UnloadAdapterRequest",
    "adapter_routes",
    "inner_app",
    "install_openapi",
    "model_routes",
    "probe_routes",
    "token_routes",
]
