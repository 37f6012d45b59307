"""The encoder computes no padding, and the same as one that does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlbert.config import ModelConfig
from vlbert.model.layers import Encoder, Packing, Streams

CONFIG = ModelConfig(layers="JJ", hidden_size=24, num_heads=4, intermediate_size=40, dropout=0.1)


def unpacked(encoder: Encoder, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same with padding: rows of one length, in which nothing attends to what is not real."""
    maps = []
    for layer in encoder.layers:
        query, key, value = (
            part(x).unflatten(2, (layer.num_heads, -1)).transpose(1, 2)
            for part in (layer.query, layer.key, layer.value)
        )
        scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
        maps.append(scores.masked_fill(~mask[:, None, None, :], -torch.inf).softmax(dim=3))
        attended = (maps[-1] @ value).transpose(1, 2).flatten(2)
        x = layer.attention_norm(x + layer.attention_output(attended))
        x = layer.output_norm(x + layer.output(F.gelu(layer.intermediate(x))))
    return x, maps


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(CONFIG).eval()


def encode(encoder: Encoder, x: Tensor, mask: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
    """x [N, 13, C] of six words, six regions and [END] -> the same, encoded."""
    lengths = (part.sum(dim=1).tolist() for part in (mask[:, :6], mask[:, 6:]))
    return encoder(Streams(x[:, :6], x[:, 6:], mask[:, :6], mask[:, 6:], *lengths), attentions).joined()[0]


def some_rows(full: bool = False) -> tuple[Tensor, Tensor]:
    """x [5, 13, C], and which are real: gaps anywhere, [END] always there, one row with nothing else."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(5, 13, generator=generator) < 0.6
    mask[3] = False
    mask[:, -1] = True
    return torch.randn(5, 13, 24, generator=generator), mask | full


@pytest.mark.parametrize("full", [False, True], ids=["ragged", "full"])
def test_packed_rows_equal_padded_rows_in_outputs_gradients_and_attention(encoder: Encoder, full: bool):
    x, mask = some_rows(full)
    packed, padded = x.clone().requires_grad_(), x.clone().requires_grad_()
    maps = []
    mine = encode(encoder, packed, mask, maps)
    theirs, their_maps = unpacked(encoder, padded, mask)
    torch.testing.assert_close(mine[mask], theirs[mask], rtol=0, atol=2e-6)
    assert not mine[~mask].any()
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2)) * mask[:, :, None]
    mine_back = torch.autograd.grad((mine * weights).sum(), [packed, *encoder.parameters()])
    theirs_back = torch.autograd.grad((theirs * weights).sum(), [padded, *encoder.parameters()])
    for found, expected in zip(mine_back, theirs_back, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    for found, expected in zip((one.weights for one in maps), their_maps, strict=True):
        assert found.shape == (5, 4, 13, 13)
        real = mask[:, None, :].expand(5, 4, 13)
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-6)
        assert not found.transpose(1, 3)[~mask].any(), "padding gets nothing"
        torch.testing.assert_close(found.sum(3), torch.ones(5, 4, 13))


def test_padding_is_never_read_even_if_nan(encoder: Encoder):
    x, mask = some_rows()
    poisoned = x.masked_fill(~mask[:, :, None], torch.nan).requires_grad_()
    assert torch.equal(encode(encoder, poisoned, mask), encode(encoder, x, mask))
    encode(encoder, poisoned, mask).square().sum().backward()
    assert not poisoned.grad[~mask].any()
    assert poisoned.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters())


def test_linear_layers_compute_no_padding(encoder: Encoder):
    x, mask = some_rows()
    seen = []
    encoder.layers[0].intermediate.register_forward_hook(lambda *call: seen.append(call[2].shape))
    encode(encoder, x, mask)
    assert seen == [(int(mask.sum()), 40)]
    assert Packing.of(mask, mask.sum(dim=1).tolist(), torch.float32).filled.shape == (5, int(mask.sum(dim=1).max()))


def test_attention_weights_are_dropped_in_training_only(encoder: Encoder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda _, x: x)  # so that only attention's own is left
    x, mask = some_rows()
    expected = encode(encoder, x, mask)
    assert torch.equal(encode(encoder, x, mask), expected)
    assert not torch.equal(encode(encoder.train(), x, mask), expected)
