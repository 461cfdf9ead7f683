"""Recurrent layers (linear attention, Mamba, short convolutions) that read draft trees.

A mixer is the part of such a layer that reads tokens in their order, and keeps a state of the text
in place of keys and values. A state can't be cut back to the accepted tokens. So none is kept
before the tokens are accepted:

    prompts   rows of equal length are read together, without padding, which would enter the state
    tree      the path to each leaf is a row, which begins with a copy of its text's state
    commit    the mixer reads the accepted tokens again, from the state of the text

In a tree, linear layers compute each node once, though it is on several paths. At the commit they
return these results again, so it reads no weights of theirs. All of this is around the mixers'
own code: see `Mixer`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn.functional import pad
from transformers import Cache

from ...data.device import copied_to_host, to_device

STATE_METHODS = ("update_conv_state", "update_recurrent_state")
"""Methods of transformers' caches that only mixers call."""

State = dict[tuple[str, int], torch.Tensor]
"""States of one mixer, by their kind and number: [batch, ...]."""
Hidden = Float[torch.Tensor, "batch token width"]
RowsOf = dict[int, list[int]]
"""Rows of the batch by a length that they share."""


class MixerCache:
    """The cache of one mixer in one call, by the methods of transformers' caches that mixers use."""

    def __init__(self, state: State) -> None:
        self.state = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.state.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.state.get(("recurrent", state_idx))

    def update_conv_state(
        self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Append inputs of a convolution [batch, channel, token]; return them with those that it still sees."""
        old = self.state.get(("conv", state_idx))
        if old is None:
            width = conv_kernel_size or states.shape[-1]
            seen = pad(states, (max(0, width - states.shape[-1]), 0))
        else:
            width, seen = old.shape[-1], torch.cat([old, states], dim=-1)
        self.state["conv", state_idx] = seen[..., -width:]
        return seen

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self.state["recurrent", state_idx] = states
        return states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.state)


class Mixer:
    """A mixer of a model: runs its own code on other inputs, another state, and other results of linear layers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
        in_linears = {parameter for linear in self.linears for parameter in linear.parameters()}
        self.small_parameters = [parameter for parameter in module.parameters() if parameter not in in_linears]
        """What a commit reads: all but the linear layers' parameters."""
        self._signature = inspect.signature(module.forward)
        self._input = next(iter(self._signature.parameters))
        self._scope: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
        functions = {name: value for name, value in self._scope.items() if inspect.isfunction(value)}
        self._chunked = {name: (value, chunk) for name, value in functions.items() if (chunk := _chunk(value))}

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Hidden, dict[str, Any]]:
        """Return the input of a call, and all of its arguments by name. Raises ValueError for a call without a cache."""
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        arguments |= arguments.pop("kwargs", {})
        if not any(isinstance(value, Cache) for value in arguments.values()):
            raise ValueError(f"{type(self.module).__name__} gets no cache, so its state stays unknown. Choose another target")
        return arguments[self._input], arguments

    def run(self, forward: Callable[..., Any], hidden: Hidden, state: State, arguments: dict[str, Any]) -> tuple[Any, State]:
        """Return what `forward` returns for another input and state, and the new state."""
        cache = MixerCache(state)
        arguments = {name: cache if isinstance(value, Cache) else value for name, value in arguments.items()}
        with self._short_chunks(hidden.shape[1]):
            return forward(**arguments | {self._input: hidden}), cache.state

    @contextmanager
    def _short_chunks(self, num_tokens: int) -> Iterator[None]:
        """Let PyTorch's own kernels read so few tokens in one chunk of their number, inside the block.

        They pad all texts to whole chunks, and a chunk takes as many steps as it has tokens. The size is an
        attribute of the mixer, or a function's default.
        """
        own = vars(self.module).get("chunk_size")
        try:
            if own is not None:
                vars(self.module)["chunk_size"] = min(own, num_tokens)
            for name, (function, chunk) in self._chunked.items():
                self._scope[name] = partial(function, chunk_size=min(chunk, num_tokens))
            yield
        finally:
            self._scope.update((name, function) for name, (function, _) in self._chunked.items())
            if own is not None:
                vars(self.module)["chunk_size"] = own


