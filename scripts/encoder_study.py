"""Study of a real encoder as predictor of answer lengths, beside the light predictor.

    python scripts/encoder_study.py --data ../shared/data/chat/alpaca_eval_outputs.jsonl.gz --lessons 64

S3 (arXiv 2306.06000) fine-tunes DistilBERT on lengths of answers. Without --encoder, an encoder of
DistilBERT's size is made here: random weights, and a WordPiece tokenizer of the data's prompts. So
it lacks what pre-training gives. Each predictor learns the same lessons, and predicts the answers'
lengths of held-out prompts. Then the held-out requests are scheduled without decoding. The report
has the accuracy, the seconds of learning, and the mean rows of a step.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from bench_scheduling import counting, measure, print_table, scores
from scheduling_policies import HELD_OUT, Known, Workload, longest_answer_first, make_workload, read_records
from tokenizers import BertWordPieceTokenizer
from transformers import BertTokenizerFast, DistilBertConfig, DistilBertForSequenceClassification

from outrider.data.files import write_json
from outrider.distill.regenerate.engine import Request
from outrider.distill.regenerate.lengths.buckets import NUM_BUCKETS, Experience, LengthPredictor, Lesson
from outrider.distill.regenerate.lengths.policies import POLICIES
from outrider.distill.regenerate.lengths.predictors import ClassifierPredictor, make_predictor
from outrider.distill.regenerate.lengths.schedule import Policy, Rectangle
from outrider.distill.regenerate.lengths.stopwatch import Stopwatch
from outrider.eval.measure.environment import describe_environment
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

READ_TOKENS = 128
"""Tokens of a prompt that the encoder reads; few prompts are longer."""

VOCABULARY = 30522
"""Rows of DistilBERT's embeddings. The data's tokenizer uses the first ones."""


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name_or_path=args.target, dtype="float32"), torch.device("cpu"))
    args.seen = args.lessons
    records = read_records(args, target)
    # With fewer requests than lessons, no predictor learns again while requests are scheduled.
    num_held_out = min(sum(number >= HELD_OUT for number in records), args.lessons - 1)
    work = make_workload(records, args, scale=1, count=num_held_out, max_new_tokens=args.max_new_tokens)
    with tempfile.TemporaryDirectory() as made:
        if args.encoder is None:
            texts = [str(target.tokenizer.decode(ids)) for ids, _, _ in records.values()]
            make_encoder(texts, Path(made), num_layers=args.layers, hidden_size=args.hidden_size)
        encoder = make_predictor(str(args.encoder or made), target)
        assert isinstance(encoder, ClassifierPredictor)
        predictors = {"none": make_predictor("none", target), "light": make_predictor("light", target), "encoder": encoder}
        rows = [{"predictor": name, **compare(predictor, work, args)} for name, predictor in predictors.items()]
    report = {
        "rows": rows,
        "oracle_mean_rows": oracle_rows(work, args.budget_tokens),
        "encoder_parameters": encoder._model.num_parameters(),
        "num_lessons": len(work.seen),
        "num_held_out": len(work.requests),
        "mean_answer_tokens": statistics.mean(work.lengths),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        | {"data": args.data.name},
        "environment": asdict(describe_environment(target.device)),
    }
    write_json(args.output, report)
    shown = ("predictor", "bucket_accuracy", "mean_bucket_distance", "nats", "learning_seconds", "predicting_seconds")
    print_table("held-out prompts", (*shown, "shortest_mean_rows", "s3_mean_rows"), rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="alpaca_eval_outputs.jsonl.gz")
    parser.add_argument("--lessons", type=int, default=64, help="answers that each predictor learns")
    parser.add_argument("--encoder", type=Path, help="directory of an encoder; without it one is made of random weights")
    parser.add_argument("--layers", type=int, default=6, help="layers of the encoder that is made")
    parser.add_argument("--hidden-size", type=int, default=768, help="hidden size of the encoder that is made")
    parser.add_argument("--target", default="models/demo_target", help="directory or Hub id; only its tokenizer is used")
    parser.add_argument("--model", default="vicuna-7b-v1.3", help="model whose answers give the lengths")
    parser.add_argument("--known-model", default="OpenHermes-2.5-Mistral-7B", help="another model; its answers aren't used")
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--budget-tokens", type=int, default=16384, help="KV-memory budget in tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/encoder_study.json"))
    return parser.parse_args()


def make_encoder(texts: list[str], folder: Path, *, num_layers: int, hidden_size: int) -> None:
    """Write an encoder of random weights, with a tokenizer of these texts' word pieces."""
    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator(texts, vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    pieces.save_model(str(folder))
    tokenizer = BertTokenizerFast.from_pretrained(folder, model_max_length=READ_TOKENS)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        n_layers=num_layers,
        dim=hidden_size,
        hidden_dim=4 * hidden_size,
        n_heads=hidden_size // 64,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=NUM_BUCKETS,
    )
    DistilBertForSequenceClassification(config).save_pretrained(folder)


def compare(predictor: LengthPredictor, work: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Teach a predictor the lessons, and measure it on the held-out requests."""
    # 1. Learn and predict.
    lessons = [Lesson(request=prompt_only(seen.request), num_tokens=seen.num_tokens) for seen in work.seen]
    requests = [prompt_only(request) for request in work.requests]
    experience = Experience(lambda: predictor, lessons)
    learning, predicting = Stopwatch(), Stopwatch()
    started = time.process_time()
    with learning:
        learned, buckets = experience.recall()
    learning_cpu_seconds = time.process_time() - started
    assert buckets is not None, "--lessons is at least LEARN_FIRST"
    with predicting:
        probs = learned.predict(requests).double()
    # 2. Schedule the requests, without decoding.
    scheduled: dict[str, Any] = {}
    for name, schedule in POLICIES.items():
        reservation = schedule.reserve(experience, requests, max_new_tokens=work.max_new_tokens, learning=Stopwatch())
        policy = schedule.policy(reservation, args.budget_tokens)
        counted, _ = measure(work, policy, counting(work.lengths), args.budget_tokens)
        for key in ("mean_rows", "num_steps", "num_evictions", "num_moved_tokens"):
            scheduled[f"{name}_{key}"] = getattr(counted, key)
    return {
        **scores(probs, buckets.index(work.lengths)),
        "learning_seconds": learning.seconds,
        "learning_cpu_seconds": learning_cpu_seconds,
        "predicting_seconds": predicting.seconds,
        **scheduled,
    }


def prompt_only(request: Request) -> Request:
    """Return the request without the length of another model's answer."""
    return replace(request, num_known_tokens=None)


def oracle_rows(work: Workload, budget: int) -> float:
    """Return the mean rows of S3's schedule with known lengths."""
    policy = Policy(reservation=Known(work.lengths), order=longest_answer_first, memory=Rectangle(), may_overtake=True)
    return measure(work, policy, counting(work.lengths), budget)[0].mean_rows


if __name__ == "__main__":
    main()
