from router.policy.balance import Running, choose_move, overload_reason
from router.policy.decision import WeighedWorker, reason, shortened, weighed
from router.policy.forecast import (
    UNTRIED_PREFILL_SLOWDOWN,
    Forecast,
    forecast_inputs,
    model_of,
    place_s,
    places_of,
    queued_s,
    rows_of,
    step_tokens,
    token_s_at,
    wait_s,
)
from router.policy.output_lengths import UNKNOWN_LENGTH, OutputLengths
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
from router.policy.shortlist import SHORTLIST_ABOVE, Shortlist
from router.policy.token_counters import TokenCounters
from router.policy.wait_limit import WaitLimit

__all__ = [
    "CHANGE_AFTER_S",
    "CHANGE_INTERVAL_S",
    "Choice",
    "SHORTLIST_ABOVE",
    "Fetch",
    "Forecast",
    "GuardedPolicy",
    "NO_HITS",
    "OutputLengths",
    "POLICIES",
    "WaitLimit",
    "WeighedWorker",
    "reason",
    "shortened",
    "weighed",
    "PlainPolicy",
    "Policy",
    "RequestShape",
    "RoleChange",
    "RoleLimits",
    "RolePolicy",
    "RoutingPolicy",
    "Running",
    "UNTRIED_PREFILL_SLOWDOWN",
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
    "forecast_inputs",
    "token_s_at",
    "wait_s",
    "overload_reason",
]
