import json
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from outrider.models.drafters.objective import LossKind
from outrider.train.config import MAY_CHANGE_ON_RESUME, TrainConfig


def test_every_mistake_is_named_at_once_with_its_rule() -> None:
    with pytest.raises(ValueError) as caught:
        TrainConfig(steps=0, labels="guessed", learning_rate=0.0, max_grad_norm=-1.0, schedule="stairs", num_threads=0)
    message = str(caught.value)
    for name in ("steps is 0", "labels is 'guessed'", "learning_rate is 0.0", "max_grad_norm is -1.0", "schedule is 'stairs'"):
        assert name in message
    assert "num_threads is 0; it must be at least 1" in message
    with pytest.raises(ValueError, match="warmup_steps is 10"):
        TrainConfig(steps=10, warmup_steps=10)


def test_hydra_can_build_it_and_knows_no_other_keys() -> None:
    schema = OmegaConf.structured(TrainConfig)
    config = OmegaConf.to_object(OmegaConf.merge(schema, {"steps": 5, "max_positions": None}))
    assert config == TrainConfig(steps=5)
    with pytest.raises(Exception, match="learning_rat'"):
        OmegaConf.merge(schema, {"learning_rat": 1.0})


def test_the_options_that_may_change_on_resume_exist() -> None:
    known = OmegaConf.structured(TrainConfig).keys()
    assert len(MAY_CHANGE_ON_RESUME) == len(MAY_CHANGE_ON_RESUME & known) == 13


def test_a_loss_is_typed_by_its_name_and_a_wrong_one_names_all() -> None:
    schema = OmegaConf.structured(TrainConfig)
    config = OmegaConf.to_object(OmegaConf.merge(schema, {"steps": 5, "loss": "kl_tv"}))
    assert config == TrainConfig(steps=5, loss=LossKind.kl_tv)
    assert json.dumps(asdict(config)["loss"]) == '"kl_tv"'
    with pytest.raises(Exception, match="'guess'.*" + ".*".join(LossKind)):
        OmegaConf.merge(schema, {"loss": "guess"})
