"""Names of methods as users read them: the kind of drafter and its setting.

Records keep their keys, such as `redrafter beam_width=4 beam_length=3 tree_nodes=5`. Tables, plots
and reports show `ReDrafter, 4 beams of 3, 5 nodes`. The names of two drafters of one kind add the
options in which they differ, else their training, else their folders.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.drafter_names import SEPARATOR, TRAINING_FREE_NAMES
from .names import BASELINE, PIPELINED

TITLES = {
    "block": "Block",
    "draft_model": "Draft model",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "prompt_lookup": "Prompt lookup",
    "recycling": "Recycling",
    "redrafter": "ReDrafter",
    "suffix": "Suffix",
}
PLAIN_DECODING = "plain decoding"
SHAPE_OPTIONS = (
    *("beam_width", "beam_length", "candidates", "depth", "length", "share_prefixes", "top_k", "tree_nodes", "tree_paths"),
    "width",
)
"""Options of the draft tree. They belong to the setting, and never distinguish two drafters."""
MAX_VALUE_CHARS = 24
"""Longest value of an option that a name quotes. An option with a longer value is left out."""
TRAINING_WORDS = {"labels": {"distilled": "distilled", "text": "not distilled", None: "labels unknown"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFacts:
    """Facts about a method: its key in the records, and its description in the run's files."""

    key: str
    described: Mapping[str, Any] | None = None
    """Its entry in `run.json`: `config`, `setting` and `weights`. None for plain decoding."""
    training: Mapping[str, Any] | None = None
    """The drafter's TrainingFacts."""
    run: str = ""
    """Name of the evaluation's folder, where the methods of several evaluations are named
    together."""

    @property
    def kind(self) -> str:
        return self.key.split(" ")[0]

    @property
    def folder(self) -> str:
        """The words of the key between kind and setting: the name of the drafter's directory."""
        words = _words_before_setting(self.key)[1:]
        words = words[:-1] if words[-1:] == ["off"] and self.setting is None else words
        words = words[:-1] if words[-1:] == [PIPELINED] and self.is_pipelined else words
        words = words[:-1] if words[-1:] == ["tuned"] and self.is_tuned else words
        return " ".join(words).removesuffix("/drafter")

    @property
    def is_tuned(self) -> bool:
        """Whether `outrider tune` chose its setting."""
        return "tuned" in _words_before_setting(self.key)[1:] if self.described is None else "places" in self.described

    @property
    def is_pipelined(self) -> bool:
        """Whether it drafts while the stages of the target read."""
        if self.described is None:
            return PIPELINED in _words_before_setting(self.key)[1:]
        return self.described.get("decode") == PIPELINED

    @property
    def setting(self) -> Mapping[str, Any] | None:
        """The run-time options.

        None where tuning turned the drafter off.
        """
        return setting_of_key(self.key) if self.described is None else self.described["setting"]

    @property
    def options(self) -> Mapping[str, Any]:
        """All options of the drafter, as far as they are known."""
        return {**(self.described["config"] if self.described else {}), **(self.setting or {})}

    @property
    def drafter(self) -> tuple[str, str, str]:
        """The drafter's identity: two methods with the same value decode with the same drafter."""
        weights = self.described["weights"] if self.described else ""
        return self.kind, weights, "" if weights else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodName:
    """A method's name in two parts."""

    drafter: str
    """`ReDrafter`, or `ReDrafter (rnn false)` beside another ReDrafter."""
    setting: str
    """`4 beams of 3, 5 nodes`."""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.drafter, self.setting)))


def method_names(methods: Sequence[MethodFacts]) -> list[MethodName]:
    """Name methods that appear together, each differently."""
    # 1. The drafters, by the difference between those of one kind.
    drafters = {method.drafter: method for method in methods if method.key != BASELINE}
    labels = _drafter_labels(drafters)
    # 2. The settings.
    names = [
        MethodName(drafter=PLAIN_DECODING, setting="")
        if method.key == BASELINE
        else MethodName(drafter=labels[method.drafter], setting=_setting_of(method))
        for method in methods
    ]
    # 3. Names that are still equal: from a copy in another folder, or from a setting that repeats
    # the drafter's defaults.
    keys: dict[tuple[str, MethodName], set[str]] = defaultdict(set)
    for method, name in zip(methods, names, strict=True):
        keys[method.run, name].add(method.key)
    return [
        name if len(keys[method.run, name]) == 1 else _longer_name(method, name, keys[method.run, name])
        for method, name in zip(methods, names, strict=True)
    ]


