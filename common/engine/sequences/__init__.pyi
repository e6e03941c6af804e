from common.engine.sequences.awaited_grammars import AwaitedGrammars, Fail
from common.engine.sequences.engine import NO_PARTS, EngineParts, RequestEngine
from common.engine.sequences.hidden_states import NO_PLACES, HiddenPlaces, RowPlaces, hidden_places
from common.engine.sequences.prompt_ordering import PromptOrder, prompt_order
from common.engine.sequences.reports import Reports
from common.engine.sequences.scheduler import Scheduler
from common.engine.sequences.sequence import RequestRules, WorkerSequence
from common.engine.sequences.step_budget import Knob, TokenGoal, batch_cap, local_chunk, prefill_step

__all__ = [
    "AwaitedGrammars",
    "EngineParts",
    "Fail",
    "HiddenPlaces",
    "Knob",
    "NO_PARTS",
    "NO_PLACES",
    "PromptOrder",
    "Reports",
    "RequestEngine",
    "RequestRules",
    "RowPlaces",
    "Scheduler",
    "TokenGoal",
    "WorkerSequence",
    "batch_cap",
    "hidden_places",
    "local_chunk",
    "prefill_step",
    "prompt_order",
]
