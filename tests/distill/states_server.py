"""A server of completions for tests that also writes the states of prompts to files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.hidden_states import decoder_layers

from .completions import Server

LAYERS = [0, 1]


class StatesServer(Server):
    """Writes the states of each prompt into a folder, as vLLM does. `spoil` changes the tensors of a file."""

    def __init__(self, target: HFTarget, folder: Path) -> None:
        super().__init__(target)
        folder.mkdir(exist_ok=True)
        self.folder, self.num_files = folder, 0
        self.spoil: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None
        self.called = folder
        """The folder's name on the server's machine."""

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = super().complete({"top_k": -1, "top_p": 1.0, "seed": 0, **body})
        tokens, inputs = torch.tensor(body["prompt"]), list[torch.Tensor]()
        model = self.target.model
        parts = [*decoder_layers(model), model.model.norm]

        def keep(part: Any, args: Any, kwargs: Any) -> None:
            inputs.append((*args, *kwargs.values())[0])

        kept = (*(parts[layer] for layer in LAYERS), parts[-1])
        hooks = [part.register_forward_pre_hook(keep, with_kwargs=True) for part in kept]
        with torch.inference_mode():
            model(tokens[None])
        for hook in hooks:
            hook.remove()
        tensors = {"hidden_states": torch.stack([states[0] for states in inputs], dim=1), "token_ids": tokens}
        self.spoil(tensors)
        self.num_files += 1
        path = self.folder / f"{self.server_address[1]}-{self.num_files}.safetensors"
        (self.folder / f"{path.name}.lock").touch()
        save_file(tensors, path)
        return {**reply, "kv_transfer_params": {"hidden_states_path": str(self.called / path.name)}}