def _longer_name(method: MethodFacts, name: MethodName, keys: Iterable[str]) -> MethodName:
    folders = Counter(MethodFacts(key=key).folder for key in keys)
    if len(folders) > 1 and folders[method.folder] == 1:
        return MethodName(drafter=f"{name.drafter} ({method.folder or 'drafter'})", setting=name.setting)
    words = method.key.split(" ")[len(_words_before_setting(method.key)) :]
    return MethodName(drafter=name.drafter, setting=f"{name.setting} ({' '.join(words) or 'as saved'})")


def title_of(kind: str) -> str:
    """Return the title of a kind of drafter, or of a merge: `ReDrafter + Suffix`."""
    return " + ".join(_part_title(part) for part in kind.split(SEPARATOR))


def _part_title(part: str) -> str:
    """Return the title of a merge's part; a second one of a kind has a number."""
    kind, _, number = part.rpartition("_")
    return f"{TITLES.get(kind, kind)} {number}" if number.isdecimal() else TITLES.get(part, part)


def name_of_key(key: str) -> str:
    """Name a method of which only the key is known."""
    return str(method_names([MethodFacts(key=key)])[0])


def setting_words(kind: str, options: Mapping[str, Any], setting: Mapping[str, Any] | None) -> str:
    """Describe a setting in words: `4 beams of 3, 5 nodes`.

    `options` are all options of the drafter in this setting; `setting` has those that were set for
    it.
    """
    if setting is None:
        return "turned off by tuning"
    if kind in TRAINING_FREE_NAMES:  # only the size of the tree, and what was set
        options = {name: value for name, value in options.items() if name in setting or name in ("tree_nodes", "pace")}
    grows = kind == "draft_model" and options.get("pace", "fixed") != "fixed"
    if grows:  # a tree that grows has no length and no width
        options = {name: value for name, value in options.items() if name not in ("length", "top_k")}
    words = [*_shape_words(kind, options)]
    if "tree_nodes" in setting and setting["tree_nodes"] is None:
        words.append("all nodes")
    if "share_prefixes" in setting or options.get("share_prefixes") is False:
        words.append(f"{'with' if options['share_prefixes'] else 'without'} tree attention")
    if options.get("pace") == "expected":
        words.append("paced")
    elif grows:
        words.append(f"paced by {options['pace']}")
    elif "pace" in setting and SEPARATOR not in kind and kind != "draft_model":
        words.append("fixed pace")  # one drafter, as a merge of one
    others = {name: value for name, value in setting.items() if name not in (*SHAPE_OPTIONS, "pace")}
    return ", ".join([*words, *(_option_words(name, value) for name, value in others.items())])


def _shape_words(kind: str, options: Mapping[str, Any]) -> Iterable[str]:
    """Describe the shape of the draft tree in the terms of the drafter's kind."""
    width, length = options.get("beam_width"), options.get("beam_length")
    if width is not None:
        yield _counted(width, "beam") + (f" of {length}" if length is not None else "")
    elif length is not None:
        yield f"beams of {length}"
    for name, word in (("depth", "depth"), ("length", "length"), ("width", "width"), ("top_k", "top-k")):
        if options.get(name) is not None:
            yield f"{word} {options[name]}"
    if isinstance(paths := options.get("tree_paths"), list | tuple):
        yield _counted(len(paths), "node")
    elif options.get("tree_nodes") is not None:
        yield _counted(options["tree_nodes"], "node")


