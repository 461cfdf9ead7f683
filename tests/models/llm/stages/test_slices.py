"""Slices of models: their logits, what they load, and the models that can't be divided."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from outrider.models.decoding import Prompts
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hidden_states import decoder_layers
from outrider.models.llm.loading import load_target
from outrider.models.llm.stages.slices import AbsentLayer, EndSlice, LayerSlice, require_sliceable
from outrider.models.llm.stages.stage import Stage
from outrider.models.llm.stages.staged_target import StagedTarget
from outrider.models.llm.streamed_loading import build_without_weights
from outrider.models.llm.weight_reader import WeightFiles

from ....tiny_models import save_tiny_target
from .inline import InlineLink, in_stages

NUM_LAYERS = 5
STAGE_LAYERS = [2, 1, 2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("five") / "target"
    options = {"num_hidden_layers": NUM_LAYERS, "initializer_range": 0.2, "tie_word_embeddings": False}
    return save_tiny_target(directory, LlamaForCausalLM, LlamaConfig, tiny_tokenizer, **options)


def make_config(folder: Path) -> TargetConfig:
    return TargetConfig(name_or_path=str(folder), dtype="float64", fast_linears=False)


def loaded_layers(folder: Path, layers: range) -> LayerSlice:
    config = make_config(folder)
    return LayerSlice.load(build_without_weights(config), layers, CPU)


def loaded_ends(folder: Path) -> EndSlice:
    config = make_config(folder)
    return EndSlice.load(build_without_weights(config), CPU)


def memory(model: torch.nn.Module) -> int:
    """Return the bytes that a model's parameters take; equal storages count once."""
    return sum({(s := tensor.untyped_storage()).data_ptr(): s.nbytes() for tensor in model.parameters()}.values())


def test_slices_from_a_checkpoint_give_the_logits_of_the_whole_target(folder: Path) -> None:
    whole = load_target(make_config(folder), CPU)
    stages = [Stage(loaded_layers(folder, layers)) for layers in (range(2), range(2, 3), range(3, 5))]
    staged = StagedTarget(loaded_ends(folder), whole.tokenizer, whole.identity, InlineLink(stages), stage_layers=[2, 1, 2])
    prompts = Prompts.of(torch.tensor([[1, 70, 71, 72, 2]]))
    one, two = (target.prefill(prompts, max_new_tokens=8, max_nodes=4) for target in (whole, staged))
    assert torch.equal(one.logits, two.logits)
    assert torch.equal(one.hidden_states, two.hidden_states)


def test_a_stage_takes_the_memory_of_its_layers_and_the_head_that_of_its_ends(folder: Path) -> None:
    whole = load_target(make_config(folder), CPU).model
    per_layer = memory(decoder_layers(whole)[0])
    parts = [loaded_layers(folder, layers).model for layers in (range(1), range(1, 5))]
    ends = loaded_ends(folder).model
    one_element_each = 8 * len(list(whole.parameters()))
    for part, num_layers in zip(parts, (1, 4), strict=True):
        assert num_layers * per_layer <= memory(part) <= num_layers * per_layer + one_element_each
    assert memory(ends) == memory(whole) - NUM_LAYERS * per_layer


def test_a_stage_reads_only_its_layers_from_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes, read = [], WeightFiles.read

    def counting(files: WeightFiles, window: Any, *args: Any) -> None:
        num_bytes.append(sum(piece.count for piece in window.pieces))
        read(files, window, *args)

    monkeypatch.setattr(WeightFiles, "read", counting)
    part = loaded_layers(folder, range(2, 3))
    assert sum(num_bytes) == sum(parameter.numel() for parameter in part.modules[0].parameters())


def test_a_stage_keeps_keys_and_values_of_its_own_layers_only(folder: Path) -> None:
    whole = load_target(make_config(folder), CPU)
    staged = in_stages(whole, STAGE_LAYERS)
    prompts = Prompts.of(torch.tensor([[1, 70, 71, 72, 2]]))
    whole.prefill(prompts, max_new_tokens=8, max_nodes=4)
    staged.prefill(prompts, max_new_tokens=8, max_nodes=4)
    assert whole._cache is not None
    (everything,) = whole._cache._buffers
    assert isinstance(staged.link, InlineLink)
    sizes = []
    for stage in staged.link.stages:
        assert stage._cache is not None
        sizes += [len(buffer) for buffer in stage._cache._buffers]
        assert all(buffer.shape[1:3] == everything.shape[1:3] for buffer in stage._cache._buffers)
    assert sizes == [2 * count for count in STAGE_LAYERS]
    assert sum(sizes) == len(everything)


def test_too_many_layers_are_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has 5 layers, and target\.stage_layers needs 6"):
        loaded_layers(folder, range(4, 6))


def test_what_needs_the_layers_is_an_error_at_the_head(folder: Path) -> None:
    """Absent layers return their input, so a pass of the model would give wrong states silently."""
    staged = in_stages(load_target(make_config(folder), CPU), STAGE_LAYERS)
    text = torch.tensor([[1, 70, 71]])
    for read in (
        lambda: staged.model(text),
        lambda: staged.hidden_states(text),
        lambda: staged.layer_inputs((2,), input_ids=text),
        lambda: staged.take(0),
        lambda: staged.hand_over_cache(),
        lambda: staged.resume(None, [], capacity=4),
    ):
        with pytest.raises(ValueError, match=r"target\.stage_layers"):
            read()
    assert all(isinstance(layer, AbsentLayer) for layer in decoder_layers(staged.model))


class ScalingDecoder(LlamaModel):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        positions = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=positions) * 2
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class BetweenLayers(LlamaForCausalLM):
    """Model that scales hidden states between its layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = ScalingDecoder(config)


class ReadsEmbeddings(LlamaForCausalLM):
    """Model whose layers read the embeddings, too."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return super().forward(input_ids, first=self.model.embed_tokens(input_ids), **options)


class AddsEmbeddings(LlamaForCausalLM):
    """Model whose logits depend on the ids directly."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        output = super().forward(input_ids, **options)
        output.logits = output.logits + input_ids[..., None]
        return output


SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
GEMMA3N = {
    **SMALL,
    "intermediate_size": [48] * 3,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "layer_types": ["full_attention"] * 3,
    "activation_sparsity_pattern": [0.0] * 3,
}


def refused_model(case: str) -> Any:
    torch.manual_seed(0)
    if case.startswith("gemma3n"):
        shared = 1 if case == "gemma3n-shared" else 0
        return Gemma3nForCausalLM(Gemma3nTextConfig(**GEMMA3N, num_kv_shared_layers=shared)).eval()
    kinds = {"between": BetweenLayers, "embeddings": ReadsEmbeddings, "logits": AddsEmbeddings}
    return kinds[case](LlamaConfig(**SMALL)).eval()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("between", "BetweenLayers .*changes hidden states between its layers"),
        ("embeddings", r"ReadsEmbeddings .*layer 0 reads more of the text than hidden states \(first\)"),
        ("logits", "AddsEmbeddings .*logits depend on the text"),
        ("gemma3n", r"Gemma3nForCausalLM .*hidden states of the shape \[4, 1, 4, 32\]"),
        ("gemma3n-shared", "Gemma3nForCausalLM .*last 1 layers read keys and values of other layers"),
    ],
)
def test_what_a_model_does_outside_its_layers_is_refused(case: str, reason: str) -> None:
    model = refused_model(case)
    with pytest.raises(ValueError, match=reason + ".*Leave target.stage_layers out"):
        require_sliceable(EndSlice.cut(model))
