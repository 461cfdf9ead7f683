"""The whole training stage in one process."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.chat import template_digest
from outrider.data.shards import label_store
from outrider.data.types import DrafterBatch
from outrider.models.drafters import DRAFTERS, load_drafter, parse_drafter
from outrider.models.drafters.objective import Loss, Objective
from outrider.models.drafters.redrafter import Redrafter
from outrider.models.drafters.saved.folder import read_training_facts
from outrider.models.llm.hf_target import HFTarget
from outrider.models.machine import hardware
from outrider.train import loop as loop_module
from outrider.train import run as run_module
from outrider.train.checkpoint import complete_checkpoints
from outrider.train.config import TrainConfig
from outrider.train.records import read_records
from outrider.train.run import require_whole_shards, train

from .conftest import TRAIN, Run, no_file_above, write_shards
from .resumed import TIMING

RunTrain = Callable[..., Run]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.drafter_dir / "model.safetensors")


def records(run: Run) -> list[dict[str, Any]]:
    """Read the records without times."""
    lines = read_records(run.train_dir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMING} for line in lines]


def assert_close(left: Run, right: Run) -> None:
    ours, theirs = weights(left), weights(right)
    assert len(ours) >= 4
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Redrafter]]:
    """Register a drafter of kind `spy`: a ReDrafter with a hook in its loss.

    It adds the value of `spy.on_loss(number of the call, batch)` to the loss.
    """

    class Spy(Redrafter):
        calls = 0
        on_loss: Any = staticmethod(lambda call, batch: 0.0)

        def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
            type(self).calls += 1
            loss = super().loss(batch, objective)
            return replace(loss, sums=loss.sums + self.on_loss(self.calls, batch))

    monkeypatch.setitem(DRAFTERS, "spy", Spy)
    return Spy


def test_a_drafter_learns_and_its_folder_can_be_loaded(run_train: RunTrain, target: HFTarget) -> None:
    run = run_train(steps=40, log_every=10, checkpoint_every=40)
    lines = records(run)
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert lines[-1]["tokens_per_step_estimate"] > lines[0]["tokens_per_step_estimate"] + 0.5
    assert len(lines[-1]["accuracy_by_depth"]) == 3, "horizon 4 drafts 3 tokens"
    summary = json.loads((run.train_dir / "summary.json").read_text())
    assert summary["steps"] == 40
    assert summary["metrics"]["loss"] == lines[-1]["loss"]
    assert summary["positions_seen"] < summary["tokens_seen"]
    drafter = load_drafter(run.drafter_dir, target)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == summary["parameters"]
    facts = read_training_facts(run.drafter_dir)
    assert facts is not None
    assert facts.hardware == hardware(torch.device("cpu"), 1)
    assert facts.chat_template == template_digest(target.tokenizer)
    assert asdict(facts).items() <= {**summary, **summary["metrics"]}.items()
    assert facts.tokens_per_step_estimate == lines[-1]["tokens_per_step_estimate"]
    assert not list(run.drafter_dir.parent.glob(".*"))


@pytest.mark.slow
def test_a_longer_horizon_changes_nothing_if_only_one_depth_is_trained(run_train, shards_dir, target, examples, tmp_path):
    """EAGLE trains only its first depth; labels of other depths must not lower its mean loss."""
    cut = [replace(example, continuations=example.continuations[:, :2].clone()) for example in examples]
    short = write_shards(tmp_path / "short", target.identity, cut)
    label_store(short).save(replace(label_store(short).load(), horizon=2))
    logged = []
    for name, shards in (("long", shards_dir), ("short", short)):
        run = run_train(name, replace_drafter={"kind": "eagle"}, shards=shards, validation_texts=4, validation_tokens=8)
        lines = read_records(run.train_dir / "metrics.jsonl")
        logged.append([line[key] for line in lines for key in ("loss", "grad_norm", "validation_loss") if key in line])
    assert len(logged[0]) == 2 * TRAIN["steps"] + 1
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)


@pytest.mark.slow
def test_activation_checkpointing_trains_the_same_drafter_also_after_a_resume(run_train: RunTrain) -> None:
    eagle3 = {"kind": "eagle3", "feature_layers": [0, 1]}
    kept = run_train("kept", replace_drafter=eagle3, steps=3)
    anew = run_train("anew", replace_drafter=eagle3, steps=3, activation_checkpointing=True)
    assert all(torch.equal(value, weights(kept)[name]) for name, value in weights(anew).items())
    run_train("kept", replace_drafter=eagle3, steps=3, activation_checkpointing=True)


def test_steps_end_the_run_and_not_only_an_epoch(run_train: RunTrain, spy: Any) -> None:
    run_train(steps=7, batch_size=8, gradient_accumulation=2, drafter={"kind": "spy"})
    assert spy.calls == 7 * 2


def test_a_finished_run_is_skipped_and_a_damaged_drafter_restored(run_train: RunTrain, spy: Any) -> None:
    run = run_train(drafter={"kind": "spy"})
    num_calls = spy.calls
    files = [*run.drafter_dir.iterdir(), run.train_dir / "summary.json"]
    before = {path: path.read_bytes() for path in files}
    assert len(before) == 4
    run_train(drafter={"kind": "spy"})
    assert spy.calls == num_calls
    (run.drafter_dir / "notes").mkdir()
    (run.drafter_dir / "notes" / "README.md").write_text("mine")
    run_train(drafter={"kind": "spy"})
    (run.drafter_dir / "model.safetensors").write_bytes(b"broken")
    run_train(drafter={"kind": "spy"})
    assert spy.calls == num_calls, "the last checkpoint holds all that is needed"
    assert {path: path.read_bytes() for path in files} == before, "also the facts, which are those of the last record"
    assert (run.drafter_dir / "notes" / "README.md").read_text() == "mine", "a user's own file stays"


def test_an_invalid_summary_is_an_error_and_a_deleted_one_is_rewritten(run_train: RunTrain) -> None:
    run = run_train()
    path = run.train_dir / "summary.json"
    before = json.loads(path.read_text())
    for content, message in (
        ({}, r"summary\.json: .*run: is missing"),
        ({**before, "run": "x"}, r'summary\.json: run="x": must be a mapping'),
        ({**before, "run": {}}, "another configuration"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            run_train()
    path.unlink()
    run_train()
    after = json.loads(path.read_text())
    assert after == before


def test_an_altered_best_drafter_is_not_exported(run_train: RunTrain) -> None:
    run = run_train(validation_texts=4, validation_tokens=8, validate_every=2)
    path = run.train_dir / "best" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
    (run.train_dir / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"best/model\.safetensors was altered"):
        run_train(validation_texts=4, validation_tokens=8, validate_every=2)


def test_flipped_bytes_of_a_checkpoint_are_detected(run_train: RunTrain) -> None:
    run = run_train()
    state = max((run.train_dir / "checkpoints").glob("step-*")) / "state.pt"
    content = bytearray(state.read_bytes())
    weights_at = content.index(next(iter(weights(run).values())).numpy().tobytes()[:16])
    content[weights_at : weights_at + 16] = b"\xff" * 16  # sizes and structure stay
    state.write_bytes(content)
    (run.train_dir / "summary.json").unlink()
    with pytest.raises(
        ValueError, match=rf"the checkpoint .*{state.parent.name} is damaged \(.* another checksum\); delete it"
    ):
        run_train()


def test_a_drafter_that_is_not_finite_is_not_saved(run_train: RunTrain, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    finish_step = loop_module.finish_step

    def spoil(accelerator: Any, model: Any, *args: Any) -> torch.Tensor:
        norm: torch.Tensor = finish_step(accelerator, model, *args)
        steps.append(norm)
        if len(steps) == 6:  # after the check of the last loss
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = torch.nan
        return norm

    monkeypatch.setattr(loop_module, "finish_step", spoil)
    with pytest.raises(ValueError, match=r"isn't finite, so it isn't saved"):
        run_train()


def test_a_changed_option_is_an_error_unless_it_has_no_effect_on_training(run_train: RunTrain) -> None:
    run = run_train()
    with pytest.raises(
        ValueError, match=r"train\.learning_rate \(was 0\.01, is 0\.1\).*drafter\.num_blocks \(was 1, is 2\).*delete"
    ):
        run_train(learning_rate=0.1, drafter={"num_blocks": 2})
    run_train(log_every=3, keep_checkpoints=1, checkpoint_every=5, drafter={"beam_width": 9})
    shutil.rmtree(run.train_dir / "checkpoints")
    with pytest.raises(ValueError, match=r"summary\.json.*train\.seed \(was 0, is 1\)"):
        run_train(seed=1)


def test_a_summary_without_the_number_of_processes_is_of_another_run(run_train: RunTrain) -> None:
    path = run_train().train_dir / "summary.json"
    summary = json.loads(path.read_text())
    del summary["run"]["num_processes"]
    path.write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"summary\.json belongs to a run .* num_processes \(was None, is 1\)"):
        run_train()


def test_a_loss_that_is_not_finite_is_an_error_with_step_and_texts(run_train: RunTrain, spy: Any) -> None:
    spy.on_loss = staticmethod(lambda call, batch: float("nan") if call == 4 else 0.0)
    with pytest.raises(
        ValueError, match=r"not finite at step 4, whose texts are text-\d+, text-\d+, text-\d+, text-\d+\. .*step-00000003"
    ):
        run_train("every", drafter={"kind": "spy"})
    spy.calls = 0
    with pytest.raises(ValueError, match=r"not finite at step 4, .*step-00000002"):
        run_train("seldom", drafter={"kind": "spy"}, log_every=6, checkpoint_every=2)


def test_sigterm_ends_the_step_writes_a_checkpoint_and_exits(run_train: RunTrain, spy: Any, tmp_path: Path) -> None:
    unbroken = run_train("unbroken", drafter={"kind": "spy"}, checkpoint_every=100)
    spy.calls = 0
    spy.on_loss = staticmethod(lambda call, batch: os.kill(os.getpid(), signal.SIGTERM) or 0.0 if call == 3 else 0.0)
    with pytest.raises(SystemExit) as stopped:
        run_train("stopped", drafter={"kind": "spy"}, checkpoint_every=100, log_every=4)
    assert stopped.value.code == 143
    assert [path.name for path in complete_checkpoints(tmp_path / "stopped/train/checkpoints")] == ["step-00000003"]
    resumed = run_train("stopped", drafter={"kind": "spy"}, checkpoint_every=100, log_every=1)
    assert spy.calls == 6
    assert all(torch.equal(value, weights(unbroken)[name]) for name, value in weights(resumed).items())


def test_ctrl_c_writes_a_checkpoint_and_a_second_one_stops_at_once(run_train: RunTrain, spy: Any, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        spy.on_loss = staticmethod(lambda call, batch: os.kill(os.getpid(), signal.SIGINT) or 0.0 if call == 3 else 0.0)
        with pytest.raises(KeyboardInterrupt):
            run_train("once", drafter={"kind": "spy"}, checkpoint_every=100)
        assert [path.name for path in complete_checkpoints(tmp_path / "once/train/checkpoints")] == ["step-00000003"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        spy.calls = 0
        twice = lambda: [os.kill(os.getpid(), signal.SIGINT), time.sleep(0.01), os.kill(os.getpid(), signal.SIGINT)]  # noqa: E731
        spy.on_loss = staticmethod(lambda call, batch: 0.0 * len(twice()) if call == 3 else 0.0)
        with pytest.raises(KeyboardInterrupt):
            run_train("twice", drafter={"kind": "spy"}, checkpoint_every=100)
        assert complete_checkpoints(tmp_path / "twice/train/checkpoints") == []
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_after_the_last_step_ends_the_run_too(number, error, run_train, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(loop_module.Tracker, "__exit__", lambda *_: os.kill(os.getpid(), number))
        with pytest.raises(error):
            run_train(checkpoint_every=100)
    assert [path.name for path in complete_checkpoints(tmp_path / "run/train/checkpoints")] == ["step-00000006"]
    assert not (tmp_path / "run/drafter").exists()
    assert weights(run_train(checkpoint_every=100))


def test_calibration_gets_the_last_tenth_of_steps_in_any_case(run_train: RunTrain, spy: Any) -> None:
    calibrated: list[Loss] = []
    spy.calibrate = lambda self, measured: calibrated.append(measured)
    run_train("unbroken", drafter={"kind": "spy"}, steps=20, log_every=20)
    spy.calls = 0
    spy.on_loss = staticmethod(lambda call, batch: os.kill(os.getpid(), signal.SIGTERM) or 0.0 if call == 19 else 0.0)
    with pytest.raises(SystemExit):
        run_train("broken", drafter={"kind": "spy"}, steps=20, log_every=3)
    assert len(calibrated) == 1, "only a finished training is told"
    run_train("broken", drafter={"kind": "spy"}, steps=20, log_every=1)
    assert spy.calls == 20
    unbroken, broken = calibrated
    for name in ("sums", "counts", "hits", "joint_hits"):
        assert torch.equal(getattr(unbroken, name), getattr(broken, name)), name
    last = records(run_train("of_two_steps", steps=20, log_every=18))[-1]
    assert last["loss"] == float(unbroken.sums.sum() / unbroken.counts.sum())


def test_a_step_that_sigterm_could_not_save_is_not_called_saved(run_train: RunTrain, spy: Any) -> None:
    spy.on_loss = staticmethod(lambda call, batch: os.kill(os.getpid(), signal.SIGTERM) or 0.0 if call == 3 else 0.0)
    with no_file_above(20_000), pytest.raises(OSError, match=r"checkpoint of step 3 .*last complete checkpoint is none"):
        run_train(drafter={"kind": "spy"}, checkpoint_every=100)


def test_bad_shards_are_refused_before_any_work(run_train, target, shards_dir, examples, tmp_path, spy):
    visited = 0

    def refused(shards: Path, match: str) -> None:
        nonlocal visited
        visited += 1
        with pytest.raises(ValueError, match=match):
            run_train(f"refused-{visited}", shards=shards, drafter={"kind": "spy"})

    refused(tmp_path / "nowhere", "Run the stage distill first")
    cut = shutil.copytree(shards_dir, tmp_path / "cut")
    shard = cut / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    refused(cut, r"shard-00001\.safetensors was truncated or altered")
    unfinished = shutil.copytree(shards_dir, tmp_path / "unfinished")
    label_store(unfinished).save(replace(label_store(unfinished).load(), complete=False))
    refused(unfinished, "not complete")
    foreign = write_shards(tmp_path / "foreign", replace(target.identity, weights_sha256="f" * 64), examples)
    refused(foreign, "weights_sha256")
    unlabelled = [replace(example, continuations=torch.full_like(example.continuations, -1)) for example in examples]
    refused(write_shards(tmp_path / "unlabelled", target.identity, unlabelled), "no labelled position")
    refused(write_shards(tmp_path / "empty", target.identity, []), "no labelled position")
    assert visited == 6
    assert spy.calls == 0


def test_each_process_reads_a_share_of_the_shards_and_all_raise_the_error(shards_dir, tmp_path, monkeypatch):
    class SecondOfTwo(Accelerator):
        num_processes, process_index = property(lambda self: 2), property(lambda self: 1)

    folder = shutil.copytree(shards_dir, tmp_path / "shards")
    manifest, second = label_store(folder).load(), SecondOfTwo(cpu=True)
    (folder / "shard-00000.safetensors").unlink()
    require_whole_shards(folder, manifest, second)
    (folder / "shard-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00003\.safetensors is missing"):
        require_whole_shards(folder, manifest, second)
    monkeypatch.setattr(run_module, "gather_object", lambda mine: [ValueError("of the first process"), *mine])
    with pytest.raises(ValueError, match="of the first process"):
        require_whole_shards(folder, manifest, second)


def test_a_reduced_vocabulary_is_chosen_from_the_labels_before_training(run_train: RunTrain, target: HFTarget) -> None:
    run = run_train(drafter={"draft_vocab_size": 40})
    chosen = weights(run)["draft_tokens"]
    assert len(chosen.unique()) == 40
    assert chosen.min() >= 0, "UNKNOWN is no token"
    assert load_drafter(run.drafter_dir, target).config.draft_vocab_size == 40


def test_processes_that_do_not_join_are_refused(run_train: RunTrain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were launched, but accelerate sees 1.*ACCELERATE_USE_CPU"):
        run_train()


def test_a_draft_model_resumes_only_with_its_original_weights(accelerator, target, shards_dir, tmp_path):
    start, drafter_dir = tmp_path / "start", tmp_path / "drafter"
    sizes = LlamaConfig(**{**target.model.config.to_dict(), "num_hidden_layers": 1, "dtype": "float32"})
    torch.manual_seed(1)  # two runs may leave the same state of the generator
    LlamaForCausalLM(sizes).save_pretrained(start)
    target.tokenizer.save_pretrained(start)
    config = TrainConfig(**{**TRAIN, "steps": 2, "max_positions": 8})

    def run() -> int:
        """Train, and return the time at which the drafter was written."""
        train(
            config,
            parse_drafter({"kind": "draft_model", "path": str(start)}),
            target,
            shards_dir,
            tmp_path / "train",
            drafter_dir,
            accelerator,
        )
        return (drafter_dir / "model.safetensors").stat().st_mtime_ns

    assert run() == run(), "the second time it is there"
    torch.manual_seed(2)
    LlamaForCausalLM(sizes).save_pretrained(start)  # others
    with pytest.raises(ValueError, match=r"drafter.start_from .or drafter.path. has other weights"):
        run()
