"""The endpoints, in the shapes of OpenAI's and Anthropic's APIs."""

from router.api.adapters import adapter_routes
from router.api.generate import generate_routes
from router.api.info import model_routes, probe_routes, token_routes
from router.api.inner import ABLE, inner_app
from router.api.openapi import install_openapi

__all__ = [
    "ABLE",
    "adapter_routes",
    "generate_routes",
    "inner_app",
    "install_openapi",
    "model_routes",
    "probe_routes",
    "token_routes",
]
