from common.engine.sequences.engine import NO_PARTS, EngineParts, RequestEngine
from common.engine.sequences.hidden_states import NO_SLOTS, HiddenStateSlots, RowSlots, hidden_state_slots
from common.engine.sequences.pending_grammars import Fail, PendingGrammars
from common.engine.sequences.prompt_ordering import PromptOrder, prompt_order
from common.engine.sequences.reports import MAX_ALTERNATIVES, Reports
from common.engine.sequences.scheduler import Scheduler
from common.engine.sequences.sequence import RequestRules, WorkerSequence
from common.engine.sequences.step_budget import Knob, TokenGoal, batch_cap, late_step, local_chunk, prefill_step

__all__ = [
    "PendingGrammars",
    "EngineParts",
    "Fail",
    "HiddenStateSlots",
    "Knob",
    "MAX_ALTERNATIVES",
    "NO_PARTS",
    "NO_SLOTS",
    "PromptOrder",
    "Reports",
    "RequestEngine",
    "RequestRules",
    "RowSlots",
    "Scheduler",
    "TokenGoal",
    "WorkerSequence",
    "batch_cap",
    "hidden_state_slots",
    "local_chunk",
    "late_step",
    "prefill_step",
    "prompt_order",
]
