"""SGLang's and vLLM's models of drafters, from the engines' files, over plain layers.

The engines' own layers need a GPU.
"""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

OWN = {
    "sglang.srt.models": ("llama", "llama_eagle", "llama_eagle3"),
    "vllm.model_executor.models": (
        *("utils", "llama", "llama_eagle", "llama_eagle3"),
        *("qwen2", "qwen3", "qwen3_dflash", "qwen3_dspark"),
    ),
}
"""Files that are imported from the engines, by package."""


def put(parameter: nn.Parameter, weight: torch.Tensor, rows: slice = slice(None)) -> None:
    """Load a tensor into rows of a parameter, which must have the same shape."""
    assert parameter.data[rows].shape == weight.shape, f"{tuple(weight.shape)} into {tuple(parameter.data[rows].shape)}"
    parameter.data[rows] = weight


class Linear(nn.Module):
    """Several merged linear layers, loaded one by one; returns a pair, like SGLang's."""

    def __init__(self, width: int, sizes: dict[Any, int], bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(sizes.values()), width))
        self.bias = nn.Parameter(torch.empty(sum(sizes.values()))) if bias else None
        ends = torch.tensor(list(sizes.values())).cumsum(0).tolist()
        self.rows = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        for parameter in self.parameters():
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor, part: Any = None) -> None:
        # vLLM's loader stores the part as an attribute of the tensor
        put(parameter, weight, self.rows[getattr(weight, "shard_id", part)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


class QKVParallelLinear(Linear):
    def __init__(
        self, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int, bias: bool, **_: Any
    ) -> None:
        kv_size = total_num_kv_heads * head_size
        super().__init__(hidden_size, {"q": total_num_heads * head_size, "k": kv_size, "v": kv_size}, bias)


class MergedColumnParallelLinear(Linear):
    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool, **_: Any) -> None:
        super().__init__(input_size, dict(enumerate(output_sizes)), bias)


class RowParallelLinear(Linear):
    def __init__(self, input_size: int, output_size: int, bias: bool, **_: Any) -> None:
        super().__init__(input_size, {None: output_size}, bias)


class ReplicatedLinear(nn.Linear):
    def __init__(self, input_size: int, output_size: int, bias: bool, **_: Any) -> None:
        super().__init__(input_size, output_size, bias)


class RMSNorm(nn.Module):
    """RMS norm; with a residual it normalises the sum, and returns the sum too."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps, self.variance_epsilon = nn.Parameter(torch.empty(size)), eps, eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self(x + residual), x + residual

    def fuse_input_quant(self, layer: nn.Module) -> None:
        pass


class Table(nn.Embedding):
    def __init__(self, num_tokens: int, width: int, **_: Any) -> None:
        super().__init__(num_tokens, width)


class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class DualGemm:
    def __init__(self, *_: Any) -> None: ...

    def can_run(self, *_: Any) -> bool:
        return False


class Attention(nn.Module):
    """Causal attention over one text, with its own cache of keys and values."""

    def __init__(self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, **_: Any) -> None:
        super().__init__()
        self.heads, self.scaling = (num_heads, num_kv_heads, num_kv_heads), scaling
        self.head_dim, self.kept = head_dim, [torch.empty(num_kv_heads, 0, head_dim) for _ in range(2)]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any = None) -> torch.Tensor:
        q, *new = (
            tensor.view(len(q), num, self.head_dim).transpose(0, 1) for tensor, num in zip((q, k, v), self.heads, strict=True)
        )
        self.kept = [torch.cat(pair, dim=1) for pair in zip(self.kept, new, strict=True)]
        total, num_queries = self.kept[0].shape[1], q.shape[1]
        mask = torch.ones(num_queries, total, dtype=torch.bool).tril(total - num_queries)
        mixed = F.scaled_dot_product_attention(
            q[None], *(tensor[None] for tensor in self.kept), attn_mask=mask, scale=self.scaling, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).flatten(1)


def get_rope(
    head_dim: int,
    *,
    max_position: int,
    base: float | None = None,
    rope_scaling: Any = None,
    rope_parameters: Any = None,
    **_: Any,
) -> Any:
    """Return transformers' rotary embeddings with the engines' interface.

    The interface is `rotary(positions, q, k)`.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

    rope = {"rope_type": "default", **(rope_scaling or rope_parameters or {})}
    rope["rope_theta"] = rope["rope_theta"] if base is None else base
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": max_position}
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, rope_parameters=rope, **sizes))

    def turn(positions: torch.Tensor, *vectors: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = (table[0, :, None] for table in rotary(vectors[0], positions[None]))  # [token, 1, head_dim]
        heads = (vector.view(len(vector), -1, head_dim) for vector in vectors)
        return [(head * cos + rotate_half(head) * sin).flatten(1) for head in heads]

    return turn


def decorator(*arguments: Any, **_: Any) -> Any:
    """Return a decorator without effect; it may be used with or without arguments."""
    return arguments[0] if arguments and isinstance(arguments[0], type) else lambda decorated: decorated


class VllmConfig(SimpleNamespace):
    """The parts of vLLM's configuration that its models of drafters read."""

    current: "VllmConfig"

    @staticmethod
    def of(config: Any, *, target_layers: int, vocab_size: int) -> "VllmConfig":
        methods = {"get_total_num_hidden_layers": lambda: target_layers, "get_num_layers": lambda _: target_layers}
        target = SimpleNamespace(dtype=torch.float32, hf_config=config, get_vocab_size=lambda: vocab_size, **methods)
        draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config), parallel_drafting=False)
        nothing = dict.fromkeys(("cache_config", "load_config", "parallel_config", "quant_config"))
        VllmConfig.current = VllmConfig(model_config=target, speculative_config=draft, **nothing)
        return VllmConfig.current

    @staticmethod
    def get_quantization_config(*_: Any) -> None: ...


