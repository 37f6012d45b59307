"""The ResNet: its sizes, frozen norms, and fused convolutions, which compute what their parts do."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_detector import lively_norms
from torch import Tensor, nn

from detectors import resnet
from detectors.resnet import FrozenNorm, NormedConv, Res5, ResNetC4, ResNetConfig, conv_relu, fold_norms, freeze_module

CONFIG = ResNetConfig(blocks=(1, 1, 2, 2), width=8)
SMALL = ResNetConfig(blocks=(1, 1, 1, 1), width=4)
PRECISIONS = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])


def plain_conv(conv: NormedConv, x: Tensor) -> Tensor:
    norm, y = conv.norm, F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation)
    return F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)


def plain_blocks(blocks: nn.Module, x: Tensor) -> Tensor:
    for block in blocks.children():
        y = F.relu(plain_conv(block.conv2, F.relu(plain_conv(block.conv1, x))))
        shortcut = x if block.shortcut is None else plain_conv(block.shortcut, x)
        x = F.relu(plain_conv(block.conv3, y) + shortcut)
    return x


def plain_c4(network: ResNetC4, images: Tensor) -> Tensor:
    x = F.relu(plain_conv(network.stem.conv1, images))
    x = F.max_pool2d(x, kernel_size=3, stride=2, ceil_mode=True)
    for stage in (network.res2, network.res3, network.res4):
        x = plain_blocks(stage, x)
    return x


def results(network: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor, kind: torch.dtype) -> dict[str, Tensor]:
    """Outputs, and the gradient of everything that has one, in float64; bfloat16 is that of autocast."""
    half = kind == torch.bfloat16
    network.to(torch.float32 if half else kind).zero_grad()
    x = x.to(torch.float32 if half else kind, copy=True).requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        y = compute(x)
    assert y.dtype == kind
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    found = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.requires_grad}
    return {name: tensor.detach().double() for name, tensor in (found | {"output": y, "input": x.grad}).items()}


def check(network: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor, kind: torch.dtype) -> None:
    """`network` does what `plain` does; in bfloat16, where rounding cuts other values at zero, about as precisely."""

    def off(compute: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, float]:
        exact, found = results(network, plain, x, torch.float64), results(network, compute, x, kind)
        assert found.keys() == exact.keys()
        return {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in found}

    if kind != torch.bfloat16:
        ours = off(network, x)
        assert max(ours.values()) < {torch.float32: 1e-5, torch.float64: 1e-12}[kind], ours
        return
    ratios = []
    for given in (x, x.flip(-1), -x):  # which values are cut is chance: a mean of three
        ours, theirs = off(network, given), off(plain, given)
        ratios += [ours[name] / theirs[name] for name in ours]
    assert max(ratios) < 2, ratios
    assert sum(ratios) / len(ratios) < 1.2, ratios


@PRECISIONS
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dilated", [True, False])
def test_res5_computes_what_its_parts_do_one_after_the_other(kind, layout, dilated):
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, res5_dilated=dilated, stride_in_1x1=not dilated)
    network = lively_norms(Res5(config)).to(memory_format=layout)
    x = torch.randn(6, config.c4_channels, 7, 7).contiguous(memory_format=layout)
    check(network, lambda x: plain_blocks(network, x), x, kind)


@PRECISIONS
def test_the_network_below_computes_what_its_parts_do_one_after_the_other(kind):
    torch.manual_seed(0)
    network = lively_norms(ResNetC4(CONFIG))
    check(network, lambda x: plain_c4(network, x), torch.randn(2, 3, 65, 96), kind)


def test_in_bfloat16_other_devices_fold_too(monkeypatch):
    monkeypatch.setattr(resnet, "_FUSED_DTYPES", ())  # they have no such kernels
    torch.manual_seed(0)
    network = lively_norms(Res5(CONFIG))
    x = torch.randn(6, CONFIG.c4_channels, 7, 7)
    check(network, lambda x: plain_blocks(network, x), x, torch.bfloat16)
    for module in network.modules():
        if isinstance(module, FrozenNorm):
            module.register_forward_hook(lambda *call: pytest.fail("a norm of its own"))
    with torch.autocast("cpu", torch.bfloat16):
        network(x)


def saved_by(compute: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[int, ...]]:
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: shapes.append(tensor.shape) or tensor, lambda t: t):
        compute(x)
    return [tuple(shape) for shape in shapes]


def test_frozen_stages_keep_nothing_get_no_gradient_and_change_no_norm():
    network = lively_norms(ResNetC4(dataclasses.replace(CONFIG, norm="batch")).freeze(2)).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    images = torch.randn(2, 3, 64, 64)
    network(images).sum().backward()
    assert {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None} == {"res3", "res4"}
    changed = {name for name, tensor in network.state_dict().items() if not torch.equal(before[name], tensor)}
    assert {name.split(".")[0] for name in changed} == {"res3", "res4"}
    assert saved_by(nn.Sequential(network.stem, network.res2), images) == []
    frozen = network.res2(network.stem(images))
    res3 = ResNetC4(CONFIG).res3
    assert sum(len(shape) == 4 and shape[2:] == frozen.shape[2:] for shape in saved_by(res3, frozen)) == 2, (
        "its input, for the weights of two convolutions"
    )


def test_a_folded_network_with_live_norms_computes_the_same():
    torch.manual_seed(0)
    network, x = lively_norms(Res5(dataclasses.replace(CONFIG, norm="batch"))).eval(), torch.randn(2, 128, 7, 7)
    with torch.no_grad():
        before = network(x)
        fold_norms(network)
        torch.testing.assert_close(network(x), before)
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_the_config_decides_where_sizes_are_halved():
    pooled = torch.zeros(2, 64, 14, 14)
    other = dataclasses.replace(SMALL, stride_in_1x1=False, stem_pool="torch", res5_dilated=False)
    for config, stem, res5, strides in ((SMALL, 16, 14, (2, 1)), (other, 17, 7, (1, 2))):
        network = ResNetC4(config)
        # A cell for every 16 pixels or part of them.
        assert network(torch.zeros(1, 3, 168, 218)).shape == (1, 64, 11, 14)
        assert network.stem(torch.zeros(1, 3, 66, 66)).shape[-1] == stem
        assert Res5(config)(pooled).shape == (2, 128, res5, res5)
        assert (network.res3[0].conv1.stride[0], network.res3[0].conv2.stride[0]) == strides


def test_a_frozen_norm_is_a_batch_norm_in_eval_mode_also_while_training():
    live = lively_norms(nn.BatchNorm2d(6))
    conv = NormedConv(4, 6, kernel=3, stride=1, dilation=1, norm="batch").train()
    conv.norm.load_state_dict(live.state_dict())
    freeze_module(conv)
    x = torch.randn(2, 4, 3, 3)
    before = copy.deepcopy(conv.state_dict())
    torch.testing.assert_close(conv(x), live.eval()(F.conv2d(x, conv.weight, padding=1)))
    torch.testing.assert_close(conv.state_dict(), before, rtol=0, atol=0)
    assert not list(conv.norm.parameters())


def test_in_float32_every_number_is_that_of_its_parts_to_the_bit():
    torch.manual_seed(0)
    network = lively_norms(Res5(CONFIG))
    x = torch.randn(6, CONFIG.c4_channels, 7, 7).contiguous(memory_format=torch.channels_last)
    ours, theirs = (results(network, way, x, torch.float32) for way in (network, lambda x: plain_blocks(network, x)))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_only_what_goes_in_and_comes_out_is_kept_of_a_convolution_with_its_relu():
    if not resnet._FUSED_DTYPES:
        pytest.skip("this CPU or PyTorch has no fused kernels")
    conv = NormedConv(4, 6, kernel=3, stride=1, dilation=1, norm="frozen")
    x, beside = torch.randn(2, 4, 5, 7, requires_grad=True), torch.randn(2, 6, 5, 7, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        kept = saved_by(lambda x: conv_relu(conv, x, beside), x)
    assert sorted(shape for shape in kept if shape[2:] == (5, 7)) == [(2, 4, 5, 7), (2, 6, 5, 7)]
