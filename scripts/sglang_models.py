"""SGLang's models of drafters, from its own files, over plain layers in place of SGLang's, which want a GPU."""

import importlib.util
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

OWN = tuple(f"sglang.srt.models.{name}" for name in ("llama", "llama_eagle", "llama_eagle3"))
"""The files that are SGLang's own."""


def put(parameter: nn.Parameter, weight: torch.Tensor, rows: slice = slice(None)) -> None:
    """Load a tensor into rows of a parameter, whose shape it must have."""
    assert parameter.data[rows].shape == weight.shape, f"{tuple(weight.shape)} into {tuple(parameter.data[rows].shape)}"
    parameter.data[rows] = weight


class Linear(nn.Module):
    """Several linear layers side by side, whose weights are loaded one by one; gives a pair, as SGLang's do."""

    def __init__(self, width: int, sizes: dict[Any, int], bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(sizes.values()), width))
        self.bias = nn.Parameter(torch.empty(sum(sizes.values()))) if bias else None
        ends = torch.tensor(list(sizes.values())).cumsum(0).tolist()
        self.rows = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        for parameter in self.parameters():
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor, part: Any = None) -> None:
        put(parameter, weight, self.rows[part])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


class QKVParallelLinear(Linear):
    def __init__(self, width: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool, **_: Any) -> None:
        super().__init__(width, {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}, bias)


class MergedColumnParallelLinear(Linear):
    def __init__(self, width: int, sizes: Sequence[int], bias: bool, **_: Any) -> None:
        super().__init__(width, dict(enumerate(sizes)), bias)


class RowParallelLinear(Linear):
    def __init__(self, width: int, size: int, bias: bool, **_: Any) -> None:
        super().__init__(width, {None: size}, bias)


class RMSNorm(nn.Module):
    """With a residual, their sum is normalised, and given back besides."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

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


class RadixAttention(nn.Module):
    """Attention of one text to all of it so far, whose keys and values it keeps."""

    def __init__(self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, **_: Any) -> None:
        super().__init__()
        self.heads, self.scaling = (num_heads, num_kv_heads, num_kv_heads), scaling
        self.head_dim, self.kept = head_dim, [torch.empty(num_kv_heads, 0, head_dim) for _ in range(2)]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
        q, *new = (
            each.view(len(q), num, self.head_dim).transpose(0, 1) for each, num in zip((q, k, v), self.heads, strict=True)
        )
        self.kept = [torch.cat(pair, dim=1) for pair in zip(self.kept, new, strict=True)]
        total, own = self.kept[0].shape[1], q.shape[1]
        mask = torch.ones(own, total, dtype=torch.bool).tril(total - own)
        mixed = F.scaled_dot_product_attention(
            q[None], *(each[None] for each in self.kept), attn_mask=mask, scale=self.scaling, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).flatten(1)


def get_rope(head_dim: int, *, max_position: int, base: float, rope_scaling: dict[str, Any] | None, **_: Any) -> Any:
    """transformers' rotary embeddings, of what SGLang's model asks of its own: `rotary(positions, q, k)`."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

    rope = {"rope_type": "default", **(rope_scaling or {}), "rope_theta": base}
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": max_position}
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, rope_parameters=rope, **sizes))

    def turn(positions: torch.Tensor, *vectors: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = (each[0, :, None] for each in rotary(vectors[0], positions[None]))  # [token, 1, head_dim]
        heads = (each.view(len(each), -1, head_dim) for each in vectors)
        return [(each * cos + rotate_half(each) * sin).flatten(1) for each in heads]

    return turn


PARALLEL = SimpleNamespace(tp_size=1, tp_rank=0, pp_group=None)
PLAIN: dict[str, Any] = {
    "DenseSiluAndMulQuant": lambda *_: None,
    "DraftParallelSpec": lambda **_: None,
    "DraftTPExecution": SimpleNamespace(SINGLE_GROUP=None),
    "DualGemm": DualGemm,
    "LogitsProcessor": lambda *_: None,
    "MergedColumnParallelLinear": MergedColumnParallelLinear,
    "ParallelLMHead": Table,
    "QKVParallelLinear": QKVParallelLinear,
    "RMSNorm": RMSNorm,
    "RadixAttention": RadixAttention,
    "RowParallelLinear": RowParallelLinear,
    "SiluAndMul": SiluAndMul,
    "VocabParallelEmbedding": Table,
    "add_prefix": lambda name, prefix: f"{prefix}.{name}",
    "append_stages": lambda *_: (None, None),
    "declare_attn": lambda **_: None,
    "declare_ffn": lambda **_: None,
    "default_weight_loader": put,
    "envs": SimpleNamespace(SGLANG_ENABLE_WEIGHT_LOADER_V2=SimpleNamespace(get=lambda: False)),
    "get_layer_id": lambda name: None,
    "get_parallel": lambda: PARALLEL,
    "get_rope": get_rope,
    "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
    "is_npu": lambda: False,
    "is_xpu": lambda: False,
    "layer_stack": nullcontext,
}
"""What stands in for SGLang's own; all other names are classes without anything."""


class Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return PLAIN[name] if name in PLAIN else type(name, (), {})


class Finder(MetaPathFinder, Loader):
    """SGLang's modules: OWN from their files, and stubs for the rest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in OWN:
            return importlib.util.spec_from_file_location(name, self.folder / f"{name.rpartition('.')[2]}.py")
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "sglang" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def models() -> dict[str, Any]:
    """SGLang's classes of drafters by the name that a configuration gives them."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        found = importlib.util.find_spec("sglang")
        if found is None or not found.submodule_search_locations:
            sys.exit("there is no sglang in this environment")
        sys.meta_path.insert(0, Finder(Path(found.submodule_search_locations[0]) / "srt" / "models"))
    return {each.__name__: each for name in OWN[1:] for each in importlib.import_module(name).EntryClass}
