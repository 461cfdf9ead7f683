"""`outrider chat`: the text, its colours, and what it does in a pipe, at Ctrl-C and with long histories."""

import contextlib
import io
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from outrider.cli import chat_answers
from outrider.cli.errors import StartsAgain
from outrider.cli.main import run_command
from outrider.data.chat import encode_prompt
from outrider.data.conversations import Turn
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.decoding.types import Step
from outrider.models.drafters import NullDrafter
from outrider.models.llm.hf_target import HFTarget

from ..commands import invoke
from ..doc_files import write_drafter_config

Talk = Callable[..., tuple[int, str, str]]


class Terminal(io.StringIO):
    """A terminal; `at_write` is called at each write."""

    at_write: Callable[[str], None] = staticmethod(lambda text: None)  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.at_write(text)
        return super().write(text)


@pytest.fixture
def talk(tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Return a function that chats; it returns the exit status, stdout and stderr."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for variable in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)

    def run(
        lines: Sequence[str], *options: str, terminal: bool = False, at_write: Callable[[str], None] | None = None
    ) -> tuple[int, str, str]:
        output = Terminal() if terminal else io.StringIO()
        if isinstance(output, Terminal) and at_write:
            output.at_write = at_write  # type: ignore[method-assign]
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("sys.stdin", Terminal(text) if terminal else io.StringIO(text))
        code, errors = 0, io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            try:
                run_command(["chat", "--target", str(tiny_target_dir), "--max-new-tokens", "24", *options])
            except SystemExit as end:
                code = int(end.code or 0)
        return code, output.getvalue(), errors.getvalue()

    return run


def plain_answer(target: HFTarget, turns: list[Turn]) -> str:
    prompt = encode_prompt(turns, target.tokenizer)
    steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=24, stop_ids=target.stop_ids)
    tokens = [token for step in steps for token in step.tokens[0]]
    return str(target.tokenizer.decode(tokens, skip_special_tokens=True))


def test_a_pipe_gets_exactly_the_texts_of_generate(talk: Talk, tiny_target: HFTarget) -> None:
    """The second answer reads the history; after /new the first question has its first answer again."""
    first = plain_answer(tiny_target, [Turn(role="user", content="Hi")])
    history = [Turn(role="user", content="Hi"), Turn(role="assistant", content=first), Turn(role="user", content="Why?")]
    second = plain_answer(tiny_target, history)
    code, output, errors = talk(["Hi", "", "Why?", "/new", "Hi"], "--drafter", "suffix+recycling")
    assert (code, output) == (0, f"{first}\n{second}\n{first}\n")
    assert errors.count("tokens, ") == 3
    assert "\x1b" not in errors


@pytest.mark.parametrize("colours", [True, False])
def test_drafts_have_colours_and_split_characters_are_whole(talk, tiny_target, monkeypatch, colours):
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    ids = tiny_target.tokenizer("a é🙂\x1b[2J", add_special_tokens=False).input_ids
    assert len(ids) >= 8

    def steps(*_: Any, **options: Any) -> Iterator[Step]:
        shared: dict[str, Any] = {"rows": (0,), "finishes": (None,), "num_nodes": 9}
        yield Step(tokens=(tuple(ids[:1]),), num_accepted=(0,), is_prefill=True, **shared)
        new, origins = tuple(ids[1:]), (1, 2, *[3] * (len(ids) - 4))
        yield Step(tokens=(new,), num_accepted=(len(new) - 1,), is_prefill=False, origins=(origins,), **shared)

    monkeypatch.setattr(chat_answers, "generate", steps)
    _, output, errors = talk(["Hi"], "--drafter", "suffix+recycling", terminal=True)
    if colours:
        assert "\x1b[32msuffix\x1b[39m, \x1b[36mrecycling\x1b[39m, \x1b[33mseveral of them\x1b[39m" in output
        assert "a\x1b[32m \x1b[39m\x1b[33mé\x1b[39m\x1b[33m🙂\x1b[39m" in output
    else:
        assert output == "> a é🙂\\x1b[2J\n> \n"
    assert "\x1b[2J" not in output, "an answer can't change the terminal"
    share = round(100 / len(ids))
    assert f"recycling {share}%, suffix {share}%, target {round(200 / len(ids))}%" in errors


