"""The GPU that is not there: what it refuses, how it computes and what it records; and the time on a card."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from training.cards import CARDS, LAUNCH, SHORTEST, operation_seconds, product_seconds, timeline
from training.operations import Operation, Product
from training.virtual_device import DEVICE, VirtualDevice

FLOAT = 4  # bytes
BLOCK = 512  # bytes, of CUDA's allocator


def numbers(*shape: int) -> Tensor:
    """Float32 on the CPU, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def recorded(run: Callable[[], object], values: bool = True) -> list[Operation]:
    """Its operations, without those that launch nothing and wait for nothing."""
    with VirtualDevice(values=values) as device:
        run()
    return [one for one in device.operations if one.kernels or one.waits]


# --- devices that meet ------------------------------------------------------------------------------------------------

MIXED = {
    "a sum": lambda here, there: here + there,
    "a product": lambda here, there: there @ here,
    "in place": lambda here, there: there.add_(here),
    "rows of a table": lambda here, there: F.embedding(torch.tensor([1]), there),
    "concatenation": lambda here, there: torch.cat([there, here]),
    "rows of the CPU": lambda here, there: here[torch.tensor([1], device=DEVICE)],
    "rows put into the CPU's": lambda here, there: here.masked_scatter(there > 0, there),
    "places of the CPU": lambda here, there: here.index_put_((there > 0,), there[there > 0]),
    "values of the CPU": lambda here, there: there.index_put_((there > 0,), here[0].repeat(9)[: (there > 0).sum()]),
    "a number of the CPU": lambda here, there: torch.zeros(()).add_(there.sum()),
    "a mask": lambda here, there: torch.where(here > 0, there, there),
}


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_tensors_of_both_devices_are_refused_and_the_line_is_named(mixed: Callable, values: bool):
    here = numbers(4, 4)
    with VirtualDevice(values=values):
        there = here.to(DEVICE)
        with pytest.raises(RuntimeError, match=rf"mixes .*{mixed.__code__.co_firstlineno} < test_virtual_device.py:"):
            mixed(here, there)


def test_a_number_of_the_cpu_is_no_tensor_of_it():
    with VirtualDevice(values=True):
        there = numbers(3).to(DEVICE)
        assert (there * torch.tensor(2.0)).tolist() == (numbers(3) * 2).tolist()


def test_there_is_one_device_at_a_time_and_none_afterwards():
    with VirtualDevice(), pytest.raises(RuntimeError, match="one virtual device at a time"):
        VirtualDevice().__enter__()
    with VirtualDevice(values=True):
        there = numbers(3).to(DEVICE)
    with pytest.raises(RuntimeError, match="outside of `with VirtualDevice"):
        there + 1


# --- values -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A convolution, a norm, attention with a mask, a product, a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16)
        self.projections, self.words = nn.Linear(16, 3 * 16), nn.Embedding(9, 16)

    def forward(self, pixels: Tensor, words: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        regions = self.norm(self.convolution(pixels)).relu().flatten(2).transpose(1, 2)
        rows = torch.cat([self.words(words), regions], dim=1)
        query, key, value = self.projections(rows).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, mask[:, None, None])
        chosen = attended.transpose(1, 2).flatten(2)[mask]
        return F.cross_entropy(chosen, labels) + attended.square().mean()


def block_inputs() -> list[Tensor]:
    mask = torch.arange(13) < torch.tensor([[13], [7]])
    return [numbers(2, 3, 7, 7), torch.arange(8).reshape(2, 4), mask, torch.arange(20) % 16]


def gradients(block: nn.Module, device: torch.device) -> list[Tensor]:
    loss = block.to(device)(*(one.to(device) for one in block_inputs()))
    loss.backward()
    return [loss.detach().cpu(), *(one.grad.cpu() for one in block.parameters())]


