"""Part of the decode benchmark: a grown target, with real drafters and their real acceptance.

The target is built on the device, with the bytes of a large model and the text of a small one (see
`scripts/grow_target.py`). So tokens per second are real for a target of this size, and tokens per
step are the drafter's. Hidden size and vocabulary are the small model's: a drafter of a real large
model costs more, and a head of its vocabulary too.

Each form (eager, compiled, CUDA graphs) decodes all prompts with all methods, in turns. Rounds that
compile and record aren't counted. Seconds are those of decoding, without the prefill.

- `ceiling` is tau / (1 + rho): the speedup if verifying a tree took the time of a plain step. rho is
  the drafter's time per step over a plain step.
- `bandwidth_share` is the time that reading the target's weights once takes at the measured
  bandwidth, divided by the time of a step.

All ratios are over the fastest plain decoding of all forms.
"""

import argparse
import dataclasses
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from random_target import memory_bandwidth, open_device
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.data.chat import encode_prompt
from outrider.data.files import write_json
from outrider.data.manifest import TargetIdentity
from outrider.data.suites import load_suite
from outrider.data.types import Turn
from outrider.eval.measure.environment import describe_environment
from outrider.eval.measure.methods import proposer
from outrider.eval.measure.roofline import weight_bytes
from outrider.eval.measure.timing import Generation, time_generation
from outrider.eval.results.stats import ceiling
from outrider.models.decoding import GreedyAcceptance
from outrider.models.drafters import NullDrafter, load_drafter
from outrider.models.target.config import TargetConfig
from outrider.models.target.hf_target import HFTarget
from outrider.models.target.loading import load_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the scripts that are for every machine

from drafter_settings import DrafterSetting, parse_drafters
from grow_target import Size, Source, copy_drafter, grown_config, grown_tensor, parse_parameters

PLAIN = "plain"
GOAL = 0.75
"""Least share of the ceiling, and of the bandwidth."""
MAX_WARM_UPS = 4
"""Rounds that aren't timed, at most: code is compiled again when shapes turn out to vary."""
Row = dict[str, Any]


def run(args: argparse.Namespace, forms: Mapping[str, Mapping[str, bool]]) -> None:
    """Measure every form, and write and print the report."""
    # 1. Check the input, then build the target on the device.
    started = time.perf_counter()
    source, drafters = Source.of(args.target), parse_drafters(args.grown)
    size = source.choose_size(parse_parameters(args.parameters))
    device = open_device(args.device, cudnn_attention=args.cudnn_attention)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    model = grown_model(source, size, dtype, device)
    report: dict[str, Any] = {
        "target": {"source": source.folder.resolve().name, **dataclasses.asdict(size)},
        "dtype": str(dtype).removeprefix("torch."),
        "drafters": [drafter.described for drafter in drafters],
        "new_tokens": args.new_tokens,
        "prompts": args.prompts,
        "target_bytes": weight_bytes(model),
        "memory_bytes_per_second": memory_bandwidth(device),
        "rows": [],
        "skipped": [],
        "failed": [],
        "environment": dataclasses.asdict(describe_environment(device)),
    }
    # 2. Form after form, the compiled ones last. The report is written after each.
    names = [name for name in args.forms if device.type == "cuda" or not forms[name].get("cuda_graphs")]
    for name in sorted(names, key=lambda name: "compiled" in name):
        if time.perf_counter() - started > args.budget_seconds:
            report["skipped"].append(name)
            continue
        try:
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # a form called compiled must be
                report["rows"] += measure(target_of(model, source, forms[name]), drafters, source, args, name)
        except (RuntimeError, ValueError) as error:  # out of memory, an operator that can't be captured
            report["failed"].append({"form": name, "error": str(error)[:500]})
        # One form's graphs and compiled code at a time: a target and its recordings refer to each other.
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        add_shares(report)
        report["seconds"] = time.perf_counter() - started
        write_json(args.output, report)
    write_json(args.output, report)
    print_report(report)
    print(f"Written to {args.output}")


