from router.policy.balance import Running, choose_move, why_leave
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
    token_s_at,
    wait_s,
)
from router.policy.output_lengths import UNKNOWN_LENGTH, OutputLengths
from router.policy.patience import Patience
from router.policy.plain import PlainPolicy
from router.policy.plugins import POLICIES, GuardedPolicy, load_policy
from router.policy.policy import Choice, Policy, possible_choices, predict
from router.policy.request_shape import NO_HITS, Fetch, RequestShape
from router.policy.roles import (
    CHANGE_AFTER_S,
    CHANGE_INTERVAL_S,
    RoleChange,
    RoleLimits,
    RolePolicy,
    SplitForecast,
    SplitForecaster,
)
from router.policy.routing import RoutingPolicy
from router.policy.shortlist import FEW, Shortlist
from router.policy.token_counters import TokenCounters

__all__ = [
    "CHANGE_AFTER_S",
    "CHANGE_INTERVAL_S",
    "Choice",
    "FEW",
    "Fetch",
    "Forecast",
    "GuardedPolicy",
    "NO_HITS",
    "OutputLengths",
    "POLICIES",
    "Patience",
    "PlainPolicy",
    "Policy",
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
    "load_policy",
    "model_of",
    "place_s",
    "places_of",
    "possible_choices",
    "predict",
    "queued_s",
    "rows_of",
    "step_tokens",
    "terms_of",
    "token_s_at",
    "wait_s",
    "why_leave",
]
