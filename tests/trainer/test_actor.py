"""The actor's gradient against a dense reference, for any split, and the core's optimizer."""

import math

import numpy as np
import pytest
import torch
from gyre_trainer.actor import TrainingActor
from gyre_trainer.errors import GradientError, TrainerError
from gyre_trainer.model import to_hugging_face
from gyre_trainer.rows import MicroStep, TrainingExecution, TrainingRow
from gyre_trainer.settings import AdamSettings, ObjectiveSettings

OBJECTIVE = ObjectiveSettings(clip_low=0.995, clip_high=1.005)


@pytest.fixture
def actor(model_dir):
    return TrainingActor(model_dir, 0, OBJECTIVE, AdamSettings(lr=1e-3, eps=1e-8, weight_decay=0.1))


def gradients(actor) -> dict[str, torch.Tensor]:
    named = {}
    for name, parameter in actor.model.named_parameters():
        named.update(to_hugging_face(name, parameter.main_grad, actor.shape))
    return named


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Relative difference of two gradients, over all parameters."""
    difference = sum((ours[name] - theirs[name]).double().square().sum() for name in theirs)
    return math.sqrt(difference / sum(value.double().square().sum() for value in theirs.values()))


def train_split(actor, executions, sizes) -> None:
    start = 0
    for number, size in enumerate(sizes):
        actor.train(MicroStep(number, tuple(executions[start : start + size])))
        start += size
    assert start == len(executions)


@pytest.mark.parametrize("sizes", [[8], [1] * 8, [3, 4, 1]])
def test_the_gradient_equals_the_dense_reference_for_any_split(
    actor, make_executions, reference_gradients, sizes
):
    executions = make_executions(8)
    train_split(actor, executions, sizes)
    assert distance(gradients(actor), reference_gradients(executions, OBJECTIVE)) < 1e-6


def test_the_gradient_equals_the_reference_for_single_token_targets(
    actor, make_executions, reference_gradients
):
    executions = []
    for execution in make_executions(6, seed=1):
        row = execution.rows[0]
        targets = np.zeros_like(row.targets)
        targets[-1] = True
        one = TrainingRow(execution.id, row.ids, targets, row.logprobs, row.versions)
        executions.append(TrainingExecution(execution.id, execution.advantage, (one,)))
    train_split(actor, executions, [2, 4])
    assert distance(gradients(actor), reference_gradients(executions, OBJECTIVE)) < 1e-6


def test_clipped_and_capped_executions_match_the_reference(actor, make_executions, reference_gradients):
    executions = make_executions(8, seed=2, noise=2.0)
    statistics = actor.train(MicroStep(0, tuple(executions)))
    assert statistics.clipped_high and statistics.clipped_low and statistics.capped_targets
    assert distance(gradients(actor), reference_gradients(executions, OBJECTIVE)) < 1e-6


def test_gradients_of_cells_sum_to_that_of_one(model_dir, make_executions, reference_gradients):
    """Cells with many, one and no micro-steps; their buffers are added up."""
    executions = make_executions(7, seed=3)
    cells = [TrainingActor(model_dir, 0, OBJECTIVE, AdamSettings()) for _ in range(3)]
    train_split(cells[0], executions[:6], [2, 3, 1])
    train_split(cells[1], executions[6:], [1])
    for other in cells[1:]:
        for mine, theirs in zip(cells[0].gradients, other.gradients, strict=True):
            mine.add_(theirs)
    assert distance(gradients(cells[0]), reference_gradients(executions, OBJECTIVE)) < 1e-6


def test_a_step_equals_torchs_adam_with_decoupled_decay_and_clipping(
    actor, make_executions, reference_gradients, reference_model, tmp_path
):
    import copy

    from safetensors.torch import load_file

    model = copy.deepcopy(reference_model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    executions = make_executions(5, seed=4)
    expected = reference_gradients(executions, OBJECTIVE)
    for name, parameter in model.named_parameters():
        parameter.grad = expected[name] / 5
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    adam.step()

    train_split(actor, executions, [5])
    assert actor.optimizer_step(1 / 5) == pytest.approx(norm, rel=1e-5)
    assert actor.version == 1 and not any(buffer.any() for buffer in actor.gradients)
    actor.save_weights(tmp_path / "after.safetensors")
    after = load_file(tmp_path / "after.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.allclose(after[name], parameter, atol=2e-5), name


def test_a_loss_that_is_not_finite_is_refused_and_leaves_the_sum(actor, make_executions):
    good, bad = make_executions(2, seed=5)
    actor.train(MicroStep(0, (good,)))
    before = [buffer.clone() for buffer in actor.gradients]
    weights = actor.weights["decoder.final_layernorm.weight"]
    weights[0] = math.nan
    with pytest.raises(GradientError, match="micro-step 1: the loss of e5-1"):
        actor.train(MicroStep(1, (bad,)))
    assert all(torch.equal(a, b) for a, b in zip(before, actor.gradients, strict=True))


def test_a_gradient_that_is_not_finite_makes_no_step(actor, make_executions):
    train_split(actor, make_executions(1), [1])
    actor.gradients[0][0] = math.inf
    before = {name: value.clone() for name, value in actor.weights.items()}
    with pytest.raises(GradientError, match="no update was made"):
        actor.optimizer_step(1.0)
    assert actor.version == 0 and actor.optimizer_state()["state"] == {}
    assert all(torch.equal(before[name], value) for name, value in actor.weights.items())


def test_mismatch_is_measured_on_targets_of_the_actors_own_version(actor, make_executions):
    same = actor.train(MicroStep(0, tuple(make_executions(3, seed=6, noise=0.0))))
    assert same.same_version_targets == same.targets and same.mismatch_max < 1e-4
    older = actor.train(MicroStep(1, tuple(make_executions(3, seed=7, noise=1.0, version=5))))
    assert older.same_version_targets == 0 and older.mismatch_max == 0.0
    assert older.log_ratio_abs_sum / older.targets > 0.3
    off = actor.train(MicroStep(2, tuple(make_executions(3, seed=8, noise=1.0))))
    assert off.mismatch_max > 1.0


def test_statistics_count_tokens_and_entropy(actor, make_executions):
    executions = make_executions(4, seed=9)
    statistics = actor.train(MicroStep(0, tuple(executions)))
    assert statistics.tokens == sum(e.token_count for e in executions)
    assert statistics.targets == sum(e.target_count for e in executions)
    assert 0 < statistics.entropy <= math.log(640)


def test_offloading_keeps_the_cores_weights_and_a_satellites_come_back_by_taking(model_dir, make_executions):
    core = TrainingActor(model_dir, 3, OBJECTIVE, AdamSettings())
    satellite = TrainingActor(model_dir, 0, OBJECTIVE)
    rows = [row for e in make_executions(2) for row in e.rows]
    before = core.log_probs(rows)
    for actor in (core, satellite):
        actor.offload()
        with pytest.raises(TrainerError, match="offloaded"):
            actor.train(MicroStep(0, tuple(make_executions(1))))
        actor.onload()
        actor.zero_gradients()
    buffers = satellite.arrays()
    for name, array in core.arrays().items():
        buffers[name][...] = array
    satellite.take(buffers, core.version)
    assert torch.equal(core.log_probs(rows), before) and torch.equal(satellite.log_probs(rows), before)
    assert satellite.version == 3
    train_split(satellite, make_executions(3), [1, 2])
    train_split(core, make_executions(3), [1, 2])
    assert all(torch.equal(a, b) for a, b in zip(core.gradients, satellite.gradients, strict=True))