@torch.no_grad()
def grown_model(source: Source, size: Size, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build a grown target on the device, without any file."""
    # 1. The modules, without weights.
    config = AutoConfig.for_model(**grown_config(source.config, size, str(dtype).removeprefix("torch.")))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    model.tie_weights()
    # 2. The weights. The rotary embeddings have buffers only, which to_empty leaves uninitialised.
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in tqdm(list(model.named_parameters()), desc="grow", unit="tensor"):
        parameter.copy_(grown_tensor(name, source.read, source.size, size, dtype, generator))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def target_of(model: PreTrainedModel, source: Source, form: Mapping[str, bool]) -> HFTarget:
    """Return the target in one form, with the original's tokenizer."""
    identity = TargetIdentity(
        name=f"grown {source.folder.resolve().name}",
        revision=None,
        weights_sha256="",
        config_sha256="",
        quantization="",
        tokenizer_sha256="",
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
    )
    return HFTarget(model, load_tokenizer(TargetConfig(name_or_path=str(source.folder))), identity, **form)


def measure(
    target: HFTarget, settings: Sequence[DrafterSetting], source: Source, args: argparse.Namespace, form: str
) -> Iterator[Row]:
    """Yield a row for each method in one form."""
    # 1. The methods. EAGLE's layer has the original's sizes, so its configuration must name them.
    methods: dict[str, Any] = {PLAIN: NullDrafter()}
    for setting in settings:
        with tempfile.TemporaryDirectory() as folder:
            copy_drafter(setting.folder, Path(folder), source.config)
            methods[setting.name] = proposer(load_drafter(Path(folder), target, **setting.setting), target)
    prompts = [prompt[0].to(target.device) for prompt in fitting_prompts(target, args.prompts, args.new_tokens)]
    # 2. Rounds until nothing is compiled any more, one that is timed, and one with phase timers.
    for _ in range(MAX_WARM_UPS):
        before = compilations()
        decode_all(target, methods, prompts, args.new_tokens)
        if compilations() == before:
            break
    before = compilations()
    measured = decode_all(target, methods, prompts, args.new_tokens)
    num_compilations = compilations() - before
    phased = decode_all(target, methods, prompts, args.new_tokens, timed=True)
    # 3. The rows.
    for name, generations in measured.items():
        tokens = [generation.answer(0).token_ids for generation in generations]
        num_steps, seconds = count_steps(generations), sum(generation.decode_seconds for generation in generations)
        num_tokens = sum(len(answer) - 1 for answer in tokens)  # the prefill's token has no step
        yield {
            "form": form,
            "method": name,
            "tokens_per_step": num_tokens / num_steps,
            "tokens_per_second": num_tokens / seconds,
            "milliseconds_per_step": 1e3 * seconds / num_steps,
            "phase_milliseconds": [
                1e3 * sum(getattr(generation.phase_seconds, phase) for generation in phased[name]) / count_steps(phased[name])
                for phase in ("draft", "verify", "accept")
            ],
            "num_identical": sum(
                answer == plain.answer(0).token_ids for answer, plain in zip(tokens, measured[PLAIN], strict=True)
            ),
            "num_prompts": len(prompts),
            "compilations": num_compilations,
        }


def fitting_prompts(target: HFTarget, num_prompts: int, new_tokens: int) -> list[torch.Tensor]:
    """Return prompts of the suite stdlib that leave room for the answer. Raises ValueError."""
    texts = [prompt.turns[0] for prompt in load_suite("stdlib", limit=2 * num_prompts).prompts]
    encoded = (encode_prompt([Turn(role="user", content=text)], target.tokenizer) for text in texts)
    prompts = [prompt for prompt in encoded if prompt.shape[1] + new_tokens <= target.context_length]
    if len(prompts) < num_prompts:
        raise ValueError(
            f"only {len(prompts)} prompts of stdlib leave room for {new_tokens} new tokens, and --prompts is {num_prompts}; "
            "give fewer prompts or tokens"
        )
    return prompts[:num_prompts]


def count_steps(generations: Sequence[Generation]) -> int:
    return sum(len(generation.steps) - 1 for generation in generations)


def decode_all(
    target: HFTarget, methods: Mapping[str, Any], prompts: Sequence[torch.Tensor], new_tokens: int, *, timed: bool = False
) -> dict[str, list[Generation]]:
    """Decode all prompts greedily with all methods, in turns.

    Nothing stops an answer, so all have as many tokens.
    """
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "stop_ids": (), "seeds": [0], "timed": timed}
    generations: dict[str, list[Generation]] = {name: [] for name in methods}
    for index, prompt in enumerate(prompts):
        names, first = list(methods), index % len(methods)
        for name in (*names[first:], *names[:first]):
            generation = time_generation(target, methods[name], GreedyAcceptance(), [prompt], **options)
            generations[name].append(generation)
    return generations


