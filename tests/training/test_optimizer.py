"""Updates and learning rates beside the authors' figures, and by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from places import DATA, SHARED
from torch import nn

from training.optimizer import (
    OptimizerConfig,
    clip_gradients,
    learning_rate_factor,
    learning_rates,
    make_optimizer,
    set_learning_rate,
)

COMPONENTS = SHARED / "parity" / "vlbert" / "components.npz"
CONSTANT = {"warmup_steps": 0, "schedule": "step", "decay_at": (1000,)}


@pytest.fixture(scope="module")
def components() -> dict[str, np.ndarray]:
    if not COMPONENTS.is_file():
        pytest.skip("the authors' figures lie in ../shared, which is not here")
    return dict(np.load(COMPONENTS))


def steps(start: np.ndarray, gradients: np.ndarray, config: OptimizerConfig) -> np.ndarray:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer, after = make_optimizer(model, config), []
    for step, gradient in enumerate(gradients):
        set_learning_rate(optimizer, step, 1000, config)
        model.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        after.append(model.weight.detach().numpy().copy())
    return np.stack(after)


def test_adamw_equals_the_authors(components):
    rate, epsilon, weight_decay = components["adamw/hyper_lr_eps_wd"]
    config = OptimizerConfig(learning_rate=rate, epsilon=epsilon, weight_decay=weight_decay, **CONSTANT)
    found = steps(components["adamw/in_p0"], components["adamw/in_grads"], config)
    np.testing.assert_allclose(found, components["adamw/out_traj"], rtol=1e-6, atol=5e-7)


def test_without_bert_adam_epsilon_is_added_after_the_correction_as_by_pytorch():
    settings = {"learning_rate": 0.1, "weight_decay": 0.0, "epsilon": 1e-6, "bert_adam": False, **CONSTANT}
    found = steps(np.zeros(2), np.array([[1.0, 1e-6]]), OptimizerConfig(**settings))
    np.testing.assert_allclose(found, [[-0.1, -0.05]], rtol=1e-4)  # step 1: g / (|g| + epsilon)


def test_learning_rates_equal_the_authors(components):
    for figures, schedule in (
        ("triangle_w10_t50", {}),
        ("multistep_w10_m30_40", {"schedule": "step", "decay_at": (29, 39), "decay": 0.1}),
    ):
        theirs, config = components[f"lr/{figures}"], OptimizerConfig(warmup_steps=10, **schedule)
        ours = [learning_rate_factor(update, 50, config) for update in range(1, len(theirs) + 1)]
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_the_fast_rcnn_learns_at_its_own_rate_and_what_is_frozen_not_at_all():
    model = nn.Linear(1, 1, bias=False)
    model.fast_rcnn = nn.Linear(1, 1)
    model.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    config = OptimizerConfig(learning_rate=8.0, region_learning_rate=2.0, warmup_steps=4, weight_decay=0.0)
    optimizer = make_optimizer(model, config)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    for step, factor in ((0, 1 / 4), (1, 1 / 2), (9, 1 / 7)):  # the last step of ten learns, too
        set_learning_rate(optimizer, step, 10, config)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([8 * factor, 2 * factor])
        # Logged is the rate of most parameters: the Fast R-CNN has two, the rest one.
        logged = {"learning_rate": 2 * factor, "learning_rate_rest": 8 * factor}
        assert learning_rates(optimizer) == pytest.approx(logged)


def test_equal_rates_are_logged_once_however_the_parameters_decay():
    config = OptimizerConfig(bert_learning_rate=2e-5, decayed="matrices")
    optimizer = make_optimizer(nn.Linear(2, 2), config)
    set_learning_rate(optimizer, 7999, 10**5, config)
    assert len(optimizer.param_groups) == 2
    assert learning_rates(optimizer) == {"learning_rate": pytest.approx(2e-5)}


AS_VILBERT = {"bert_adam": False, "bias_correction": False, "max_grad_norm": 1.0, "clip_each": True}
AS_VILBERT |= {"zero_update": "first"}


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_vilberts_optimizer_clips_each_tensor_and_corrects_no_bias(schedule: str):
    """Two tensors of 6 and 4 numbers; the second has a tenth of the rate and no decay."""
    figures = np.load(DATA / "vilbert" / "components.npz")
    rate, warmup, total, decay = figures["bertadam/hyper"]
    expected = figures[f"bertadam/warmup_{schedule}/parameters"]
    gradients = torch.from_numpy(figures[f"bertadam/warmup_{schedule}/gradients"])
    model = nn.Module()
    model.first, model.second = (nn.Parameter(torch.from_numpy(part.copy())) for part in np.split(expected[0], [6]))
    model.bert_parameters = ("second",)
    rates = {"learning_rate": rate, "bert_learning_rate": rate / 10, "warmup_steps": int(warmup * total)}
    config = OptimizerConfig(**rates, weight_decay=decay, schedule=schedule, **AS_VILBERT)
    optimizer = make_optimizer(model, config)
    optimizer.param_groups[1]["decay"] = 0.0
    factors = figures[f"lr/warmup_{schedule}"]
    for step, (gradient, after) in enumerate(zip(gradients, expected[1:], strict=True)):
        assert learning_rate_factor(step, int(total), config) == pytest.approx(factors[step])
        model.first.grad, model.second.grad = (part.clone() for part in gradient.split([6, 4]))
        norm = clip_gradients(model, config)
        assert float(norm) == pytest.approx(float(gradient.norm()), rel=1e-5)
        set_learning_rate(optimizer, step, int(total), config)
        optimizer.step()
        found = torch.cat([model.first, model.second]).detach().numpy()
        np.testing.assert_allclose(found, after, rtol=2e-6, atol=2e-7)


def test_one_update_of_the_schedule_may_have_rate_zero():
    """Against the reference: k/W, then (T - k)/(T - W), with k from 0 or from 1; the default has one more update."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    for warmup, total in ((0, 7), (3, 20), (10, 100), (6_445, 64_450)):
        steps = np.unique(np.linspace(0, total - 1, 50, dtype=int))
        for zero_update, first, end in (("none", 1, total + 1), ("first", 0, total), ("last", 1, total)):
            config = OptimizerConfig(kind="sgd", warmup_steps=warmup, zero_update=zero_update, learning_rate=1.0)
            (optimizer.param_groups[0]["peak"], optimizer.param_groups[0]["decay"]), found = (1.0, 0.0), []
            for step in steps:
                set_learning_rate(optimizer, int(step), total, config)
                found.append(optimizer.param_groups[0]["lr"])
            k = steps + first
            expected = np.where(k < warmup, k / max(1, warmup), (end - k) / (end - warmup))
            np.testing.assert_allclose(found, expected, rtol=1e-12)
            assert (found[0] == 0, found[-1] == 0) == (zero_update == "first" and warmup > 0, zero_update == "last")


@pytest.mark.parametrize("zero_update", ["none", "first"])
def test_the_rate_falls_behind_the_same_update_whichever_is_zero(zero_update: str):
    config = OptimizerConfig(kind="sgd", learning_rate=1.0, schedule="step", decay_at=(12, 16), warmup_steps=2)
    config = dataclasses.replace(config, zero_update=zero_update)
    model = nn.Linear(1, 1)
    optimizer, found = make_optimizer(model, config), []
    for step in range(20):
        set_learning_rate(optimizer, step, 20, config)
        found.append(optimizer.param_groups[0]["lr"])
    warmup = [0.0, 0.5, 1.0] if zero_update == "first" else [0.5, 1.0, 1.0]
    assert found == pytest.approx([*warmup, *[1.0] * 9, *[0.1] * 4, *[0.01] * 4])


def test_weight_decay_is_of_all_of_matrices_or_of_vectors():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model.gain = nn.Parameter(torch.ones(()))  # neither a bias nor a LayerNorm
    for decayed, shapes in {"all": {0, 1, 2}, "matrices": {0, 2}, "vectors": {1}}.items():
        optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.01, decayed=decayed))
        found = {p.dim() for group in optimizer.param_groups for p in group["params"] if group["decay"]}
        assert found == shapes
