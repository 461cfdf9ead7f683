"""What a reference gives each token of a served answer: how far it is from the best one, and its quantile."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...models.llm.hf_target import HFTarget
from .client import Reply, Server

END = -1
"""Stands for all stop tokens, which end an answer in the same way."""
ROWS = 16
"""Most answers that the target reads together."""
NUM_TOP = 20
"""Most probable tokens that a reference server is asked for; llama.cpp and vLLM give so many by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The reference's view of one token, from its distribution at temperature 1."""

    deficit: float
    """Nats by which the token is less probable than the most probable one. Of a token outside a server's
    top tokens this is a lower bound."""
    greater: float
    """Sum of the probabilities of all more probable tokens."""
    own: float
    """The token's probability; outside the top tokens, that of all others together."""


class Reader:
    """Reads each different answer once."""

    def __init__(self, reference: "TargetHere | ServerThere") -> None:
        self._reference = reference
        self._known: dict[tuple[tuple[int, ...], ...], list[Reading]] = {}

    def read(
        self, prompts: Sequence[Sequence[int]], replies: Sequence[Reply], told: Callable[[], object]
    ) -> list[list[Reading]]:
        """Return the readings of each answer; calls `told` for each."""
        keys = [(tuple(prompt), tuple(_outcomes(reply))) for prompt, reply in zip(prompts, replies, strict=True)]
        new: dict[tuple[int, ...], dict[Any, Reply]] = {}
        for key, reply in zip(keys, replies, strict=True):
            if key not in self._known:
                new.setdefault(key[0], {})[key] = reply
        for prompt, answers in new.items():
            for start in range(0, len(answers), ROWS):
                some = dict(list(answers.items())[start : start + ROWS])
                self._known.update(zip(some, self._reference.read(prompt, list(some.values())), strict=True))
        for _ in replies:
            told()
        return [self._known[key] for key in keys]


@dataclass(frozen=True, kw_only=True)
class TargetHere:
    """The target in this process: it reads several answers to a prompt in one pass."""

    target: HFTarget

    @torch.inference_mode()
    def read(self, prompt: Sequence[int], replies: Sequence[Reply]) -> list[list[Reading]]:
        """Read answers with the bare model, without KV cache or tree."""
        longest = max(len(reply.tokens) for reply in replies)
        rows = [[*prompt, *reply.tokens, *[0] * (longest - len(reply.tokens))] for reply in replies]
        logits = self.target.plain_logits(torch.tensor(rows, device=self.target.device), longest + 1)
        return [self._readings(row, _outcomes(reply)) for row, reply in zip(logits, replies, strict=True)]

    def _readings(self, logits: torch.Tensor, answer: Sequence[int]) -> list[Reading]:
        logprobs = logits[: len(answer)].cpu().double().log_softmax(-1)
        stops = list(self.target.stop_ids)
        together = logprobs[:, stops].logsumexp(1, keepdim=True)  # -inf without stop tokens
        logprobs = torch.cat([logprobs.index_fill(1, torch.tensor(stops, dtype=torch.long), -torch.inf), together], dim=1)
        own, probs = logprobs.gather(1, torch.tensor(answer)[:, None] % logprobs.shape[1]), logprobs.exp()
        deficits = logprobs.amax(1) - own[:, 0]
        if logprobs.isnan().any():
            raise ValueError("the target's logits here are not numbers (NaN), so they judge nothing: load it in another dtype")
        greater, equal = (probs * (logprobs > own)).sum(1), (probs * (logprobs == own)).sum(1)
        columns = zip(deficits.tolist(), greater.tolist(), equal.tolist(), strict=True)
        return [Reading(deficit=deficit, greater=above, own=same) for deficit, above, same in columns]


@dataclass(frozen=True, kw_only=True)
class ServerThere:
    """Another server. It continues the answer greedily, and anew after each token in which the two differ."""

    server: Server
    stop_ids: Sequence[int]

    def read(self, prompt: Sequence[int], replies: Sequence[Reply]) -> list[list[Reading]]:
        """Read each answer with a request for each token that isn't this server's own choice, and one more."""
        return [self._read(prompt, reply) for reply in replies]

    def _read(self, prompt: Sequence[int], reply: Reply) -> list[Reading]:
        answer, readings = _outcomes(reply), list[Reading]()
        while len(readings) < len(answer):
            start = len(readings)
            text = [*prompt, *reply.tokens[:start]]
            own = self.server.complete(text, max_tokens=len(answer) - start, num_top=NUM_TOP)
            for place, (token, choice) in enumerate(zip(answer[start:], _outcomes(own), strict=False)):
                top = own.tops[place] if place < len(own.tops) else {}
                if choice == END and not top and token != END:  # llama.cpp gives no probabilities where it ends
                    here = [*prompt, *reply.tokens[: len(readings)]]
                    asked = self.server.complete(here, max_tokens=1, num_top=NUM_TOP, may_end=False)
                    top = asked.tops[0] if asked.tops else {}
                pooled = _pooled_top(top, self.stop_ids)
                if token == choice and not top:
                    readings.append(Reading(deficit=0.0, greater=0.0, own=1.0))
                elif not top:
                    raise ValueError(f"{self.server.url} gives no log-probabilities, which a reference needs")
                elif token not in pooled and len(top) < NUM_TOP:
                    raise ValueError(
                        f"{self.server.url} gives the log-probabilities of {len(top)} tokens and was asked for "
                        f"{NUM_TOP}; a reference needs them (vLLM: --max-logprobs)"
                    )
                else:
                    readings.append(_reading_of_top(pooled, token))
                if token != choice:
                    break
            if len(readings) == start:
                raise ValueError(f"{self.server.url} answers a prompt of {len(text)} tokens with nothing, not even an end")
        return readings


def _outcomes(reply: Reply) -> list[int]:
    return [*reply.tokens, END] if reply.ended else reply.tokens


def _pooled_top(top: Mapping[int, float], stop_ids: Sequence[int]) -> dict[int, float]:
    """Return the top tokens with the stop tokens as one."""
    stops = [value for token, value in top.items() if token in stop_ids]
    others = {token: value for token, value in top.items() if token not in stop_ids}
    return others | ({END: float(torch.tensor(stops).logsumexp(0))} if stops else {})


def _reading_of_top(top: Mapping[int, float], token: int) -> Reading:
    values = torch.tensor(list(top.values()), dtype=torch.float64)
    probs = values.exp()
    own = top.get(token)
    if own is None:
        return Reading(
            deficit=float(values.max() - values.min()), greater=float(probs.sum()), own=max(0.0, 1 - float(probs.sum()))
        )
    return Reading(
        deficit=float(values.max()) - own, greater=float(probs[values > own].sum()), own=float(probs[values == own].sum())
    )
