"""Attacks by values of a recipe: absurd numbers, wrong types, and hostile YAML."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .cases import RIGHT, SILENT, Case, Finding, outrider
from .lab import run, run_options

KIND = "recipes"
HUGE = str(10**12)
MUST_FAIL: dict[str, tuple[str, ...]] = {
    "num_threads": ("1000000", "0", "-1", "two"),
    "seed": ("-1", "1.5", "x"),
    "stages": ("[]", "[fly]", "distill,distill", "7"),
    "mixed_precision": ("fp7", "7"),
    "target.name_or_path": ("''", "no/such/model", "/etc", "7", "null"),
    "target.dtype": ("float7", "int8", "[]"),
    "target.attn_implementation": ("magic",),
    "target.device": ("cuda:99", "toaster"),
    "target.memory_budget_gib": ("-1", "0", "nan", "x"),
    "data.source": ("nothing", "[]"),
    "data.limit": ("0", "-1", "1.5"),
    "data.max_length": ("0", "1", "-1"),
    "data.overlap_words": ("0", "-1"),
    "data.prompt_chars_min": ("0", "-1"),
    "data.chat_template": ("/no/such", "/etc"),
    "distill.horizon": ("0", "-1", HUGE),
    "distill.mode": ("steal",),
    "distill.features": ("all", "7"),
    "distill.shard_examples": ("0", "-1"),
    "distill.temperature": ("-1", "nan", "inf"),
    "distill.top_p": ("0", "2", "nan"),
    "distill.top_k": ("0", "-1"),
    "distill.max_new_tokens": ("0", "-1"),
    "distill.engine": ("steam",),
    "distill.kv_budget_gib": ("-1", "nan"),
    "train.steps": ("0", "-1", "1.5"),
    "train.batch_size": ("0", "-1", "x"),
    "train.max_positions": ("0", "-1"),
    "train.learning_rate": ("0", "-1", "nan", "inf"),
    "train.warmup_steps": ("-1", HUGE),
    "train.weight_decay": ("-1", "nan"),
    "train.checkpoint_every": ("0", "-1"),
    "train.validation_texts": ("-1",),
    "train.validation_tokens": ("0", "-1"),
    "train.no_such_option": ("1",),
    "drafter.kind": ("nothing", "null"),
    "drafter.exit_width": ("0", "-1", HUGE),
    "drafter.num_blocks": ("-1", "1000000"),
    "drafter.start_from": ("/no/such", "7"),
    "eval.max_new_tokens": ("0", "-1", HUGE),
    "eval.temperatures": ("[-1]", "[nan]", "[]"),
    "eval.batch_sizes": ("[0]", "[-1]", "[]"),
    "eval.repeats": ("0", "-1"),
    "eval.suites": ("[]", "[{name: nothing}]", "7"),
    "eval.baselines": ("[nothing]", "7"),
    "eval.settings": ("[{beam_width: 0}]", "[{nothing: 1}]", "7"),
    "eval.acceptance": ("all",),
    "export.formats": ("[nothing]", "7"),
    "export.repo": ("x", "../x"),
    "export.licence": ("'MIT License'",),
}
"""Values that must be errors, by their options."""
MAY_RUN: dict[str, tuple[str, ...]] = {
    "data.limit": (HUGE,),
    "data.max_length": (HUGE,),
    "data.prompt_chars_max": (HUGE,),
    "distill.shard_examples": (HUGE,),
    "train.batch_size": (HUGE,),
    "train.max_positions": (HUGE,),
    "train.checkpoint_every": (HUGE,),
    "train.validation_tokens": (HUGE,),
    "train.learning_rate": ("1e30",),
    "eval.batch_sizes": (f"[{HUGE}]",),
    "name": ("'../../x'", '"a\\e[2Jb"'),
}
"""Values that may be errors or do no harm: the run must end in time, and well."""
STAGES = {"data": "[distill]", "distill": "[distill]", "target": "[distill]", "eval": "[eval]", "export": "[export]"}
"""Stages that read a section; all others are read by training too."""
DEEP = "[" * 20_000 + "]" * 20_000
YAML: dict[str, str] = {
    "nested without end": f"train: {DEEP}",
    "mappings nested without end": "".join(f"{' ' * depth}a:\n" for depth in range(2000)),
    "a laughing list": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "an alias of itself": "train: &a [*a]",
    "a Python object": "train: !!python/object/apply:os.system ['touch stolen']",
    "a tab": "train:\n\tsteps: 1",
    "no mapping": "- 1\n- 2",
    "nothing": "",
    "a null byte": "train: \x00",
    "an interpolation of itself": "seed: ${seed}",
    "interpolations in a circle": "name: ${output_dir}\noutput_dir: ${name}",
    "a resolver": "name: ${oc.env:HOME}${oc.decode:7}${no_such:1}",
    "a key twice": "seed: 1\nseed: 2",
    "an unknown section": "steal: {a: 1}",
    "a list for a section": "train: [1]",
    "a default that isn't": "defaults: [{drafter: nothing}]",
    "defaults of itself": "defaults: [my]",
}  # fmt: skip
"""Recipe files that must be errors."""


def make_cases(folder: Path, lab: Path) -> list[Case]:
    """Return a case for each value and file."""
    cases = []
    for must_fail, table in ((True, MUST_FAIL), (False, MAY_RUN)):
        for option, values in table.items():
            for value in values:
                attack = partial(run_with, lab, option, value, must_fail=must_fail)
                cases.append(_case(f"{option}={value}", attack))
    return cases + [_case(f"a file: {name}", partial(run_file, lab, text)) for name, text in YAML.items()]


def _case(name: str, attack: Callable[[Path], Finding]) -> Case:
    return Case(kind=KIND, name=name, attack=attack)


def run_with(lab: Path, option: str, value: str, place: Path, *, must_fail: bool) -> Finding:
    """Run the stages that read an option, on the finished earlier stages."""
    stages = STAGES.get(option.split(".")[0], "[train]")
    if stages != "[distill]":
        removed = {"[train]": ("train", "drafter"), "[eval]": ("eval",), "[export]": ("package",)}[stages]
        shutil.copytree(lab / "run", place / "run", ignore=shutil.ignore_patterns(*removed))
    run(place / "run", lab, f"stages={stages}", f"{option}={value}")
    return Finding(SILENT, "the run ends well") if must_fail else Finding(RIGHT)


def run_file(lab: Path, text: str, place: Path) -> Finding:
    """Run a recipe file."""
    (place / "my.yaml").write_text(text)
    outrider("run", "my.yaml", *run_options(lab), f"output_dir={place / 'run'}", "stages=[distill]")
    return Finding(SILENT, "the run ends well")
