"""An engine of vLLM that answers lines of JSON, for `served.py`: it runs in vLLM's environment.

A line has `prompts` and `max_tokens`; the reply has the answers' tokens, the seconds of the call, and the steps.
"""

import json
import os
import sys
import time

import psutil

COUNTER = "vllm:spec_decode_num_accepted_tokens"


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints there
    from vllm import LLM, SamplingParams

    engine = LLM(**json.loads(sys.argv[1]), disable_log_stats=False)

    def processor_seconds() -> float:
        own = psutil.Process()
        return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))

    def num_accepted() -> int:
        return sum(metric.value for metric in engine.get_metrics() if metric.name == COUNTER)

    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        sampling = SamplingParams(max_tokens=asked["max_tokens"], temperature=0.0, ignore_eos=True)
        accepted, processor, start = num_accepted(), processor_seconds(), time.perf_counter()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        seconds, processor = time.perf_counter() - start, processor_seconds() - processor
        tokens = [token for one in found for token in one.outputs[0].token_ids]
        counts = {"num_tokens": len(tokens), "num_steps": len(tokens) - (num_accepted() - accepted)}
        reply = {"token_ids": tokens, "seconds": seconds, "processor_seconds": processor, **counts}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