def is_of_tokens(value: Any, num_tokens: int) -> bool:
    """Whether a part of a mixer's output has a value for each token."""
    return isinstance(value, torch.Tensor) and value.shape[1:2] == (num_tokens,)


def of_tokens(output: Any, read: Hidden, change: Callable[[Hidden], Hidden]) -> Any:
    """Return a mixer's output with its values of the tokens that it has `read` changed.

    It may be a tuple, such as queries, keys and values: [row, token, head, dimension].
    """
    if isinstance(output, tuple):
        return tuple(of_tokens(part, read, change) for part in output)
    if not is_of_tokens(output, read.shape[1]) or len(output) != len(read):
        return output
    return change(output.flatten(2)).unflatten(2, output.shape[2:])


def find_mixers(model: nn.Module) -> list[Mixer]:
    """Return the mixers of a model or layer, in the order of its modules; empty if it has no recurrent layers."""
    return [Mixer(module) for module in model.modules() if _is_mixer(type(module))]  # type: ignore[arg-type] # its hash


@cache  # a model has many modules of few classes
def _is_mixer(kind: type) -> bool:
    with suppress(AttributeError, TypeError, OSError):  # built in, or made by code
        source = inspect.getsource(inspect.unwrap(kind.forward))  # type: ignore[attr-defined]
        return any(method in source for method in STATE_METHODS)
    return False


def _chunk(function: Any) -> int:
    """Return a function's default number of tokens in a chunk; 0 if it has none."""
    default = getattr(inspect.signature(function).parameters.get("chunk_size"), "default", None)
    return default if isinstance(default, int) else 0


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths to the leaves of a batch's trees, as rows of equal length.

    Entry 0 is the last committed token, entry n + 1 is node n.
    """

    entries: Int[torch.Tensor, "batch leaf depth"]
    """The entries of each path from the last token on; zeros behind its end."""
    places: Int[torch.Tensor, "batch entry"]
    """A place of each entry among its row's leaf x depth tokens."""

    @classmethod
    def of(cls, lineage: Int[torch.Tensor, "batch node depth"]) -> "Paths":
        """Find the paths on the host, which waits for the tree."""
        nodes = lineage.cpu().numpy()
        batch, num_nodes, _ = nodes.shape
        is_node = nodes >= 0
        depths = is_node.sum(-1)
        # 1. Leaves: nodes that are no other node's ancestor. A row without nodes is the path of its last token.
        is_leaf = depths > 0
        row, _, _ = ancestors = np.nonzero(is_node & (nodes != np.arange(num_nodes)[:, None]))
        is_leaf[row, nodes[ancestors]] = False
        leaves = [np.flatnonzero(marks) for marks in is_leaf]
        num_leaves, length = max(1, *map(len, leaves)), 1 + int(depths.max(initial=0))
        # 2. Their paths, from the root on.
        entries = np.zeros((batch, num_leaves, length), np.int64)
        places = np.zeros((batch, 1 + num_nodes), np.int64)
        for index, of_row in enumerate(leaves):
            for place, leaf in enumerate(of_row):
                depth = depths[index, leaf]
                path = 1 + nodes[index, leaf, :depth][::-1]
                entries[index, place, 1 : 1 + depth] = path
                places[index, path] = place * length + np.arange(1, 1 + depth)
        return cls(to_device(entries, lineage.device), to_device(places, lineage.device))

    @property
    def is_chain(self) -> bool:
        """Whether the entries already are one path in their order."""
        return self.entries.shape[1] == 1 and self.entries.shape[2] == self.places.shape[1]

    def spread(self, values: Float[torch.Tensor, "batch entry _"]) -> Float[torch.Tensor, "row depth _"]:
        """Put the values of entries on all paths; each path is a row."""
        if self.is_chain:
            return values
        return take(values, self.entries.flatten(1)).view(-1, self.entries.shape[2], values.shape[2])

    def gather(self, values: Float[torch.Tensor, "row depth _"]) -> Float[torch.Tensor, "batch entry _"]:
        """Take each entry's value from a path that it is on."""
        if self.is_chain:
            return values
        return take(values.reshape(len(self.entries), -1, values.shape[2]), self.places)


