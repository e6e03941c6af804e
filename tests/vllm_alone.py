"""vLLM without Diptych: `python vllm_alone.py MODEL IN OUT DTYPE ARGUMENTS` computes the prompts of IN, and writes OUT.

IN is a JSON list of batches, which are lists of prompts, which are lists of token IDs. OUT has the greedy tokens of
each prompt. ARGUMENTS is a JSON object for `vllm.LLM`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NUM_TOKENS = 24


def main() -> None:
    model, given, found, dtype, arguments = sys.argv[1:]
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, seed=0, enforce_eager=True, skip_tokenizer_init=True, **json.loads(arguments))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    batches = [[{"prompt_token_ids": prompt} for prompt in batch] for batch in json.loads(Path(given).read_text())]
    answers = [answer for batch in batches for answer in llm.generate(batch, params, use_tqdm=False)]
    Path(found).write_text(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
