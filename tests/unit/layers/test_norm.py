import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fledge.layers.linear import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])  # of the size of eps; where float16 squares would overflow
def test_bit_for_bit_as_transformers(dtype: torch.dtype, scale: float) -> None:
    ours, theirs = RMSNorm(48, eps=1e-5), LlamaRMSNorm(48, eps=1e-5)
    weight = 1 + 0.3 * torch.randn(48)
    for norm in (ours, theirs):
        norm.weight.data = weight.to(dtype)
    x = (scale * torch.randn(5, 3, 48)).to(dtype)
    found = ours(x)
    assert found.dtype == dtype
    assert found.isfinite().all()
    assert torch.equal(found, theirs(x))


def test_by_definition() -> None:
    x = torch.tensor([[3.0, 4.0]])  # mean square 12.5
    norm = RMSNorm(2, eps=12.5)
    norm.weight.data = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(norm(x), torch.tensor([[3.0 / 5, -8.0 / 5]]))
