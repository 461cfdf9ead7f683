"""Greedy answers of OpenVINO GenAI with a drafter, one prompt at a time; run by the Python of OpenVINO's environment.

    python openvino_answers.py REQUEST ANSWERS

REQUEST is a JSON object with the folders `target` and `draft`, `num_draft_tokens`, `max_new_tokens`, `stop_ids` and
`prompts` as token ids. ANSWERS gets `answers`, as token ids, `steps`, a number for each, and the `version`. GenAI sees
from the files of a drafter whether it is an EAGLE-3 or a draft model.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
"""Converted files ask for a KV cache of 16 bits, whatever the weights are."""
PREFILLS = 1
"""Passes of the target over a prompt, which are no steps."""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts."""
    # 1. Load the models. Without the cache of prefixes each answer has a whole prefill.
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False  # GB
    draft = openvino_genai.draft_model(request["draft"], "CPU", **FLOAT32)
    options = {**FLOAT32, "draft_model": draft, "scheduler_config": scheduler}
    pipeline = openvino_genai.LLMPipeline(request["target"], "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.apply_chat_template = False, False
    config.max_new_tokens, config.num_assistant_tokens = request["max_new_tokens"], request["num_draft_tokens"]
    config.stop_token_ids = set(request["stop_ids"])

    # 2. Answer. GenAI's count of accepted tokens is too low, so passes of the target are counted.
    answers, steps = [], []
    for prompt in request["prompts"]:
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        reply = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
        answers.append([int(token) for token in reply.tokens[0]])
        steps.append(len(reply.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations) - PREFILLS)
    return {"answers": answers, "steps": steps, "version": openvino_genai.__version__}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