def compilations() -> int:
    """Return the number of graphs that torch.compile has built so far in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def add_shares(report: dict[str, Any]) -> None:
    """Add to all rows what depends on the fastest plain decoding."""
    plain = [row for row in report["rows"] if row["method"] == PLAIN]
    if not plain:
        return
    step = min(row["milliseconds_per_step"] for row in plain)
    least = 1e3 * report["target_bytes"] / report["memory_bytes_per_second"]
    for row in report["rows"]:
        draft = 0.0 if row["method"] == PLAIN else row["phase_milliseconds"][0]
        row["speedup"] = row["tokens_per_second"] * step / 1e3
        row["ceiling"] = ceiling(row["tokens_per_step"], draft / step)
        row["ceiling_share"] = row["speedup"] / row["ceiling"]
        row["bandwidth_share"] = least / row["milliseconds_per_step"]


def print_report(report: Mapping[str, Any]) -> None:
    """Print the table, and whether the best rows reach the goals."""
    target = report["target"]
    print(
        f"{target['parameters']:,} parameters in {report['dtype']}, {report['target_bytes'] / 1e9:.2f} GB to read for a step, "
        f"at {report['memory_bytes_per_second'] / 1e9:.0f} GB/s. It costs what a large model costs, and says what "
        f"{target['source']} says."
    )
    print("| form | method | tokens/step | tokens/s | ms/step | speedup | ceiling | of ceiling | of bandwidth | identical |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in report["rows"]:
        ceilings = f"{row['ceiling']:.2f}x | {row['ceiling_share']:.0%}"
        print(
            f"| {row['form']} | {row['method']} | {row['tokens_per_step']:.2f} | {row['tokens_per_second']:.1f} "
            f"| {row['milliseconds_per_step']:.2f} | {row['speedup']:.2f}x | {ceilings} "
            f"| {row['bandwidth_share']:.0%} | {row['num_identical']} of {row['num_prompts']} |"
        )
        if row["compilations"]:
            print(f"  {row['compilations']} graphs were compiled while this form was timed: its times are too long")
    for goal in goals(report["rows"]):
        print(goal)
    for failure in itertools.chain(report["failed"], report["skipped"]):
        print(f"failed or skipped: {failure}")


def goals(rows: Sequence[Row]) -> list[str]:
    """State for the fastest drafter and the fastest plain decoding whether the goals are reached."""
    lines = []
    for key, is_plain in (("ceiling_share", False), ("bandwidth_share", True)):
        candidates = [row for row in rows if (row["method"] == PLAIN) == is_plain]
        if candidates:
            best = max(candidates, key=lambda row: row["tokens_per_second"])
            verdict = "reached" if best[key] >= GOAL else "NOT reached"
            name = key.replace("_", " ").replace("share", "share of the fastest")
            lines.append(f"Goal, {name} row at least {GOAL}: {verdict}, {best[key]:.2f} by {best['method']}, {best['form']}")
    return lines