def test_it_computes_what_the_cpu_computes():
    expected = gradients(Block(), torch.device("cpu"))
    with VirtualDevice(values=True):
        found = gradients(Block(), DEVICE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_record_does_not_depend_on_whether_it_computes():
    with_values, without = (recorded(lambda: gradients(Block(), DEVICE), values) for values in (True, False))
    assert with_values == without


def test_unknown_numbers_are_read_as_ones_and_integers_are_computed():
    with VirtualDevice():
        there = numbers(2, 3).to(DEVICE)
        assert there.tolist() == [[1.0] * 3] * 2
        assert (there[0, 0] * 5).item() == 1.0
        assert (torch.arange(4, device=DEVICE) * 2).tolist() == [0, 2, 4, 6]
        assert there[torch.tensor([True, False], device=DEVICE)].shape == (1, 3)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_attention_and_its_gradient_draw_the_same_dropout(dropout: float):
    """By the definition of a derivative, along one direction."""
    query, key, value, step = (numbers(1, 2, 5 + i, 8).double()[:, :, :5] for i in range(4))
    step = step * 1e-3

    def loss(query: Tensor) -> Tensor:
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(query, key.to(DEVICE), value.to(DEVICE), dropout_p=dropout)
        return (out * torch.arange(8, device=DEVICE)).sum()

    with VirtualDevice(values=True):
        middle = query.to(DEVICE).requires_grad_()
        loss(middle).backward()
        slope = (middle.grad * step.to(DEVICE)).sum().item()
        difference = (loss((query + step / 2).to(DEVICE)) - loss((query - step / 2).to(DEVICE))).item()
    assert slope == pytest.approx(difference, rel=1e-2)


# --- waits ------------------------------------------------------------------------------------------------------------


def pinned(there: Tensor, **options: bool) -> Tensor:
    return numbers(4).pin_memory().to(DEVICE, **options)


HOST_WAITS = {
    "item": (lambda there: there.sum().item(), 1),
    "float": (lambda there: float(there[0, 0]), 1),
    "bool": (lambda there: bool((there > 0).any()), 1),
    "nonzero": (lambda there: there.nonzero(), 1),
    "mask index": (lambda there: there[there > 0], 1),
    "masked_select": (lambda there: there.masked_select(there > 0), 1),
    "tolist": (lambda there: there.tolist(), 1),
    "cpu": (lambda there: there.cpu(), 1),
    "cpu, not waited for": (lambda there: there.to("cpu", non_blocking=True), 0),
    "a list": (lambda there: torch.tensor([1.0, 2.0], device=DEVICE), 1),
    "unpinned": (lambda there: numbers(4).to(DEVICE), 1),
    "unpinned, not blocking": (lambda there: numbers(4).to(DEVICE, non_blocking=True), 1),
    "pinned": (lambda there: pinned(there), 1),
    "pinned, not blocking": (lambda there: pinned(there, non_blocking=True), 0),
    "pinned, copied in place": (lambda there: there.copy_(numbers(4, 4).pin_memory(), non_blocking=True), 0),
    "an index of the host": (lambda there: there[torch.tensor([0, 2])], 1),
    "index_select": (lambda there: there.index_select(0, torch.arange(2, device=DEVICE)), 0),
    "an index of the device": (lambda there: there[torch.arange(2, device=DEVICE)], 0),
    "masked_fill": (lambda there: there.masked_fill(there > 0, 0.0), 0),
    "shapes": (lambda there: there.reshape(there.shape[0] * 2, -1).numel() + len(there), 0),
    "a number of the host": (lambda there: there * 2 + torch.tensor(2.0), 0),
}


@pytest.mark.parametrize(("run", "waits"), HOST_WAITS.values(), ids=HOST_WAITS)
def test_the_host_waits_where_it_needs_what_is_not_there_yet(run: Callable, waits: int):
    with VirtualDevice(values=True) as device:
        there = numbers(4, 4).to(DEVICE)
        device.start()
        run(there)
    found = [one for one in device.operations if one.waits]
    assert len(found) == waits
    assert all(one.where.split(" < ")[0].startswith("test_virtual_device.py:") for one in found)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_memory_is_page_locked_in_every_mode(mode: Callable):
    with VirtualDevice() as device, mode():
        here = numbers(3).pin_memory()
        assert (here.is_pinned(), here[1:].is_pinned(), numbers(3).is_pinned()) == (True, True, False)
        assert torch.empty(3, pin_memory=True).is_pinned()
        here.to(DEVICE, non_blocking=True)
    assert [one.waits for one in device.operations] == [False]


def test_copies_count_their_bytes():
    (there,) = recorded(lambda: numbers(5).to(DEVICE))
    assert (there.kernels, there.copied, there.bytes) == (1, 5 * FLOAT, 0)
    ours = recorded(lambda: torch.ones(6, device=DEVICE).cpu())
    assert [one.copied for one in ours] == [0, 6 * FLOAT]


# --- FLOPs and bytes --------------------------------------------------------------------------------------------------


def convolve(stride: int) -> Callable[[], Tensor]:
    x, weight = numbers(2, 4, 9, 11), numbers(6, 4, 3, 3)
    return lambda: F.conv2d(*leaves(x, weight), stride=stride, padding=1)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [one.to(DEVICE).requires_grad_() for one in tensors]


def attend(queries: int, keys: int) -> Callable[[], Tensor]:
    query, key, value = numbers(2, 3, queries, 8), numbers(2, 3, keys, 8), numbers(2, 3, keys, 8)
    return lambda: F.scaled_dot_product_attention(*leaves(query, key, value))


PRODUCTS = {
    "mm": lambda: torch.mm(*leaves(numbers(5, 7), numbers(7, 3))),
    "addmm": lambda: F.linear(*leaves(numbers(5, 7), numbers(3, 7), numbers(3))),
    "bmm": lambda: torch.bmm(*leaves(numbers(4, 5, 7), numbers(4, 7, 3))),
    "matmul": lambda: torch.matmul(*leaves(numbers(2, 4, 5, 7), numbers(2, 4, 7, 3))),
    "convolution": convolve(stride=1),
    "strided convolution": convolve(stride=2),
    "attention": attend(6, 6),
    "attention to others": attend(6, 10),
}


@pytest.mark.parametrize("run", PRODUCTS.values(), ids=PRODUCTS)
def test_products_have_as_many_flops_as_torch_counts(run: Callable[[], Tensor]):
    with VirtualDevice(values=True) as device, FlopCounterMode(display=False) as counter:
        y = run()
        forward = sum(one.flops for one in device.operations), counter.get_total_flops()
        y.sum().backward()
        both = sum(one.flops for one in device.operations), counter.get_total_flops()
    assert forward[0] == forward[1] > 0
    assert both[0] == both[1] >= 2 * forward[0]


def test_a_convolution_with_bias_and_relu_is_one_product():
    x, weight, bias = numbers(2, 4, 9, 11), numbers(6, 4, 3, 3), numbers(6)

    def run() -> None:
        torch.cudnn_convolution_relu(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), (1, 1), (1, 1), (1, 1), 1)

    (*_, found) = recorded(run)
    assert found.products == (Product(1, 2 * 9 * 11, 6, 4 * 9),)
    assert (found.kernels, found.dtype) == (1, torch.float32)