def test_text_is_streamed_from_single_bytes_even_if_they_are_no_text() -> None:
    vocab = {"<unk>": 0, "a": 1, "▁b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    stream = chat_answers.TextStream(tokenizer)
    characters = [3 + byte for byte in "é🙂".encode()]
    assert [stream.add(token) for token in (1, 2, *characters, 1)] == ["a", " b", "", "é", "", "", "", "🙂", "a"]
    assert [stream.add(token) for token in (3 + ord("&"), 3 + 0xFF, 3 + 0xC3, 2)] == ["&", "", "", " b"]


@pytest.mark.parametrize(
    ("options", "words"), [([], "the answer is identical"), (["--temperature", "0.8"], "aren't compared token by token")]
)
def test_an_answer_is_compared_with_plain_decoding(talk: Talk, options: list[str], words: str) -> None:
    code, _, errors = talk(["Hi", "/compare"], "--drafter", "recycling", "--compare", *options)
    assert (code, errors.count("x as fast as plain decoding"), errors.count(words)) == (0, 2, 2)


def test_a_comparison_shows_the_first_token_that_differs(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(target: Any, drafter: Any, *arguments: Any, **options: Any) -> Iterator[Step]:
        for step in generate(target, drafter, *arguments, **options):
            is_right = step.is_prefill or isinstance(drafter, NullDrafter)
            yield step if is_right else replace(step, tokens=(tuple(5 for _ in step.tokens[0]),))

    monkeypatch.setattr(chat_answers, "generate", wrong)
    _, _, errors = talk(["Hi"], "--drafter", "recycling", "--compare")
    assert "NOT identical from token 2 on" in errors


def test_ctrl_c_ends_an_answer_whose_text_stays_in_the_history(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations, writes = [], []

    def encode(turns: Sequence[Turn], *rest: Any) -> Any:
        conversations.append([turn.content for turn in turns])
        return encode_prompt(turns, *rest)

    def press(text: str) -> None:
        writes.append(text)
        if len(writes) == 6:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_answers, "encode_prompt", encode)
    code, _, errors = talk(["Hi", "Why?"], terminal=True, at_write=press)
    assert code == 0
    assert errors.count("stopped by Ctrl-C") == 1
    question, answer, next_question = conversations[-1]
    assert (question, next_question) == ("Hi", "Why?")
    assert 0 < len(answer) < 24
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_pipe_ends_the_chat(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.chat.Chat.write", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(StartsAgain):
        talk(["Hi"])


@pytest.mark.parametrize("terminal", [False, True])
def test_a_history_that_cannot_be_read_is_one_error(talk: Talk, tmp_path: Path, terminal: bool) -> None:
    """A terminal's chat continues without the question; a pipe's ends with status 1."""
    code, _, errors = talk(["Hi " * 500, "/oops", "Why?"], terminal=terminal)
    assert "tokens, and the model reads at most 1024" in errors
    assert "/new" in errors
    assert code == (0 if terminal else 1)
    assert ("there is no command /oops" in errors, "24 tokens" in errors) == (terminal, terminal)
    (tmp_path / "one.jinja").write_text("{{ messages[0].content if not messages[1:] else raise_exception('x' + '1' * 20) }}")
    code, _, errors = talk(["Hi", "Why?", "/new", "Why?"], "--chat-template", str(tmp_path / "one.jinja"), terminal=terminal)
    assert (code, errors.count("x" + "1" * 20), errors.count("24 tokens")) == ((0, 1, 2) if terminal else (1, 1, 1))


def test_a_wrong_command_is_never_asked(talk: Talk) -> None:
    wrong, asked = (
        ["/compare x", "/exit now", "/Help", "/new-chat", "/"],
        ["/usr/bin is what?", "/etc is what?", "// a comment", "/* x */"],
    )
    code, _, errors = talk([*wrong, *asked], terminal=True)
    listed = "the commands are /compare, /new, /help, /exit, each alone in its line"
    assert (code, errors.count(listed), errors.count("24 tokens")) == (0, len(wrong), len(asked))


def test_mistakes_are_found_before_the_weights_are_read(tiny_target_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_target_dir, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors", "*.jinja"))
    (tmp_path / "target" / "model.safetensors").touch()
    write_drafter_config(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").touch()
    for options, words in (
        (["--drafter", f"{tmp_path / 'other'}+suffix", "--chat-template", "vicuna_v1.1"], "doesn't fit target: hidden_size"),
        ([], "has no chat template"),
        (["--system", "Be brief.", "--chat-template", str(tmp_path / "strict.jinja")], "no system prompts here"),
        (["--compare"], "compare needs a drafter"),
        (["--drafter", "suffix", "--settings", "{beams: 3}"], "has no option beams"),
        (["--stage-layers", "[1,1]"], "a chat is one process"),
    ):
        rejects = "{{ raise_exception('no system prompts here') if messages[0].role == 'system' else messages[0].content }}"
        (tmp_path / "strict.jinja").write_text(rejects)
        result = invoke(["chat", "--target", tmp_path / "target", *options])
        assert words in result.message
        assert result.exit_code == 2
