"""`outrider check-server`: whether a running server is lossless, accepts what it should, and is faster."""

from contextlib import ExitStack
from dataclasses import asdict, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, NonNegativeFloat
from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS, NonNegativeInt, PositiveInt, SmallCount, different
from ..data.servers import server_address
from ..eval.config import EvalConfig
from .errors import starts_again
from .options import BY_MACHINE, TargetOptions, require_used, with_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..eval.server.check import ServerCheck
    from ..eval.server.client import Server
    from ..eval.server.questions import Question
    from ..eval.server.readings import Reader
    from ..models.llm.hf_target import HFTarget

USED = frozenset({"suites", "settings", "max_new_tokens", "repeats", "seed"})
"""Options of the section `eval` that this check depends on."""


@dataclass(kw_only=True, config=OPTIONS)
class CheckServerOptions(TargetOptions):
    """Options of `outrider check-server`."""

    url: str
    """Address of the server: http://HOST:8000 of vLLM, SGLang or llama.cpp. A key is read from
    OPENAI_API_KEY."""
    without: str | None = None
    """Address of a server of the same target without a drafter: the speedup is over it, and it is the
    reference, unless `drafter` is given. null: the target here is the reference."""
    model: str | None = None
    """The model's name on the servers; null: the target's, or the only one."""
    drafter: str | None = None
    """The drafter that the server uses, to compare what is accepted; eval.settings has its form
    there, such as {depth: 4, top_k: 1, tree_nodes: 4} for a chain of four."""
    limit: PositiveInt | None = 16
    """Draw at most this many prompts of each suite. null: all."""
    concurrency: Annotated[list[SmallCount], AfterValidator(different)] = field(default_factory=lambda: [1, 4, 16])
    """Measure the speed with so many requests at a time. Empty: that of the greedy answers, one by one, without a
    speedup."""
    samples: NonNegativeInt = 256
    """Texts of four tokens sampled at temperature 1, with greedy ones between them; 0 leaves both checks out."""
    tolerance: NonNegativeFloat = 0.25
    """Nats by which a greedy token may be below the reference's best: a near tie of bfloat16. Where
    both sides compute in float32, 0.01 is enough."""
    execute: bool = False
    """Run the programs of human_eval's answers on this machine, to score them."""
    output: Path = Path("check-server.json")
    """File of all figures."""
    eval: EvalConfig

    POSITIONAL: ClassVar = ("url",)
    DEFAULTS: ClassVar = {"target": BY_MACHINE, "eval": {"suites": ["mt_bench"], "max_new_tokens": 64, "repeats": 2}}
    USUAL: ClassVar = (
        "target.name_or_path",
        "target.dtype",
        "eval.suites",
        "eval.settings",
        "eval.max_new_tokens",
        "eval.repeats",
    )

    def __post_init__(self) -> None:
        require_used(self.eval, USED, "check-server")
        if self.without is not None and server_address(self.without) == server_address(self.url):
            raise ValueError(f"without is {self.without}, the server itself; give that of a server without a drafter")
        if self.drafter is None and self.eval.settings != [{}]:
            raise ValueError("eval.settings is the form of a drafter's drafts, and drafter is not given; give both, or neither")
        if len(self.eval.settings) != 1:
            raise ValueError(f"eval.settings has {len(self.eval.settings)} entries; give one, the form of the server's drafts")
        if self.without is not None and not self.concurrency:
            raise ValueError(
                "concurrency is empty, and both servers must answer in turns for a speedup; give 1, or leave without out"
            )
        if 0 < self.samples < 64:
            raise ValueError(f"samples is {self.samples}; a test needs 64 texts at least, or 0 for none")


