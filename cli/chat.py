"""`outrider chat`: talk with a target and a drafter in the terminal."""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from rich.console import Console
from rich.text import Text

from ..data.conversations import Turn
from ..data.fields import OPTIONS, PositiveInt, Seed
from .errors import printable, starts_again
from .options import BY_MACHINE, TargetOptions

if TYPE_CHECKING:
    from .chat_answers import Answer, ChatModel

COMMANDS = {
    "/compare": "decode the last answer once more without the drafter, and compare",
    "/new": "forget the history",
    "/help": "list the commands",
    "/exit": "end the chat (Ctrl-D, too); Ctrl-C ends an answer, whose text so far stays in the history",
}
COMMAND = re.compile(rf"/[^/*\s]*$|({'|'.join(COMMANDS)})\s")
"""A command, right or wrong. A question may begin with a path or a comment of a program."""
COLOURS, SEVERAL = (32, 36, 35, 34, 31), 33
"""A terminal's codes for a drafter's sources (further ones begin again), and for tokens that several sources proposed."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters of an answer that would change a terminal."""


@dataclass(kw_only=True, config=OPTIONS)
class ChatOptions(TargetOptions):
    """Options of `outrider chat`."""

    drafter: str | None = None
    """The drafter: its directory, user/name[@revision] on the Hub, prompt_lookup, suffix, recycling,
    draft_model:MODEL, or several joined by +. null: plain decoding."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Run-time options of the drafter, such as {tree_nodes: 20}."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy decoding; above 0 tokens are sampled from the target's distribution."""
    max_new_tokens: PositiveInt = 512
    """Tokens per answer, at most."""
    system: str | None = None
    """A system prompt. null: the chat template's own, if it has one."""
    compare: bool = False
    """Decode each answer once more without the drafter, and compare."""
    seed: Seed = 0
    """Seed of sampled answers."""

    DEFAULTS: ClassVar = {"target": BY_MACHINE}
    USUAL: ClassVar = ("target.name_or_path", "target.dtype", "target.device")

    def __post_init__(self) -> None:
        if self.drafter is None and (self.compare or self.settings):
            name = "compare" if self.compare else "settings"
            raise ValueError(f"{name} needs a drafter; give one (--drafter suffix+recycling), or leave {name} out")
        if self.target.stage_layers is not None:
            raise ValueError("target.stage_layers is set, and a chat is one process; leave it out")

    @property
    def opening(self) -> list[Turn]:
        """The turns that stand before the first question."""
        return [] if self.system is None else [Turn(role="system", content=self.system)]


def chat_command(options: ChatOptions) -> None:
    """Talk with a target and a drafter in the terminal.

    Answers are shown as they are decoded. Draft tokens that the target accepted have the colour of
    their source. A line after each answer has its speed. Type /help for the commands. In a pipe each
    line is a question: answers go to stdout, all else to stderr.
    """
    # torch and the modules that use it load too slowly for --help
    from ..data.chat import encode_prompt, use_chat_template
    from ..models.drafters.saved.folder import read_drafter_config, require_fitting_target
    from ..models.drafters.saved.parts import parse_drafter_name
    from ..models.llm.loading import identify_without_weights, load_tokenizer
    from .chat_answers import ChatModel

    # 1. Check the drafter's options and the chat template, before the weights are loaded.
    parts = None if options.drafter is None else parse_drafter_name(options.drafter)
    if parts is not None:
        parts.configs(options.settings)
    tokenizer = load_tokenizer(options.target)
    for folder in parts.folders if parts is not None else ():
        identity = identify_without_weights(options.target, tokenizer)
        require_fitting_target(folder, read_drafter_config(folder).target, identity)
    use_chat_template(tokenizer, options.chat_template, options.template_options)
    greeting = [*options.opening, Turn(role="user", content="Hello")]
    encode_prompt(greeting, tokenizer)

    # 2. Load the pair, and talk.
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with starts_again("conversation"):
        target = options.load()
        limits = {"max_new_tokens": options.max_new_tokens, "seed": options.seed}
        model = ChatModel.load(target, parts, options.settings, temperature=options.temperature, **limits)
        model.warm_up(greeting)
        Chat(model, options).run()


