"""Training of the demo's target: a small Llama on the source of Python's standard library.

    python scripts/train_demo_target.py --output models/demo_target --work-dir outputs/demo_target

The run is seeded, and after an interruption the same command resumes from the last checkpoint. The
learning rate is constant, and then falls linearly to zero over the last part (warmup-stable-decay).
So a run may be resumed with another --steps. The last part reads the library without its tests,
which are two thirds of the text and repetitive. That part also has an unlikelihood loss against
loops. The script uses a GPU if there is one. At the end it measures the model on held-out files,
and writes the figures beside the weights.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.config import Split
from outrider.data.stdlib import Cuts, code_conversations, read_source, stdlib_files

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}<|user|>{{ message.content }}"
    "{%- elif message.role == 'assistant' -%}<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{%- else -%}{{ raise_exception('this template has no ' + message.role + ' role') }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
DECAY_SHARE, WARMUP_STEPS, CLIP_NORM = 0.3, 60, 1.0
LOOP_WEIGHT, LOOP_NGRAM, LOOP_PROMPT_TOKENS, LOOP_NEW_TOKENS = 12.0, 4, 48, 112


@dataclass(kw_only=True)
class Settings:
    """The options of a run: see `main`."""

    output: Path
    work_dir: Path
    steps: int
    batch_size: int
    seq_len: int
    learning_rate: float
    vocab_size: int
    seed: int
    eval_every: int
    average_with: Path | None
    average_share: float
    compile: bool


def main(
    output: Annotated[Path, typer.Option(help="Folder of the finished model.")] = Path("models/demo_target"),
    work_dir: Annotated[Path, typer.Option(help="Tokenizer, checkpoints, log.")] = Path("outputs/demo_target"),
    steps: int = 2400,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 16,
    seq_len: int = 512,
    learning_rate: float = 4e-3,
    vocab_size: int = 4096,
    seed: int = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between checkpoints with a held-out loss.")] = 100,
    average_with: Annotated[Path | None, typer.Option(help="Earlier checkpoint.pt to average the weights with.")] = None,
    average_share: Annotated[float, typer.Option(help="Weight of that checkpoint.")] = 0.35,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the forward: half a minute, then faster.")] = False,
) -> None:
    """Train the demo's target."""
    args = Settings(**locals())
    torch.manual_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = load_or_train_tokenizer(args.work_dir / "tokenizer", args.vocab_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LlamaForCausalLM(model_config(tokenizer)).to(device)
    print(f"{model.num_parameters():,} parameters on {device}, {torch.get_num_threads()} threads")
    seconds = train(model, tokenizer, args, device)
    if args.average_with:
        average(model, args.average_with, args.average_share)
    report = {
        "parameters": model.num_parameters(),
        "train_tokens": args.steps * args.batch_size * args.seq_len,
        "steps": args.steps,
        "seed": args.seed,
        "train_seconds": round(seconds),
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, {device}",
        "python": platform.python_version(),
        **heldout_loss(model, tokenizer, args.seq_len, device),
        **greedy_quality(model.float(), tokenizer, device),
    }
    save(model, tokenizer, args.output, report)
    print(json.dumps(report, indent=2))


def load_or_train_tokenizer(directory: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Load or train a byte-level BPE tokenizer, on the target's training files only."""
    if not (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, USER, ASSISTANT, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        texts = (text for path in stdlib_files("target_train") if (text := read_source(path)) is not None)
        tokenizer.train_from_iterator(texts, trainer)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
        )
        fast.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT]})
        fast.chat_template = CHAT_TEMPLATE
        fast.model_max_length = model_config(fast).max_position_embeddings
        fast.save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, split: Split, seed: int, with_tests: bool = True) -> torch.Tensor:
    """Render all conversations of a split and pack them end to end in random order."""
    conversations = list(code_conversations(split, Cuts(seed=seed)))
    if not with_tests:
        conversations = [conversation for conversation in conversations if "test" not in conversation.id.split("/")]
    Random(seed).shuffle(conversations)
    texts = [
        f"{USER}{user.content}{ASSISTANT}{answer.content}{END}"
        for user, answer in (conversation.turns for conversation in conversations)
    ]
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([token for encoding in encodings for token in encoding.ids], dtype=torch.int32)