def check_server_command(options: CheckServerOptions) -> None:
    """Check a running server: its text against the target's, its drafts against outrider's, its speed.

    Greedy tokens are compared one by one; samples are tested against the target's probabilities. Exits with
    status 1 if the server isn't lossless, or accepts less than outrider does.
    """
    import torch
    from rich.console import Console

    from ..data.files import guarded, write_json
    from ..eval.certify.certificate import certificate_table
    from ..eval.measure.environment import describe_environment
    from ..eval.server.check import drafts_table, speed_table
    from ..models.llm.loading import default_device

    with guarded(options.output), starts_again("check"):
        _require_writable(options.output)
        device = torch.device(options.target.device or default_device())
        check = _check(options)
        environment = asdict(describe_environment(device))  # of this command: the server has its own
        facts = {"url": options.url, "without": options.without, "environment": environment}
        write_json(options.output, {**facts, **check.as_json()})
    console = Console()
    console.print(check.verdict, style="bold green" if check.passed else "bold red", soft_wrap=True, highlight=False)
    console.print(certificate_table(check.lines))
    if check.speeds:
        console.print(speed_table(check.speeds))
    if check.drafts:
        console.print(drafts_table(check.drafts))
    for note in check.notes:
        console.print(note, soft_wrap=True, highlight=False)
    console.print(f"All figures: {options.output}", soft_wrap=True, highlight=False)
    if not check.passed:
        raise SystemExit(1)


def _require_writable(file: Path) -> None:
    """Raise ValueError if a file can't be written, before long work. Nothing is left, also no folder."""
    try:
        with TemporaryFile(dir=next(folder for folder in file.parents if folder.exists())):
            pass
        if file.is_dir():
            raise IsADirectoryError("it is a folder")
    except OSError as error:
        raise ValueError(f"output is {file}, which can't be written ({error}); choose another output") from error


def _check(options: CheckServerOptions) -> "ServerCheck":
    from ..data.chat import use_chat_template
    from ..eval.measure.methods import load_drafters, method_specs, methods_by_place
    from ..eval.server.client import Server
    from ..eval.server.readings import Reader, ServerThere, TargetHere
    from ..models.drafters.saved.parts import parse_drafter_name
    from ..models.llm.loading import ends_without_weights, load_tokenizer

    # 1. The tokenizer, the prompts, the drafter and the servers: what is wrong with them is said before the weights are read.
    tokenizer = load_tokenizer(options.target)
    use_chat_template(tokenizer, options.chat_template, options.template_options)
    stop_ids, vocab_size = ends_without_weights(options.target)
    config = with_limit(options.eval, options.limit)
    questions = _questions(config, tokenizer)
    specs = {} if options.drafter is None else method_specs(config, [parse_drafter_name(options.drafter)])
    with ExitStack() as stack:
        sides = []
        for url in (options.url, *([] if options.without is None else [options.without])):
            name = options.target.name_or_path
            sides.append(Server(url, tokenizer, vocab_size, stop_ids, target_name=name, model=options.model))
            stack.callback(sides[-1].close)
        target = method = None
        if options.without is None or specs:
            target = options.load()
            questions = [q for q in questions if len(q.ids) + config.max_new_tokens <= target.context_length]
        if not questions:
            raise ValueError(f"no prompt leaves room for {config.max_new_tokens} tokens; lower eval.max_new_tokens")
        if target is not None and specs:
            ((_, method),) = methods_by_place(config, specs, load_drafters(specs, target), target).values()
        reader = Reader(ServerThere(server=sides[1], stop_ids=stop_ids) if target is None else TargetHere(target=target))
        return _checked(options, config, questions, sides, reader, target, method, tokenizer)