def setting_of_key(key: str) -> dict[str, Any] | None:
    """Parse the setting at the end of a key.

    Returns None where tuning turned the drafter off.
    """
    words = _words_before_setting(key)
    if words[-1] == "off":
        return None
    rest = key.split(" ")[len(words) :]
    pairs = (text.split("=", 1) for text in re.split(r" (?=\w+=)", " ".join(rest)) if text)
    return {name: _value(text) for name, text in pairs}


def _value(text: str) -> Any:
    """Parse a value as Python writes it in a key."""
    literals = {"None": None, "True": True, "False": False}
    if text in literals:
        return literals[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _words_before_setting(key: str) -> list[str]:
    words = key.split(" ")
    return words[: next((index for index, word in enumerate(words) if "=" in word), len(words))]


def _setting_of(method: MethodFacts) -> str:
    if method.is_pipelined:  # how much it drafts doesn't follow from the options of a step's tree
        return PIPELINED
    text = setting_words(method.kind, method.options, method.setting)
    return ", ".join(filter(None, (text, "tuned" if method.is_tuned and method.setting is not None else "")))


def _drafter_labels(drafters: Mapping[tuple[str, str, str], MethodFacts]) -> dict[tuple[str, str, str], str]:
    """Label each drafter: its title, and in brackets its difference from others of its kind."""
    labels = {}
    for kind in dict.fromkeys(method.kind for method in drafters.values()):
        title = title_of(kind)
        of_kind = {identity: method for identity, method in drafters.items() if method.kind == kind}
        for identity, words in _differences(of_kind).items():
            labels[identity] = f"{title} ({', '.join(words)})" if words else title
    return labels


def _differences(drafters: Mapping[tuple[str, str, str], MethodFacts]) -> dict[tuple[str, str, str], list[str]]:
    """Collect the words in which each drafter differs from the others.

    Options come first, then training, then the folder, until all drafters differ.
    """
    words: dict[tuple[str, str, str], list[str]] = {identity: [] for identity in drafters}
    for words_of in (_differing_options, _differing_training, _folders):
        alike: dict[tuple[str, ...], list[tuple[str, str, str]]] = defaultdict(list)
        for identity in drafters:
            alike[tuple(words[identity])].append(identity)
        for group in alike.values():
            if len(group) > 1:
                for identity, added in zip(group, words_of([drafters[identity] for identity in group]), strict=True):
                    words[identity] += added
    return words


def _differing_options(methods: Sequence[MethodFacts]) -> list[list[str]]:
    configs = [method.described["config"] if method.described else {} for method in methods]
    names = [name for name in dict.fromkeys(name for config in configs for name in config) if name not in SHAPE_OPTIONS]
    differing = [name for name in names if len({_text(config.get(name)) for config in configs}) > 1]
    quoted = [name for name in differing if all(len(_text(config.get(name))) <= MAX_VALUE_CHARS for config in configs)]
    return [[_option_words(name, config.get(name)) for name in quoted] for config in configs]


def _differing_training(methods: Sequence[MethodFacts]) -> list[list[str]]:
    """List labels and steps of the drafters' trainings, where these are known and differ."""
    facts = [method.training for method in methods]
    if not all(facts):
        return [[] for _ in methods]
    words: list[list[str]] = [[] for _ in methods]
    for name in ("labels", "steps"):
        values = [training[name] for training in facts if training]
        if len(set(values)) > 1:
            for method_words, value in zip(words, values, strict=True):
                method_words.append(TRAINING_WORDS[name].get(value, value) if name in TRAINING_WORDS else f"{value:,} steps")
    return words


def _folders(methods: Sequence[MethodFacts]) -> list[list[str]]:
    folders = [method.folder for method in methods]
    if len(set(folders)) == len(folders):
        return [[folder or method.run or "drafter"] for folder, method in zip(folders, methods, strict=True)]
    return [["/".join(filter(None, (method.run, method.folder)))] for method in methods]


def _option_words(name: str, value: Any) -> str:
    return f"{name} {_text(value)}"


def _text(value: Any) -> str:
    """Format a value as YAML writes it: `true`, `null`, `[1, 2]`."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
