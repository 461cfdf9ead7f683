import json
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter, ValidationError

from outrider.models.drafters.losses import LossKind
from outrider.train.config import MAY_CHANGE_ON_RESUME, TrainConfig

from ..wrong_values import problems


def test_all_wrong_values_are_listed_at_once() -> None:
    values = {"learning_rate": 0.0, "max_grad_norm": -1.0, "weight_decay": float("inf"), "seed": 2**32}
    assert problems(TrainConfig, steps=0, batch_size=True, labels="guessed", schedule="stairs", **values) == [
        "steps=0: must be above 0",
        "batch_size=true: must be a whole number",
        'labels="guessed": must be one of distilled, text',
        "learning_rate=0.0: must be above 0",
        'schedule="stairs": must be one of cosine, linear, constant',
        "weight_decay=Infinity: must be a finite number",
        "max_grad_norm=-1.0: must be above 0",
        "seed=4294967296: must be below 4294967296",
    ]


def test_all_contradictions_are_listed_at_once() -> None:
    first, second, third = problems(TrainConfig, steps=10, warmup_steps=10, validate_every=5)[:2] + problems(
        TrainConfig, steps=10, patience=2
    )
    assert first.startswith("warmup_steps is 10, not less than steps")
    assert second.startswith("validate_every is set, but validation_texts is 0")
    assert third.startswith("patience is set, but validate_every is not")


def test_a_global_batch_size_and_an_accumulation_contradict_each_other() -> None:
    (problem,) = problems(TrainConfig, steps=10, global_batch_size=64, gradient_accumulation=4)
    assert problem.startswith("global_batch_size is 64 and gradient_accumulation 4;")
    assert TrainConfig(steps=10, global_batch_size=64, gradient_accumulation=1).global_batch_size == 64


def test_the_options_that_may_change_on_resume_exist() -> None:
    known = TrainConfig.__dataclass_fields__.keys()
    assert len(MAY_CHANGE_ON_RESUME) == len(MAY_CHANGE_ON_RESUME & known) == 8


def test_a_loss_is_given_by_name_and_a_wrong_name_lists_all() -> None:
    config = TypeAdapter(TrainConfig).validate_json('{"steps": 5, "loss": "kl_acceptance"}')
    assert config == TrainConfig(steps=5, loss=LossKind.kl_acceptance)
    assert json.dumps(asdict(config)["loss"]) == '"kl_acceptance"'
    with pytest.raises(ValidationError, match=".*".join(LossKind) + "(.|\n)*'guess'"):
        TypeAdapter(TrainConfig).validate_json('{"steps": 5, "loss": "guess"}')
