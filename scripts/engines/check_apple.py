"""Check that Apple's code and outrider find equal beams of a ReDrafter, equally probable.

Apple's code (github.com/apple/ml-recurrent-drafter) is in no package index, and needs older
versions of other packages. So two Pythons run this script in turns. 1. outrider's Python makes a
target, drafters, their exports, and the results of two searches: the one that outrider drafts with,
with `top_k` as Apple's, and a plain search of this script, which keeps the log-probabilities along
the beams. 2. A Python with Apple's code loads the exports, compares its own search with both, and
writes drafters. 3. outrider's Python imports these drafters and compares.

    python3 -m venv apple-env                                               # torch's CPU build
    apple-env/bin/pip install torch==2.13.0 'transformers==4.36.2' 'numpy<2' safetensors
    git clone https://github.com/apple/ml-recurrent-drafter && git -C ml-recurrent-drafter checkout d4f4a72
    .venv/bin/python scripts/engines/check_apple.py make /tmp/apple
    PYTHONPATH=ml-recurrent-drafter apple-env/bin/python scripts/engines/check_apple.py compare /tmp/apple
    .venv/bin/python scripts/engines/check_apple.py import /tmp/apple

Apple's code for MLX is in a later commit. MLX computes on a CPU too, so this runs on Linux. The
fourth step loads the exports of the first one with MLX, and compares its search:

    apple-env/bin/pip install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2 --no-deps mlx-cpu==0.32.4
    git -C ml-recurrent-drafter checkout bd8586b
    PYTHONPATH=ml-recurrent-drafter apple-env/bin/python scripts/engines/check_apple.py mlx /tmp/apple

It prints the largest difference of the log-probabilities at each depth, and how many beams are equal
with the filter and without it. It exits with 1 if a difference is above rounding errors, or a beam
differs with the filter.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_targets as shared
import torch

NUM_PROMPTS, WIDTH, KEPT = 16, 5, 50
"""Sizes of the search; Apple's search keeps only the KEPT likeliest tokens of each beam."""
LEAST = -1000.0
"""Log-probabilities below this belong to tokens that were not kept."""
OURS: dict[str, dict[str, Any]] = {
    "two_blocks": {"num_blocks": 2},
    "narrow_exit": {"num_blocks": 1, "exit_width": 24},
}
THEIRS: dict[str, dict[str, Any]] = {
    "as_vicunas": {"num_draft_layers": 2, "exit_dim": 2 * shared.HIDDEN, "rnn": True},
    "with_projection": {"num_draft_layers": 1, "exit_dim": 24, "rnn": True},
}


def make(directory: Path) -> bool:
    """Write the target, and a folder for each case with its export and outrider's results."""
    from outrider.models.export.apple import FORMAT

    cases = {name: {"kind": "redrafter", "initial_state": "zero", **options} for name, options in OURS.items()}
    made = shared.make_exports(directory, cases, lambda _: FORMAT, lambda drafter, _: our_results(drafter), shared.USUAL_ROPE)
    torch.save(shared.load_target(directory / "target").embed_tokens.weight.clone(), directory / "embeddings.pt")
    return made


def make_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Make last hidden states after prompts [prompt, hidden], and the target's tokens [prompt]."""
    states = torch.randn(NUM_PROMPTS, shared.HIDDEN, generator=torch.Generator().manual_seed(6))
    return states, shared.make_tokens()[0, :NUM_PROMPTS]


@torch.no_grad()
def our_results(drafter: Any) -> dict[str, torch.Tensor]:
    """Run both searches with outrider's drafter; `filtered` and `unfiltered` are outrider's own."""
    beams = {"filtered": drafted_beams(drafter, KEPT), "unfiltered": drafted_beams(drafter, None)}
    return plain_search(drafter) | beams


def drafted_beams(drafter: Any, top_k: int | None) -> torch.Tensor:
    """Return the final beams of outrider's search, with the target's token: [prompt, beam, token]."""
    from outrider.models.drafters.beams import beam_search, final_beams

    contexts, first = make_prompts()
    search = beam_search(drafter, contexts[:, None].expand(-1, shared.DEPTHS, -1), first, width=WIDTH, top_k=top_k)
    tokens = search.tokens.gather(1, final_beams(search)).unflatten(1, (shared.DEPTHS, WIDTH)).transpose(1, 2)
    return torch.cat([first[:, None, None].expand(-1, WIDTH, 1), tokens], dim=2)


def plain_search(drafter: Any) -> dict[str, torch.Tensor]:
    """Run a plain beam search with outrider's drafter.

    Returns the beams [prompt, beam, token] and the log-probabilities on their way, of the KEPT
    likeliest tokens only [prompt, beam, depth, vocab].
    """
    contexts, first = make_prompts()
    beams, scores = [first[:, None, None]], torch.zeros(NUM_PROMPTS, 1)
    beam, state = beams[0], drafter.first_state(drafter.embed(first))[:, None]
    kept_log_probs = torch.zeros(NUM_PROMPTS, 1, 0, shared.VOCAB)
    for depth in range(shared.DEPTHS):
        if depth:
            state = drafter.next_state(state, drafter.embed(beam[..., -1]))
        logits = drafter.logits(contexts[:, None].expand_as(state), state)
        least = logits.topk(KEPT, dim=-1).values[..., -1:]
        log_probs = logits.masked_fill(logits < least, -torch.inf).log_softmax(-1)
        scores, best = (scores[..., None] + log_probs).flatten(1).topk(WIDTH)
        parents, tokens = best // shared.VOCAB, best % shared.VOCAB
        rows = torch.arange(NUM_PROMPTS)[:, None]
        beam = torch.cat([beam[rows, parents], tokens[..., None]], dim=-1)
        kept_log_probs = torch.cat([kept_log_probs[rows, parents], log_probs[rows, parents][:, :, None]], dim=2)
        state = state[rows, parents]
    return {"beams": beam, "log_probs": kept_log_probs}


