"""Decisions of the router, pure: workers, clients and `now` in, a decision out. `router.dispatch` carries them out.

routing            which workers serve a request
shortlist          out of many workers, those that are weighed
forecast, arrival  the times of a request at a place, now and when its KV arrives
output_lengths     how much a request will generate
patience           how long a request may wait
token_counters     whose turn it is
balance            which answer moves
roles, split       which worker changes its role
"""

from router.policy.arrival import token_s_at
from router.policy.balance import Running, choose_move, why_leave
from router.policy.fetch import Fetch
from router.policy.forecast import (
    STRANGE,
    Forecast,
    model_of,
    place_s,
    places_of,
    queued_s,
    rows_of,
    step_tokens,
    terms_of,
    wait_s,
)
from router.policy.output_lengths import UNKNOWN_LENGTH, OutputLengths
from router.policy.patience import Patience
from router.policy.request_shape import NO_HITS, RequestShape
from router.policy.roles import CHANGE_AFTER_S, CHANGE_INTERVAL_S, RoleChange, RoleLimits, RolePolicy
from router.policy.routing import Choice, RoutingPolicy
from router.policy.shortlist import FEW, Shortlist
from router.policy.split import SplitForecast, SplitForecaster
from router.policy.token_counters import TokenCounters

__all__ = [
    "CHANGE_AFTER_S",
    "CHANGE_INTERVAL_S",
    "Choice",
    "FEW",
    "Fetch",
    "Forecast",
    "NO_HITS",
    "OutputLengths",
    "Patience",
    "RequestShape",
    "RoleChange",
    "RoleLimits",
    "RolePolicy",
    "RoutingPolicy",
    "Running",
    "STRANGE",
    "Shortlist",
    "SplitForecast",
    "SplitForecaster",
    "TokenCounters",
    "UNKNOWN_LENGTH",
    "choose_move",
    "model_of",
    "place_s",
    "places_of",
    "queued_s",
    "rows_of",
    "step_tokens",
    "terms_of",
    "token_s_at",
    "wait_s",
    "why_leave",
]
