from common.engine.vllm.duty import vllm_offer
from common.engine.vllm.environment import prepare_environment

__all__ = ["prepare_environment", "vllm_offer"]
