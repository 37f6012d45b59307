"""The ResNet of the detector and of VL-BERT's region features, in two parts: C4 before RoI pooling, res5 after it.

Parameters have detectron2's names (`res3.0.conv1.norm.weight`), so that published weights map one to one.
Shape letters: N images, K regions, H W pixels, S cells per side of a pooled region, w = ResNetConfig.width.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from storage.settings import check, check_choices
from training.precision import compute_dtype


@dataclass(frozen=True)
class ResNetConfig:
    """Architecture of a bottleneck ResNet. Networks with equal configurations have equal parameter names and shapes."""

    blocks: tuple[int, int, int, int] = (3, 4, 23, 3)
    """Number of bottleneck blocks in res2, res3, res4, res5."""
    width: int = 64
    """Channels of the stem. Bottlenecks of res2..res5 have 1, 2, 4, 8 times that; their outputs, 4, 8, 16, 32 times."""
    stride_in_1x1: bool = True
    """Halve a stage's map in its first 1x1 convolution (Caffe, Visual Genome weights), not in the 3x3 (torchvision)."""
    stem_pool: Literal["caffe", "torch"] = "caffe"
    """3x3/2 max-pooling of the stem: `caffe`, unpadded, sizes rounded up; `torch`, padding 1, sizes rounded down."""
    res5_dilated: bool = True
    """Keep the map's size in res5 and dilate its 3x3 convolutions by 2, instead of halving the size."""
    norm: Literal["frozen", "batch"] = "frozen"
    """`frozen`: statistics, scale and shift never change, even in train(); `batch`: trainable BatchNorm2d."""

    def __post_init__(self):
        check_choices(self)
        check(self, len(self.blocks) == 4 and min(self.blocks) >= 1, "blocks", "four numbers, each at least 1")
        check(self, self.width >= 1, "width", "at least 1")

    @property
    def c4_channels(self) -> int:
        """Number of output channels of ResNetC4."""
        return 16 * self.width

    @property
    def res5_channels(self) -> int:
        """Number of output channels of Res5."""
        return 32 * self.width


RESNET50 = ResNetConfig(blocks=(3, 4, 6, 3))
RESNET101 = ResNetConfig(blocks=(3, 4, 23, 3))


class FrozenNorm(nn.Module):
    """Batch normalisation with fixed statistics, scale and shift, rounded as by BatchNorm2d."""

    eps = 1e-5
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class NormedConv(nn.Conv2d):
    """A convolution without bias, followed by the normalisation layer `norm`."""

    norm: FrozenNorm | nn.BatchNorm2d | nn.Identity

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, dilation: int, norm: str):
        padding = dilation * (kernel // 2)
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, dilation=dilation, bias=False)
        self.norm = FrozenNorm(outputs) if norm == "frozen" else nn.BatchNorm2d(outputs)

    def forward(self, input: Tensor) -> Tensor:
        if not self.folds:
            return self.norm(super().forward(input))
        return self.convolve(input, *self.fold())

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve with another weight and bias, without the norm."""
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)

    @property
    def folds(self) -> bool:
        """True if `forward` uses `fold`: after fold_norms, and for frozen norms in half precision."""
        # Not in float32, where folding would round differently from the published code. Exact zeros before a ReLU would
        # become nonzero, which would change the gradients of some convolutions by 0.1 %.
        if isinstance(self.norm, FrozenNorm):
            return compute_dtype(self.weight).itemsize == 2
        return isinstance(self.norm, nn.Identity)

    def fold(self) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of a convolution that equals this one followed by its norm.

        The norm's statistics are fixed. Backpropagation through this computation is cheap, because the weight is
        much smaller than the convolution's output.
        """
        norm = self.norm
        if isinstance(norm, nn.Identity):
            assert self.bias is not None  # set by fold_norms
            return self.weight, self.bias
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        return self.weight * scale[:, None, None, None], norm.bias - norm.running_mean * scale


# PyTorch's kernels that fuse a convolution with bias, sum and ReLU: oneDNN's on a CPU, cuDNN's on a GPU. In bfloat16,
# an unfused bias, sum and ReLU take as long as the convolutions. torch.compile does its own fusion.
_FUSED: Any = (
    getattr(torch.ops.mkldnn, "_convolution_pointwise", None) if torch.backends.mkldnn.is_available() else None
)
_FUSED_DTYPES = (torch.float32, torch.bfloat16) if _FUSED and torch.ops.mkldnn._is_mkldnn_bf16_supported() else ()