def batches(tokenizer: PreTrainedTokenizerFast, args: Settings, first_step: int) -> Iterator[torch.Tensor]:
    """Yield batches [batch, seq + 1] from `first_step` to the last step.

    Every epoch cuts and shuffles the files again.
    """
    tokens_per_step, step, epoch = args.batch_size * args.seq_len, 0, 0
    while step < args.steps:
        decaying = step >= decay_start(args.steps)
        stream = token_stream(tokenizer, "target_train", args.seed + epoch, with_tests=not decaying)
        phase_end = args.steps if decaying else decay_start(args.steps)
        steps_in_epoch = min((len(stream) - 1) // tokens_per_step, phase_end - step)
        for index in range(max(first_step - step, 0), steps_in_epoch):
            start = index * tokens_per_step + torch.arange(args.batch_size)[:, None] * args.seq_len
            yield stream[start + torch.arange(args.seq_len + 1)].long()
        step, epoch = step + steps_in_epoch, epoch + 1


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: Settings, device: torch.device) -> float:
    """Train `model` in place, from the last checkpoint if there is one.

    Returns the seconds of all runs together.
    """
    # Muon is for the matrices between hidden layers; embeddings and norms keep AdamW.
    matrices = [p for name, p in model.model.layers.named_parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=args.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    checkpoint = args.work_dir / "checkpoint.pt"
    step, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seconds = state["step"], state["seconds"]
        print(f"resumed at step {step}")
    forward = torch.compile(model.forward) if args.compile else model.forward
    progress = tqdm(total=args.steps, initial=step, unit="step", mininterval=10)
    started = time.perf_counter()
    for batch in batches(tokenizer, args, step):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * schedule(step, args.steps)
        loss = token_loss(forward, batch.to(device))
        objective = loss
        if step >= decay_start(args.steps):
            objective = loss + LOOP_WEIGHT * loop_loss(model, batch.to(device))
        if not math.isfinite(loss.item()):
            sys.exit(f"the loss is {loss.item()} at step {step}; the last good checkpoint is {checkpoint}")
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        progress.update()
        progress.set_postfix(loss=f"{loss.item():.3f}")
        if step % args.eval_every == 0 or step == args.steps:
            total = seconds + time.perf_counter() - started
            measured = heldout_loss(model, tokenizer, args.seq_len, device, max_batches=8)
            with (args.work_dir / "log.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": loss.item(), "seconds": total, **measured}) + "\n")
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "seconds": total,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    return seconds + time.perf_counter() - started


def average(model: LlamaForCausalLM, checkpoint: Path, share: float) -> None:
    """Average the weights with an earlier checkpoint's.

    The mean of two similar checkpoints predicts better than either.
    """
    earlier = torch.load(checkpoint, map_location=model.device, weights_only=True)["model"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.lerp_(earlier[name], share)


def decay_start(steps: int) -> int:
    """Return the first step of the decay phase.

    In this phase the learning rate falls, the data has no test files, and a loss penalises loops.
    """
    return round(steps * (1 - DECAY_SHARE))


def schedule(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: warm-up, constant, then linear decay.

    The decay takes the last DECAY_SHARE of the steps.
    """
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / max(1.0, DECAY_SHARE * steps))


def token_loss(forward, batch: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy per token of `batch` [batch, seq + 1], in nats."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def loop_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Compute the sequence-level unlikelihood loss (arXiv 1908.04319, section 5.2).

    The model greedily continues the beginnings of the batch's texts. The loss lowers the
    probability of tokens that complete a 4-gram which the text already has.
    """
    prompts = batch[:, :LOOP_PROMPT_TOKENS]
    texts = greedy(model, prompts, LOOP_NEW_TOKENS)
    grams = ngram_keys(texts, LOOP_NGRAM, model.config.vocab_size)
    again = (grams[:, :, None] == grams[:, None]).tril(-1).any(-1)  # [batch, gram]
    again[:, : LOOP_PROMPT_TOKENS - LOOP_NGRAM + 1] = False
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=texts[:, :-1], use_cache=False).logits[:, LOOP_NGRAM - 2 :]
    last_tokens = texts[:, LOOP_NGRAM - 1 :, None]  # of each gram
    probs = logits.float().softmax(-1).gather(2, last_tokens)[..., 0]
    return -(torch.log1p(-probs.clamp(max=1 - 1e-5)) * again).sum() / max(1, int(again.sum()))


def ngram_keys(texts: torch.Tensor, size: int, vocab_size: int) -> torch.Tensor:
    """Map each run of `size` tokens to a number [batch, seq - size + 1], equal for equal runs."""
    keys = torch.zeros_like(texts[:, size - 1 :])
    for offset in range(size):
        keys = keys * vocab_size + texts[:, offset : texts.shape[1] - size + 1 + offset]
    return keys


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Continue prompts with `new_tokens` greedy tokens; no text ends early."""
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )


@torch.no_grad()
def heldout_loss(model, tokenizer, seq_len: int, device: torch.device, max_batches: int | None = None) -> dict[str, float]:
    """Measure nats per token on files that neither training nor any later stage uses."""
    stream = token_stream(tokenizer, "target_heldout", seed=0).long()
    rows = stream[: (len(stream) - 1) // seq_len * seq_len].view(-1, seq_len)[:, : seq_len - 1]
    pairs = torch.cat([rows, stream[seq_len - 1 : len(rows) * seq_len : seq_len, None]], dim=1)
    losses = [token_loss(model, chunk.to(device)).item() for chunk in pairs.split(8)[:max_batches]]
    return {"heldout_loss": sum(losses) / len(losses), "heldout_tokens": len(losses) * 8 * (seq_len - 1)}


@torch.no_grad()
def greedy_quality(model, tokenizer, device: torch.device, num_prompts: int = 50, new_tokens: int = 128) -> dict[str, float]:
    """Measure the mean share of distinct 4-grams in greedy texts; loops score near zero."""
    conversations = list(code_conversations("target_heldout", Cuts(seed=1)))
    shares = []
    for conversation in Random(0).sample(conversations, num_prompts):
        prompt = tokenizer(f"{USER}{conversation.turns[0].content}{ASSISTANT}", return_tensors="pt", add_special_tokens=False)
        prompt = prompt.input_ids.to(device)
        output = greedy(model, prompt, new_tokens)
        tokens = output[0, prompt.shape[1] :].tolist()
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        shares.append(len(set(grams)) / len(grams))
    return {"distinct_4gram_share": sum(shares) / len(shares), "distinct_4gram_min": min(shares)}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path, report: dict[str, object]) -> None:
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