N, C = 64, 32
# Operation -> bytes read and written, of float32 [N, C] and the like.
MOVED = {
    "sum": (lambda x: x + x, 2 * N * C * FLOAT, N * C * FLOAT),
    "in place": (lambda x: x.mul_(2.0), N * C * FLOAT, N * C * FLOAT),
    "expanded": (lambda x: x + x[:1].expand(N, C), (N * C + C) * FLOAT, N * C * FLOAT),
    "cast": (lambda x: x.bfloat16(), N * C * FLOAT, N * C * 2),
    "reduction": (lambda x: x.sum(dim=1), N * C * FLOAT, N * FLOAT),
    "fill": (lambda x: x.zero_(), 0, N * C * FLOAT),
    "made": (lambda x: torch.zeros(N, device=DEVICE), 0, N * FLOAT),
    "rows of a table": (
        lambda x: x.index_select(0, torch.arange(4, device=DEVICE)),
        4 * (C * FLOAT + 8),
        4 * C * FLOAT,
    ),
    "a product": (lambda x: x @ x.T, 2 * N * C * FLOAT, N * N * FLOAT),
    "a view": (lambda x: x.view(C, N).T[2:], None, None),
}


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(("run", "read", "written"), MOVED.values(), ids=MOVED)
def test_operations_move_as_many_bytes_as_by_hand(run: Callable, read: int | None, written: int | None, values: bool):
    with VirtualDevice(values=values) as device:
        there = numbers(N, C).to(DEVICE)
        device.start()
        run(there)
    found = [one for one in device.operations if one.kernels]
    assert [(one.read, one.written) for one in found[-1:]] == ([] if read is None else [(read, written)])