PARALLEL = SimpleNamespace(tp_size=1, tp_rank=0, pp_group=None)
PLAIN: dict[str, Any] = {
    "Attention": Attention,
    "AttentionType": SimpleNamespace(DECODER="decoder", ENCODER_ONLY="encoder_only"),
    "DenseSiluAndMulQuant": lambda *_: None,
    "DraftParallelSpec": lambda **_: None,
    "DraftTPExecution": SimpleNamespace(SINGLE_GROUP=None),
    "DualGemm": DualGemm,
    "LogitsProcessor": lambda *_, **__: lambda head, hidden: F.linear(hidden, head.weight),
    "MergedColumnParallelLinear": MergedColumnParallelLinear,
    "ParallelLMHead": Table,
    "QKVParallelLinear": QKVParallelLinear,
    "RMSNorm": RMSNorm,
    "RadixAttention": Attention,
    "ReplicatedLinear": ReplicatedLinear,
    "RowParallelLinear": RowParallelLinear,
    "SiluAndMul": SiluAndMul,
    "VllmConfig": VllmConfig,
    "VocabParallelEmbedding": Table,
    "add_prefix": lambda name, prefix: f"{prefix}.{name}",
    "append_stages": lambda *_: (None, None),
    "as_embedding_model": lambda model, **_: model,
    "as_seq_cls_model": lambda model, **_: model,
    "declare_attn": lambda **_: None,
    "declare_ffn": lambda **_: None,
    "direct_register_custom_op": lambda **_: None,
    "default_weight_loader": put,
    "envs": SimpleNamespace(SGLANG_ENABLE_WEIGHT_LOADER_V2=SimpleNamespace(get=lambda: False)),
    "get_current_vllm_config": lambda: VllmConfig.current,
    "get_layer_id": lambda name: None,
    "get_parallel": lambda: PARALLEL,
    "get_rope": get_rope,
    "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
    "get_tensor_model_parallel_world_size": lambda: 1,
    "init_logger": logging.getLogger,
    "is_npu": lambda: False,
    "is_xpu": lambda: False,
    "layer_stack": nullcontext,
    "maybe_fused_act_quant": lambda activation, x, layer: activation(x),
    "support_quantized_model_reload_from_hp_weights": lambda function: function,
    "support_torch_compile": decorator,
    "supports_any_eagle": lambda model: False,
}
"""Replacements for the engines' names; all other names become empty classes."""


class Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return PLAIN[name] if name in PLAIN else type(name, (), {})


class Finder(MetaPathFinder, Loader):
    """Importer of an engine's modules: those of OWN from `folder`, and stubs for all others."""

    def __init__(self, package: str, folder: Path) -> None:
        self.engine, self.folder = package.partition(".")[0], folder
        self.own = {f"{package}.{name}" for name in OWN[package]}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self.own:
            return importlib.util.spec_from_file_location(name, self.folder / f"{name.rpartition('.')[2]}.py")
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == self.engine else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def own_modules(package: str) -> list[Any]:
    """Import an engine's modules of drafters from its files in this environment."""
    engine, _, rest = package.partition(".")
    if not any(isinstance(finder, Finder) and finder.engine == engine for finder in sys.meta_path):
        spec = importlib.util.find_spec(engine)
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"there is no {engine} in this environment")
        sys.meta_path.insert(0, Finder(package, Path(spec.submodule_search_locations[0], *rest.split("."))))
    return [importlib.import_module(f"{package}.{name}") for name in OWN[package]]


def require_taken(model: nn.Module, weights: dict[str, torch.Tensor], *, shared: Sequence[str]) -> None:
    """Raise AssertionError unless all weights were loaded, and no tensor was ignored.

    The model was filled with NaN before. `shared` are parameters that are the target's.
    """
    numbers = {
        name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point() and name not in shared
    }
    left = [name for name, tensor in numbers.items() if tensor.isnan().any()]
    counts = [sum(tensor.numel() for tensor in some.values() if tensor.is_floating_point()) for some in (numbers, weights)]
    assert not left, f"{left} were left without numbers"
    assert counts[0] == counts[1], f"there are {counts[1]} numbers, and the engine took {counts[0]}"


def fill_with_nan(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
