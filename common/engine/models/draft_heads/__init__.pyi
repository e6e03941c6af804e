from common.engine.models.draft_heads.drafting_model import DraftingModel
from common.engine.models.draft_heads.eagle3_head import Eagle3Tensors
from common.engine.models.draft_heads.head_files import MTP
from common.engine.models.draft_heads.load import load_drafting_model

__all__ = [
    "DraftingModel",
    "Eagle3Tensors",
    "MTP",
    "load_drafting_model",
]
