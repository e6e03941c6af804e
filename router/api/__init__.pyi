from router.api.adapters import LoadAdapterRequest, UnloadAdapterRequest, adapter_routes
from router.api.info import model_routes, probe_routes, token_routes
from router.api.internal import AVAILABLE, internal_app
from router.api.load import record_loads
from router.api.openapi import install_openapi
from router.api.serving import UpdateWeightsRequest, serving_routes

__all__ = [
    "record_loads",
    "AVAILABLE",
    "LoadAdapterRequest",
    "UnloadAdapterRequest",
    "UpdateWeightsRequest",
    "adapter_routes",
    "internal_app",
    "install_openapi",
    "model_routes",
    "probe_routes",
    "serving_routes",
    "token_routes",
]