class Chat:
    """A conversation in a terminal or a pipe."""

    def __init__(self, model: "ChatModel", options: ChatOptions) -> None:
        self.model, self.options = model, options
        self.turns = options.opening
        self.last: Answer | None = None
        self.is_interactive, self.is_terminal = sys.stdin.isatty(), sys.stdout.isatty()
        console = Console(file=sys.stdout)
        self.has_colours = console.is_terminal and not console.is_dumb_terminal and not console.no_color

    def run(self) -> None:
        """Answer questions until they end. Without a person who types them, an error ends the chat with status 1."""
        self.show_legend()
        for line in self.lines():
            if line == "/exit":
                return
            try:
                self.obey(line)
            except ValueError as error:
                note(f"error: {printable(str(error))}", "bold red")
                if not self.is_interactive:
                    raise SystemExit(1) from None

    def lines(self) -> Iterator[str]:
        """Yield the lines that were typed, without empty ones."""
        has_prompt = self.is_interactive and self.is_terminal
        if has_prompt:
            with suppress(ImportError):  # Windows has no such module
                import readline  # noqa: F401 - `input` then edits lines, and recalls earlier ones
        while True:
            try:
                line = input("> ") if has_prompt else next(sys.stdin)
            except (EOFError, StopIteration):
                print(end="\n" if has_prompt else "")
                return
            if line.strip():
                yield line.strip()

    def obey(self, line: str) -> None:
        """Carry out a command, or answer a question."""
        if line == "/new":
            self.turns, self.last = self.options.opening, None
            note("the history is forgotten")
        elif line == "/help":
            note("\n".join(f"{name:9} {text}" for name, text in COMMANDS.items()))
        elif line == "/compare":
            if self.last is None or self.options.drafter is None:
                raise ValueError("/compare needs an answer that a drafter has helped with; ask something first, with --drafter")
            note(self.model.compare(self.last, stops=self.is_interactive))
        elif COMMAND.match(line):
            raise ValueError(f"there is no command {line}; the commands are {', '.join(COMMANDS)}, each alone in its line")
        else:
            self.ask(line)

    def ask(self, question: str) -> None:
        """Answer a question. The history keeps both, the answer as far as it was decoded."""
        turns = [*self.turns, Turn(role="user", content=question)]
        answer, text = self.model.answer(turns, self.write, stops=self.is_interactive)
        print(flush=True)
        self.turns, self.last = [*turns, Turn(role="assistant", content=text)], answer
        line = self.model.statistics(answer)
        if self.options.compare and not answer.is_stopped:
            line += f"; {self.model.compare(answer, stops=self.is_interactive)}"
        note(line)

    def write(self, piece: str, source: int) -> None:
        """Show a piece of an answer, at once."""
        if self.is_terminal:
            piece = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", piece)
        sys.stdout.write(self.coloured(piece, source))
        sys.stdout.flush()

    def coloured(self, text: str, source: int) -> str:
        """Return a text in the colour of its source; the target's own text is plain."""
        if not self.has_colours or not source:
            return text
        is_one = source & (source - 1) == 0
        colour = COLOURS[(source.bit_length() - 1) % len(COLOURS)] if is_one else SEVERAL
        return f"\x1b[{colour}m{text}\x1b[39m"

    def show_legend(self) -> None:
        """Name the colour of each source."""
        sources = [1 << bit for bit in range(len(self.model.sources))]
        names = [self.coloured(self.model.name_of(source), source) for source in sources]
        names += [self.coloured("several of them", sum(sources))] if len(sources) > 1 else []
        if names and self.has_colours:
            print(f"Draft tokens: {', '.join(names)}. Plain: the target's own.")
        if self.is_interactive:
            note("/help lists the commands")


def note(text: str, style: str = "dim") -> None:
    """Print a line about the chat, beside the answers' own text."""
    sys.stdout.flush()
    Console(stderr=True, highlight=False).print(Text(text, style=style), soft_wrap=True)