def test_an_optimizers_step_moves_each_tensor_once():
    """It reads weights, gradients and both moments, and writes all but the gradients."""
    with VirtualDevice(values=True) as device:
        weights = [numbers(N, C).to(DEVICE).requires_grad_() for _ in range(3)]
        optimizer = torch.optim.AdamW(weights, fused=True)
        for one in weights:
            one.grad = torch.ones_like(one)
        optimizer.step()
        device.start()
        optimizer.step()
    (step,) = [one for one in device.operations if one.name.startswith("aten::_fused_adam")]
    size, steps = 3 * N * C * FLOAT, 3 * FLOAT
    assert (step.kernels, step.tensors) == (1, 3)
    assert (step.read, step.written) == (4 * size + steps, 3 * size)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_by_hand():
    """Three tensors of 4, 2 and 8 blocks, the first freed before the last is made: what was held most is 4 + 2 + 8 of
    which 8 are of the second part; a view holds nothing of its own."""
    with VirtualDevice() as device:
        before = torch.empty(BLOCK, device=DEVICE)  # 4 blocks
        device.start()
        assert device.held_at_start == 4 * BLOCK
        first = torch.empty(BLOCK - 1, device=DEVICE)  # 4 blocks, rounded up
        second = torch.empty(BLOCK // 2, device=DEVICE)  # 2 blocks
        del first
        device.mark("first")
        third = torch.empty(2 * BLOCK, device=DEVICE)  # 8 blocks
        view = third.view(2, BLOCK)[1]
        device.mark("second")
        assert device.peak() == (14 * BLOCK, {"": 4 * BLOCK, "first": 2 * BLOCK, "second": 8 * BLOCK})
        del third
        again = torch.empty(BLOCK, device=DEVICE)
        assert device.peak()[0] == (4 + 2 + 8 + 4) * BLOCK, "the view keeps it"
        device.start()
        assert device.held_at_start == (4 + 2 + 8 + 4) * BLOCK
        del before, second, view, again
        device.start()
        assert (device.held_at_start, device.peak()) == (0, (0, {}))


def test_what_the_backward_pass_needs_is_held_until_then():
    with VirtualDevice() as device:
        x = torch.empty(BLOCK, device=DEVICE).requires_grad_()
        device.start()
        y = x.exp().exp()  # each keeps its result
        device.mark("forward")
        assert device.peak() == (12 * BLOCK, {"": 4 * BLOCK, "forward": 8 * BLOCK})
        del y
        device.start()
        assert device.held_at_start == 4 * BLOCK, "of a graph that is gone nothing is held"
        with torch.no_grad():
            x.exp().exp()
        assert device.peak()[0] == 12 * BLOCK, "one is freed when the next is there"
        device.start()
        assert device.held_at_start == 4 * BLOCK


def test_parts_are_what_came_before_their_marks():
    with VirtualDevice() as device:
        x = torch.ones(3, device=DEVICE)
        device.mark("made")
        x.exp()
        x.log()
        device.mark("computed")
        x.abs()
    found = [(part, one.name) for part, one in device.parts()]
    names = ["aten::ones", "aten::exp", "aten::log", "aten::abs"]
    assert found == [*zip(["made", "computed", "computed", ""], names, strict=True)]


# --- autocast ---------------------------------------------------------------------------------------------------------

LOW, HIGH = torch.bfloat16, torch.float32
# https://docs.pytorch.org/docs/stable/amp.html: what CUDA casts to lower precision, to float32, and does not cast.
AUTOCAST = {
    "linear": (lambda x, low: F.linear(x, x), LOW),
    "matmul": (lambda x, low: x @ x.T, LOW),
    "mm": (lambda x, low: torch.mm(x, x), LOW),
    "addmm": (lambda x, low: torch.addmm(x, x, x), LOW),
    "bmm": (lambda x, low: torch.bmm(x[None], x[None]), LOW),
    "baddbmm": (lambda x, low: torch.baddbmm(x[None], x[None], x[None]), LOW),
    "conv2d": (lambda x, low: F.conv2d(x[None, None], x[None, None]), LOW),
    "attention": (lambda x, low: F.scaled_dot_product_attention(*[x[None, None]] * 3), LOW),
    "softmax": (lambda x, low: low.softmax(dim=1), HIGH),
    "log_softmax": (lambda x, low: low.log_softmax(dim=1), HIGH),
    "layer_norm": (lambda x, low: F.layer_norm(low, low.shape), HIGH),
    "cross_entropy": (lambda x, low: F.cross_entropy(low, torch.zeros(len(low), dtype=int, device=DEVICE)), HIGH),
    "binary_cross_entropy_with_logits": (lambda x, low: F.binary_cross_entropy_with_logits(low, low), HIGH),
    "smooth_l1_loss": (lambda x, low: F.smooth_l1_loss(low, low), HIGH),
    "sum": (lambda x, low: low.sum(), HIGH),
    "sum of rows": (lambda x, low: low.sum(dim=1), HIGH),
    "exp": (lambda x, low: low.exp(), HIGH),
    "log": (lambda x, low: low.log(), HIGH),
    "pow": (lambda x, low: low**2, HIGH),
    "norm": (lambda x, low: torch.linalg.vector_norm(low), HIGH),
    "cumsum": (lambda x, low: low.cumsum(dim=0), HIGH),
    "gelu": (lambda x, low: F.gelu(low), LOW),
    "relu": (lambda x, low: low.relu(), LOW),
    "mean": (lambda x, low: low.mean(), LOW),
    "the wider of two": (lambda x, low: low + x, HIGH),
}


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(("run", "dtype"), AUTOCAST.values(), ids=AUTOCAST)
def test_autocast_casts_as_on_cuda(run: Callable, dtype: torch.dtype, values: bool):
    with VirtualDevice(values=values):
        x = numbers(4, 4).to(DEVICE)
        with torch.autocast("virtual", torch.bfloat16):
            assert run(x, x.bfloat16()).dtype == dtype


def test_autocast_is_off_within_a_block_that_says_so_and_outside():
    with VirtualDevice(values=True):
        x = numbers(4, 4).to(DEVICE)
        with torch.autocast("virtual", torch.bfloat16):
            with torch.autocast("virtual", enabled=False):
                assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.float32


def test_autocast_casts_weights_once_a_forward_pass():
    with VirtualDevice(values=True) as device:
        layer, x = nn.Linear(4, 4).to(DEVICE), numbers(2, 4).to(DEVICE).bfloat16()
        for _ in range(2):
            device.start()
            with torch.autocast("virtual", torch.bfloat16):
                y = layer(layer(x))
            names = [one.name for one in device.operations if one.kernels]
            assert names == [*["aten::_to_copy"] * 2, *["aten::addmm"] * 2], "weight and bias"
        y.sum().backward()
        assert layer.weight.grad.dtype == torch.float32


# --- the time on a card -----------------------------------------------------------------------------------------------

# Of round numbers: 4 processors, 1 TFLOP/s, 1 GB/s to and from its memory, 0.5 GB/s to the host.
CARD = dataclasses.replace(
    CARDS["h100"], flops=dict.fromkeys(("bf16", "tf32", "fp32"), 1e12), bandwidth=1e9, processors=4, link=5e8
)
FULL = 2 * 256 * 256 * 1000 / (1e12 * 0.77)  # seconds of four whole tiles of 128 x 128 in float32
KERNEL = Operation("aten::add", 1, dtype=torch.float32)


def test_a_product_that_fills_the_card_takes_its_flops():
    assert product_seconds(Product(1, 256, 256, 1000), "fp32", CARD) == pytest.approx(FULL)
    assert product_seconds(Product(4, 128, 128, 1000), "fp32", CARD) == pytest.approx(FULL)
    assert product_seconds(Product(1, 256, 256, 1000), "bf16", CARD) == pytest.approx(FULL * 0.77 / 0.78)


def test_a_product_that_fills_it_in_part_takes_as_long_as_one_that_does():
    assert product_seconds(Product(1, 129, 200, 1000), "fp32", CARD) == pytest.approx(FULL), "tiles are whole"
    assert product_seconds(Product(1, 1, 1, 1000), "fp32", CARD) == pytest.approx(FULL), "three processors idle"
    assert product_seconds(Product(1, 256, 257, 1000), "fp32", CARD) == pytest.approx(2 * FULL), "two rounds"


def test_a_long_sum_is_split_between_processors():
    """One tile, over 1000 elements: by two of the four."""
    assert product_seconds(Product(1, 128, 128, 1000, split=True), "fp32", CARD) == pytest.approx(FULL / 2)


def test_an_operation_takes_what_binds_it():
    found = operation_seconds(
        Operation("aten::mm", 2, (Product(1, 256, 256, 1000),), torch.float32, 500_000, 350_000), CARD
    )
    assert found == {
        "compute": pytest.approx(FULL),
        "memory": pytest.approx(0.001),  # at 85 % of the bandwidth
        "launches": pytest.approx(2 * SHORTEST),
        "link": 0.0,
    }


def test_small_kernels_wait_for_the_host():
    parts = timeline([("a", KERNEL), ("a", KERNEL)], CARD)
    assert parts["a"].launches == pytest.approx(2 * SHORTEST)
    assert parts["a"].host == pytest.approx(2 * LAUNCH - SHORTEST)
    assert (parts["a"].kernels, parts["a"].bound_by) == (2, "host")


def test_behind_a_long_kernel_the_host_is_ahead_until_it_waits():
    long = dataclasses.replace(KERNEL, read=850_000)  # a millisecond
    ahead = timeline([("long", long), ("next", KERNEL)], CARD)
    assert ahead["long"].memory == pytest.approx(0.001)
    assert ahead["next"].host == 0.0
    wait = Operation("aten::_local_scalar_dense", 0, waits=True)
    late = timeline([("long", long), ("wait", wait), ("next", KERNEL)], CARD)
    assert late["next"].host == pytest.approx(LAUNCH), "the device has nothing to do until the next one comes"
    assert (late["wait"].waits, late["wait"].seconds) == (1, 0.0)


def test_a_copy_takes_the_link():
    copy = Operation("aten::_to_copy", 1, copied=1_000_000, waits=True)
    parts = timeline([("copy", copy), ("next", KERNEL)], CARD)
    assert parts["copy"].link == pytest.approx(0.002)
    assert parts["next"].host == pytest.approx(LAUNCH)


def test_views_take_no_time():
    assert timeline([("views", Operation("aten::view", 0))], CARD) == {}