def skip_package_files() -> None:
    """Import Apple's modules without the packages' `__init__`, which need many other packages."""
    spec = importlib.util.find_spec("recurrent_drafting")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("there is no recurrent_drafting: name the clone of Apple's repository in PYTHONPATH")
    package = ModuleType("recurrent_drafting")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["recurrent_drafting"] = package
    mlx = ModuleType("recurrent_drafting.mlx")
    mlx.__path__ = [f"{folder}/mlx" for folder in package.__path__]
    sys.modules["recurrent_drafting.mlx"] = mlx


@torch.no_grad()
def their_search(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Run Apple's own search; returns the same values as `plain_search`."""
    from recurrent_drafting.modeling_drafter import BeamShape

    embeddings = torch.nn.Embedding.from_pretrained(torch.load(directory / "embeddings.pt", weights_only=True))
    contexts, first = make_prompts()
    # The length includes the target's token.
    beams, log_probs = model.beam_search_candidates(contexts, first, embeddings, BeamShape(WIDTH, shared.DEPTHS + 1))
    return {"beams": beams, "log_probs": log_probs}


def compare_searches(name: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Return whether beams, kept tokens and log-probabilities of two searches are equal."""
    kept = expected["log_probs"] > LEAST
    assert int(kept.sum()) == KEPT * NUM_PROMPTS * WIDTH * shared.DEPTHS
    same = torch.equal(actual["beams"], expected["beams"]) and torch.equal(actual["log_probs"] > LEAST, kept)
    by_depth = [list(result["log_probs"].where(kept, 0.0).unbind(2)) for result in (actual, expected)]
    return shared.compare(name if same else f"{name}, with OTHER BEAMS", *by_depth) and same


def compare_beams(name: str, theirs: torch.Tensor, ours: dict[str, torch.Tensor]) -> bool:
    """Return whether outrider's filtered search finds the beams of Apple's, in the same order.

    Without the filter it may find others, so these are only counted.
    """
    equal = {search: int((ours[search] == theirs).all(dim=2).sum()) for search in ("filtered", "unfiltered")}
    num_beams = theirs.shape[0] * theirs.shape[1]
    print(f"{name}: of {num_beams} beams, {equal['filtered']} equal with top_k {KEPT}, {equal['unfiltered']} without")
    return equal["filtered"] == num_beams


def compare_and_write(directory: Path) -> bool:
    """Load and compare each export, then write drafters as Apple's training does.

    This runs in the Python with Apple's code.
    """
    skip_package_files()
    from recurrent_drafting.configuration_drafter import DrafterConfig
    from recurrent_drafting.modeling_drafter import Drafter

    alike = True
    for name in OURS:
        model, info = Drafter.from_pretrained(directory / name, output_loading_info=True)
        assert not any(info.values()), info
        results = shared.read_results(directory / name)
        theirs = their_search(model.eval(), directory)
        alike &= compare_searches(name, theirs, results)
        alike &= compare_beams(name, theirs["beams"], results)
    for name, options in THEIRS.items():
        torch.manual_seed(7)
        model = Drafter(DrafterConfig(vocab_size=shared.VOCAB, hidden_size=shared.HIDDEN, **options)).eval()
        shared.randomise(model)
        model.save_pretrained(directory / name)
        torch.save(their_search(model, directory), directory / name / shared.RESULTS_FILE)
    return alike


def compare_mlx(directory: Path) -> bool:
    """Load and compare each export with Apple's code for MLX."""
    skip_package_files()
    import mlx.core as mx
    from mlx import nn
    from recurrent_drafting.mlx import modeling_drafter

    embeddings = torch.load(directory / "embeddings.pt", weights_only=True)
    embed = nn.Embedding(*embeddings.shape)
    embed.weight = mx.array(embeddings.numpy())
    contexts, first = (mx.array(values.numpy()) for values in make_prompts())
    alike = True
    for name in OURS:
        model = modeling_drafter.load_model(str(directory / name))  # raises for missing and unknown names
        shape = modeling_drafter.BeamShape(WIDTH, shared.DEPTHS + 1)
        beams, logits = (torch.tensor(v.tolist()) for v in model.beam_search_candidates(contexts, first, embed, shape))
        results = shared.read_results(directory / name)
        # MLX returns a prompt's beams in any order. Beams that ours lack stay first, and are reported.
        same = (results["filtered"][:, :, None] == beams[:, None]).all(-1).long()  # [prompt, our beam, its beam]
        rows, order = torch.arange(NUM_PROMPTS)[:, None], same.argmax(2)
        theirs = {"beams": beams[rows, order], "log_probs": logits.log_softmax(-1)[rows, order]}
        alike &= compare_searches(name, theirs, results)
        alike &= compare_beams(name, theirs["beams"], results)
    return alike


def import_theirs(directory: Path) -> bool:
    """Import each drafter that Apple's code wrote, and compare (outrider's Python)."""
    from outrider.models.export.registry import format_of, import_drafter

    alike, target = True, shared.load_target(directory / "target")
    for name in THEIRS:
        assert format_of(directory / name).name == "apple"
        results = shared.read_results(directory / name)
        ours = our_results(import_drafter(directory / name, target))
        alike &= compare_searches(name, ours, results)
        alike &= compare_beams(name, results["beams"], ours)
    return alike


if __name__ == "__main__":
    shared.run(__doc__, {"make": make, "compare": compare_and_write, "import": import_theirs, "mlx": compare_mlx})
