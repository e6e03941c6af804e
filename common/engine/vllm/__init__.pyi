from common.engine.vllm.environment import prepare_environment

__all__ = ["prepare_environment"]