def take(
    values: Float[torch.Tensor, "batch token width"], tokens: Int[torch.Tensor, "batch taken"]
) -> Float[torch.Tensor, "batch taken width"]:
    """Take tokens of each row."""
    return values.gather(1, tokens[:, :, None].expand(-1, -1, values.shape[2]))


@dataclass(slots=True)
class Reading:
    """What one mixer read in a tree: its input, and the results of its linear layers, for each entry."""

    hidden: Float[torch.Tensor, "batch entry width"]
    arguments: dict[str, Any]
    state: State = field(default_factory=dict)
    """The state after the last token, if nothing else was read."""
    results: dict[nn.Linear, list[Float[torch.Tensor, "batch entry width"]]] = field(default_factory=dict)


class RecurrentStates:
    """The states of a model's mixers after the committed text of each row, and those of a tree's pass until its commit."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self._mixers = mixers
        self._states: dict[Mixer, State] = {}
        self._readings: dict[Mixer, Reading] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the states of all rows."""
        return sum(tensor.nbytes for state in self._states.values() for tensor in state.values())

    def restart(self) -> None:
        """Drop all rows."""
        self._states, self._readings = {}, {}

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        for mixer, state in self._states.items():
            self._states[mixer] = {key: tensor[list(rows)] for key, tensor in state.items()}
        self._readings = {}

    def take(self, row: int) -> list[State]:
        """Copy the states of a row to the host, for `put`."""
        states = [self._states[mixer] for mixer in self._mixers]
        tensors = [tensor[row : row + 1] for state in states for tensor in state.values()]
        copies = iter(copied_to_host(tensors, tensors[0].device))  # the host waits once
        return [{key: next(copies) for key in state} for state in states]

    def put(self, texts: Sequence[list[State]]) -> None:
        """Append rows with states that `take` copied."""
        for mixer, *kept in zip(self._mixers, *texts, strict=True):
            device = next(mixer.module.parameters()).device
            parts = [*filter(None, [self._states.get(mixer)]), *kept]
            self._states[mixer] = {key: torch.cat([part[key].to(device) for part in parts]) for key in kept[0]}

    def reading_prompts(self, lengths: Sequence[int]) -> AbstractContextManager[None]:
        """Let mixers read prompts of these lengths inside the block; their states are committed at once."""
        return self._calling(partial(self._read_prompts, rows_by_value(lengths)))

    def _read_prompts(self, rows_of: RowsOf, mixer: Mixer, forward: Any, hidden: Hidden, arguments: Any) -> Any:
        outputs, states = [], []
        for length, rows in rows_of.items():
            read = hidden[rows, :length]
            output, state = mixer.run(forward, read, {}, arguments)
            outputs.append(of_tokens(output, read, lambda values: pad(values, (0, 0, 0, hidden.shape[1] - values.shape[1]))))
            states.append(state)
        self._states[mixer] = joined(rows_of, states)
        several = zip(*(output if isinstance(output, tuple) else (output,) for output in outputs), strict=True)
        whole = tuple(
            joined(rows_of, [{0: part} for part in parts])[0]
            if is_of_tokens(parts[0], hidden.shape[1]) and len({part.shape[1:] for part in parts}) == 1
            else parts[0]
            for parts in several
        )
        return whole if isinstance(outputs[0], tuple) else whole[0]

    def reading_tree(self, lineage: Int[torch.Tensor, "batch node depth"]) -> AbstractContextManager[None]:
        """Let mixers read the last token and a tree inside the block; states stay as they are."""
        self._readings = {}
        return self._calling(partial(self._read_tree, Paths.of(lineage)))

    def _read_tree(self, paths: Paths, mixer: Mixer, forward: Any, hidden: Hidden, arguments: Any) -> Any:
        # Kernels for one token write to the state that they get, so each path has a copy.
        state = {key: tensor.repeat_interleave(paths.entries.shape[1], 0) for key, tensor in self._states[mixer].items()}
        rows, reading = paths.spread(hidden), Reading(hidden, arguments)

        def compute(linear: nn.Linear, plain: Any, values: torch.Tensor) -> torch.Tensor:
            if values.shape[:-1] != rows.shape[:-1]:
                raise ValueError(
                    f"{type(mixer.module).__name__} has a linear layer that reads something else than tokens. Choose another "
                    "target"
                )
            result: torch.Tensor = plain(paths.gather(values))
            reading.results.setdefault(linear, []).append(result)
            return paths.spread(result)

        with replaced(mixer.linears, compute):
            output, after = mixer.run(forward, rows, state, arguments)
        if hidden.shape[1] == 1:  # of a tree, the states at the ends of all paths would take much memory
            reading.state = after
        self._readings[mixer] = reading
        return of_tokens(output, rows, paths.gather)

    def keep(self, entries: Int[torch.Tensor, "batch kept"] | None, counts: Sequence[int]) -> None:
        """Commit the first `counts` of each row's `entries` of the tree that was read last.

        Without such a tree the states are those of the committed text already.
        """
        if entries is None:
            entries = torch.arange(max(counts)).expand(len(counts), -1)
        rows_of = rows_by_value(counts)
        for mixer, reading in self._readings.items():
            if reading.hidden.shape[1] == 1 and list(rows_of) == [1]:
                self._states[mixer] = reading.state  # plain decoding commits all that it reads
                continue
            entries = entries.to(reading.hidden.device)
            parts = [self._advanced(mixer, reading, rows, entries[rows, :count]) for count, rows in rows_of.items()]
            self._states[mixer] = joined(rows_of, parts)
        self._readings = {}

    def _advanced(self, mixer: Mixer, reading: Reading, rows: list[int], entries: Int[torch.Tensor, "row kept"]) -> State:
        """Return the states of `rows` after some entries in each, as many in all."""
        before = {key: tensor[rows] for key, tensor in self._states[mixer].items()}
        if not entries.shape[1]:
            return before
        results = {linear: iter(calls) for linear, calls in reading.results.items()}

        def repeat(linear: nn.Linear, plain: Any, values: torch.Tensor) -> torch.Tensor:
            return take(next(results[linear])[rows], entries)

        with replaced(mixer.linears, repeat):
            hidden = take(reading.hidden[rows], entries)
            return mixer.run(mixer.module.forward, hidden, before, reading.arguments)[1]

    def _calling(self, read: Callable[[Mixer, Any, Hidden, Any], Any]) -> AbstractContextManager[None]:
        """Let `read` compute the mixers inside the block."""
        mixers = {mixer.module: mixer for mixer in self._mixers}

        def call(module: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
            return read(mixers[module], plain, *mixers[module].bind(args, kwargs))

        return replaced([*mixers], call)


def rows_by_value(values: Sequence[int]) -> RowsOf:
    """Return the rows of each value."""
    rows_of: RowsOf = {}
    for row, value in enumerate(values):
        rows_of.setdefault(value, []).append(row)
    return rows_of


def joined(rows_of: RowsOf, parts: Sequence[dict[Any, torch.Tensor]]) -> dict[Any, torch.Tensor]:
    """Return the tensors of all rows in their order, from those of each group of rows."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort([row for rows in rows_of.values() for row in rows]).tolist()
    return {key: torch.cat([state[key] for state in parts])[order] for key in parts[0]}


@contextmanager
def replaced(modules: Sequence[nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Let `call` compute modules inside the block; it gets the module and its own forward first."""
    with ExitStack() as stack:
        for module in modules:
            own, forward = vars(module).get("forward"), module.forward
            vars(module)["forward"] = partial(call, module, forward)
            stack.callback(_restore, module, own)
        yield


def _restore(module: nn.Module, own: Any) -> None:
    if own is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = own