def _is_fused(conv: NormedConv, x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if relu(conv(x) + shortcut) can run as one kernel."""
    if not conv.folds or torch.compiler.is_compiling():
        return False
    if x.is_cuda:
        # Tensor cores need a multiple of eight channels, and float32 only if it may be rounded to TF32.
        cudnn = torch.backends.cudnn
        tf32 = dtype == torch.float32 and cudnn.conv.fp32_precision == "tf32"  # ty: ignore[missing-attribute] stub
        rounded = dtype == torch.bfloat16 or tf32
        return rounded and cudnn.is_available() and conv.weight.shape[0] % 8 == 0
    return x.device.type == "cpu" and dtype in _FUSED_DTYPES


class _FusedConvReLU(torch.autograd.Function):
    """relu(conv(x) + bias + shortcut) in one kernel. The backward pass takes the ReLU's mask from the result."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, conv: NormedConv) -> Tensor:
        if x.is_cuda:
            geometry: tuple = (conv.stride, conv.padding, conv.dilation, 1)
            if shortcut is None:
                y = torch.cudnn_convolution_relu(x, weight, bias, *geometry)
            else:
                y = torch.cudnn_convolution_add_relu(x, weight, shortcut, 1.0, bias, *geometry)
        else:
            arguments = (weight, bias, conv.padding, conv.stride, conv.dilation, 1)
            if shortcut is None:
                y = _FUSED(x, *arguments, "relu", [], "")
            else:
                y = _FUSED.binary(x, shortcut, *arguments, "add", 1.0, "relu", [], "")
        ctx.save_for_backward(x, weight, y)
        ctx.geometry = (conv.stride, conv.padding, conv.dilation)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
        needed = (*ctx.needs_input_grad[:2], False)  # the bias is computed from buffers
        gradients = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, *ctx.geometry, False, [0, 0], 1, needed
        )
        return *gradients, gradient if ctx.needs_input_grad[3] else None, None


def conv_relu(
    conv: NormedConv, x: Tensor, shortcut: Tensor | None = None, projection: NormedConv | None = None
) -> Tensor:
    """Return relu(conv(x) + shortcut). If `projection` is given, it is applied to the shortcut first."""
    dtype = compute_dtype(conv.weight)
    if not _is_fused(conv, x, dtype):
        y, shortcut = conv(x), shortcut if projection is None else projection(shortcut)
        return F.relu_(y if shortcut is None else y.add_(shortcut))
    weight, bias = conv.fold()
    # In bfloat16 the kernels support the sum only in this layout.
    layout = torch.channels_last if dtype == torch.bfloat16 else torch.preserve_format
    if shortcut is not None and projection is not None and dtype == torch.bfloat16 and projection.folds:
        # On a GPU, adding a bias that is not fused takes a pass over the map, so it is added to the fused bias.
        projection_weight, projection_bias = projection.fold()
        shortcut = projection.convolve(shortcut.to(dtype, memory_format=layout), projection_weight)
        bias = bias + projection_bias
    elif projection is not None:
        shortcut = projection(shortcut)
    x, weight = x.to(dtype, memory_format=layout), weight.to(dtype, memory_format=layout)
    shortcut = None if shortcut is None else shortcut.to(dtype, memory_format=layout)
    return _FusedConvReLU.apply(x, weight, bias.to(dtype), shortcut, conv)