def _checked(
    options: CheckServerOptions,
    config: EvalConfig,
    questions: "list[Question]",
    sides: "list[Server]",
    reader: "Reader",
    target: "HFTarget | None",
    method: Any,
    tokenizer: "PreTrainedTokenizerBase",
) -> "ServerCheck":
    """Run all checks. `sides` are the server, and the one without a drafter."""
    from tqdm import tqdm

    from ..eval.server import check as checks
    from ..eval.server.questions import ask

    # 1. Count the work, for one bar over the whole.
    found, server = checks.ServerCheck(), sides[0]
    by_length = sorted(questions, key=lambda question: len(question.ids))
    shortest = by_length[: checks.NUM_SAMPLED_PROMPTS]
    # Greedy answers stand between samples: an engine may confuse the temperatures of requests that it answers together.
    sampled = [shortest[index % len(shortest)] for index in range(options.samples)]
    beside = [by_length[index % len(by_length)] for index in range(checks.SAMPLED_AT_ONCE)] if sampled else []
    mixed = [(question, 1.0) for question in sampled]
    for index, question in enumerate(beside):
        mixed.insert(index * (1 + len(sampled) // len(beside)), (question, 0.0))
    # As many questions as requests at a time, at least: with fewer, fewer would be under way.
    many = {level: list(questions) * -(-level // len(questions)) for level in options.concurrency}
    num_speed = config.repeats * sum(map(len, many.values()))
    num_greedy = len(questions) * (2 + (options.without is not None) + (method is not None))
    total = num_greedy + num_speed * (len(sides) + 1) + 2 * len(mixed)
    with tqdm(total=total, desc="check-server", unit="answer") as bar:
        # 2. Greedy answers one by one, with the server's counts of drafts.
        replies, drafts = checks.ask_one_by_one(server, questions, config.max_new_tokens, bar.update)
        found.lines.append(checks.check_tokens(reader, questions, replies, "", options.tolerance, bar.update))
        answers = [replies]
        if options.without is not None:
            answers.append(ask(sides[1], questions, concurrency=1, max_new_tokens=config.max_new_tokens, told=bar.update)[0])
        if any(reply.is_retokenized for reply in replies):
            found.notes.append(
                f"{server.url} gives text, not token ids: it was tokenized again, which can differ from its tokens."
            )
        if drafts is None and method is not None:
            found.lines.append(checks.no_drafts(len(questions)))
        elif drafts is None:
            found.notes.append(f"{server.url} counts no drafts, so these were not compared.")
        elif method is None:
            found.drafts = {"server": checks.by_category(questions, drafts)}
        else:
            assert target is not None
            num_depths = max(len(count.by_depth) for count in drafts)
            here = checks.drafts_here(target, method, questions, config.max_new_tokens, num_depths, bar.update)
            found.drafts = {"server": checks.by_category(questions, drafts), "here": checks.by_category(questions, here)}
            found.lines.append(checks.check_drafts(drafts, here, seed=config.seed))
        found.lines += checks.check_quality(questions, answers, tokenizer, may_run=options.execute, seed=config.seed)

        # 3. The speed, in turns, whose answers are checked too: a server's batches are computed in another order.
        if not many:
            found.speeds.append(
                checks.speed_of([[answers[0]]], [sum(reply.seconds for reply in answers[0])], 1, seed=config.seed)
            )
        for level in options.concurrency:
            speed, replies = checks.measure_speed(
                sides, many[level], level, max_new_tokens=config.max_new_tokens, repeats=config.repeats, seed=config.seed,
                told=bar.update,
            )  # fmt: skip
            found.speeds.append(speed)
            where = f", {level} at a time"
            found.lines.append(
                checks.check_tokens(reader, many[level] * config.repeats, replies, where, options.tolerance, bar.update)
            )

        # 4. Samples.
        if sampled:
            options_of_samples: dict[str, Any] = {
                "concurrency": checks.SAMPLED_AT_ONCE,
                "max_new_tokens": checks.SAMPLED_TOKENS,
            }
            asked, temperatures = zip(*mixed, strict=True)
            replies, _ = ask(server, asked, temperatures=temperatures, told=bar.update, **options_of_samples)
            greedy, drawn = ([one for one, at in zip(replies, temperatures, strict=True) if at == kind] for kind in (0.0, 1.0))
            found.lines.append(checks.check_samples(reader, sampled, drawn, bar.update))
            line = checks.check_tokens(reader, beside, greedy, checks.BESIDE_SAMPLES, options.tolerance, bar.update)
            found.lines.append(line)
        return found


def _questions(config: EvalConfig, tokenizer: "PreTrainedTokenizerBase") -> "list[Question]":
    from ..eval.measure.plan import first_turn_ids
    from ..eval.run import load_suites
    from ..eval.server.questions import Question

    return [
        Question(suite=suite.name, prompt=prompt, ids=first_turn_ids(prompt, tokenizer)[0].tolist())
        for suite in load_suites(config)
        for prompt in suite.prompts
    ]
