"""Script of the processes that transformers' own pipeline parallelism needs; an error ends them.

python launched_pp_size.py TARGET PROMPTS NUM_TOKENS OUTPUT

It writes the answers' tokens, and the seconds of decoding, to OUTPUT.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig


def main(target: str, prompts: list[list[int]], num_tokens: int, output: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    sharding = DistributedConfig(pp_size=size)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, distributed_config=sharding)
    model.generation_config.eos_token_id = None
    answers, start = [], time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": num_tokens, "do_sample": False}
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answers.append(text[0, len(prompt) :].tolist())
    if torch.distributed.get_rank() == 0:
        output.write_text(json.dumps({"answers": answers, "seconds": time.perf_counter() - start}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