class Stem(nn.Module):
    """A 7x7 convolution and 3x3 max-pooling, both with stride 2. Together they divide height and width by four."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.conv1 = NormedConv(3, config.width, kernel=7, stride=2, dilation=1, norm=config.norm)
        self.caffe_pool = config.stem_pool == "caffe"

    def forward(self, images: Tensor) -> Tensor:
        x = conv_relu(self.conv1, images)
        if self.caffe_pool:
            return F.max_pool2d(x, kernel_size=3, stride=2, padding=0, ceil_mode=True)
        return F.max_pool2d(x, kernel_size=3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut. In the first block of a stage, the shortcut is a convolution."""

    def __init__(self, inputs: int, bottleneck: int, outputs: int, stride: int, dilation: int, config: ResNetConfig):
        super().__init__()
        stride_1x1, stride_3x3 = (stride, 1) if config.stride_in_1x1 else (1, stride)
        norm = config.norm
        self.conv1 = NormedConv(inputs, bottleneck, kernel=1, stride=stride_1x1, dilation=1, norm=norm)
        self.conv2 = NormedConv(bottleneck, bottleneck, kernel=3, stride=stride_3x3, dilation=dilation, norm=norm)
        self.conv3 = NormedConv(bottleneck, outputs, kernel=1, stride=1, dilation=1, norm=norm)
        self.shortcut = None
        if inputs != outputs or stride != 1:
            self.shortcut = NormedConv(inputs, outputs, kernel=1, stride=stride, dilation=1, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        y = conv_relu(self.conv2, conv_relu(self.conv1, x))
        return conv_relu(self.conv3, y, x, self.shortcut)


def _make_stage(config: ResNetConfig, number: int, stride: int, dilation: int = 1) -> list[Bottleneck]:
    """Build the blocks of ResNet stage `number` (2 to 5)."""
    bottleneck = config.width * 2 ** (number - 2)
    inputs = config.width if number == 2 else 2 * bottleneck
    outputs = 4 * bottleneck
    return [
        Bottleneck(
            inputs if block == 0 else outputs, bottleneck, outputs, stride if block == 0 else 1, dilation, config
        )
        for block in range(config.blocks[number - 2])
    ]


def _initialise(module: nn.Module, config: ResNetConfig) -> None:
    """Initialise the convolutions with He's method (kaiming_normal_, fan-out).

    Frozen norms do not renormalise, so each residual sum would double the variance. The last convolution of each block
    is therefore scaled by 1/sqrt(number of blocks). The variance then grows by at most a factor of e over the network.
    """
    for conv in module.modules():
        if isinstance(conv, NormedConv):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if config.norm == "frozen":
        for block in module.modules():
            if isinstance(block, Bottleneck):
                with torch.no_grad():
                    block.conv3.weight.mul_(sum(config.blocks) ** -0.5)


class ResNetC4(nn.Module):
    """The backbone (stem, res2, res3 and res4). It maps images [N, 3, H, W] to features [N, 16w, H/16, W/16]."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        self.stem = Stem(config)
        self.res2 = nn.Sequential(*_make_stage(config, 2, stride=1))
        self.res3 = nn.Sequential(*_make_stage(config, 3, stride=2))
        self.res4 = nn.Sequential(*_make_stage(config, 4, stride=2))
        _initialise(self, config)

    def forward(self, images: Tensor) -> Tensor:
        return self.res4(self.res3(self.res2(self.stem(images))))

    def freeze(self, stages: int) -> "ResNetC4":
        """Freeze the first `stages` of stem, res2, res3 and res4 with freeze_module, and return self."""
        for stage in (self.stem, self.res2, self.res3, self.res4)[:stages]:
            freeze_module(stage)
        return self


class Res5(nn.Sequential):
    """The last ResNet stage, applied to pooled regions [K, 16w, S, S].

    The output is [K, 32w, S, S] if the stage is dilated, else [K, 32w, S/2, S/2]. Parameters have the same names as in
    detectron2's `roi_heads.res5`, such as `0.conv1.weight`.
    """

    def __init__(self, config: ResNetConfig):
        stride, dilation = (1, 2) if config.res5_dilated else (2, 1)
        super().__init__(*_make_stage(config, 5, stride, dilation))
        _initialise(self, config)


def freeze_module(module: nn.Module) -> None:
    """Turn off the gradients of all parameters of `module`, and replace its trainable batch norms with FrozenNorms."""
    for conv in module.modules():
        if isinstance(conv, NormedConv) and isinstance(trainable := conv.norm, nn.BatchNorm2d):
            conv.norm = FrozenNorm(trainable.num_features).to(trainable.weight)
            for name, buffer in conv.norm.named_buffers():
                buffer.copy_(getattr(trainable, name).detach())
    module.requires_grad_(False)


def fold_norms(module: nn.Module) -> None:
    """Fold the norms of `module` into its convolutions, for faster inference.

    The module cannot be trained, saved or loaded afterwards.
    """
    for conv in module.modules():
        if isinstance(conv, NormedConv):
            weight, bias = conv.fold()
            conv.weight = nn.Parameter(weight.detach(), requires_grad=False)
            conv.bias = nn.Parameter(bias.detach(), requires_grad=False)
            conv.norm = nn.Identity()
