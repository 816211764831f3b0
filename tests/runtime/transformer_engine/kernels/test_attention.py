"""Fused attention against torch's, with every layout, mask and window, and in parts of its keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.transformer_engine.kernels.attention import (
    fused_attn_bwd,
    fused_attn_fwd,
    get_fused_attn_backend,
)
from megatron_hetero.runtime.transformer_engine.kernels.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from tests.runtime.transformer_engine.kernels.test_products import drawn

_SCALE = 0.37
_LAYOUTS = {
    "sbhd": NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD,
    "bshd": NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD,
    "thd": NVTE_QKV_Layout.NVTE_THD_THD_THD,
}


def forward(
    layout: str, mask: str, q: Any, k: Any, v: Any, window: Any = (-1, -1), **given: Any
) -> list[Any]:
    return fused_attn_fwd(
        0, 0, True, _SCALE, given.get("dropout", 0.0), True, _LAYOUTS[layout], None, None,
        NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Mask_Type[f"NVTE_{mask}_MASK"], None, window, False,
        given.get("ends_q"), given.get("ends_k"), q, k, v, None, given.get("padded_q"),
        given.get("padded_k"), None, None, None, None, None, None, None, 16,
        given.get("return_max_logit", False),
    )  # fmt: skip


def backward(
    layout: str, mask: str, q: Any, k: Any, v: Any, out: Any, d_out: Any, sums: Any,
    window: Any = (-1, -1), **given: Any,
) -> list[Any]:  # fmt: skip
    return fused_attn_bwd(
        0, 0, _SCALE, 0.0, True, _LAYOUTS[layout], None, None, _LAYOUTS[layout], None, None,
        NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Mask_Type[f"NVTE_{mask}_MASK"], None, window, False,
        True, given.get("ends_q"), given.get("ends_k"), q, k, v, out, d_out, None, [sums],
        given.get("padded_q"), given.get("padded_k"), None, None, None,
    )  # fmt: skip


def bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.permute(0, 2, 1, 3)


def shaped(layout: str, sequence: int, heads: int, size: int, seed: int) -> torch.Tensor:
    lead = (sequence, 2) if layout == "sbhd" else (2, sequence)
    return drawn(*lead, heads, size, seed=seed)


def seen(mask: str, window: tuple[int, int], num_q: int, num_k: int) -> torch.Tensor:
    """Which keys a query sees, written pair by pair."""
    shift = num_k - num_q if "BOTTOM_RIGHT" in mask else 0
    table = torch.zeros(num_q, num_k, dtype=torch.bool)
    for i in range(num_q):
        for j in range(num_k):
            is_seen = j <= i + shift if "CAUSAL" in mask else True
            if window[0] >= 0:
                is_seen &= j >= i + shift - window[0]
            if window[1] >= 0:
                is_seen &= j <= i + shift + window[1]
            table[i, j] = is_seen
    return table


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize(
    "mask, window, num_q",
    [
        ("NO", (-1, -1), 6),
        ("NO", (-1, -1), 3),
        ("CAUSAL", (-1, 0), 6),
        ("CAUSAL", (2, 0), 6),
        ("NO", (1, 2), 6),
        ("CAUSAL_BOTTOM_RIGHT", (-1, 0), 3),
        ("CAUSAL_BOTTOM_RIGHT", (2, 0), 3),
    ],
)
def test_dense_attention(layout: str, mask: str, window: tuple[int, int], num_q: int) -> None:
    """Grouped queries, values narrower than keys."""
    q, k, v = (
        shaped(layout, n, h, d, seed).requires_grad_()
        for seed, (n, h, d) in enumerate([(num_q, 4, 8), (6, 2, 8), (6, 2, 5)])
    )
    expected = functional.scaled_dot_product_attention(
        *(bhsd(t, layout) for t in (q, k, v)),
        attn_mask=seen(mask, window, num_q, 6), scale=_SCALE, enable_gqa=True,
    )  # fmt: skip
    d_out = shaped(layout, num_q, 4, 5, 9)
    expected.backward(bhsd(d_out, layout))
    with torch.no_grad():
        out, sums, _ = forward(layout, mask, q, k, v, window)
        assert torch.allclose(bhsd(out, layout), expected, atol=1e-6)
        assert sums.shape == (2, 4, num_q, 1) and sums.dtype == torch.float32
        found = backward(layout, mask, q, k, v, out, d_out, sums, window)
    for gradient, leaf in zip(found[:3], (q, k, v), strict=True):
        assert torch.allclose(gradient, leaf.grad, atol=1e-5)
    assert found[3:] == [None, None]


def test_parts_of_the_keys_add_up_by_their_log_sums() -> None:
    """As the ring of context parallelism has them; the whole output goes into each part."""
    q, k, v = (shaped("sbhd", 6, 2, 4, seed) for seed in range(3))
    whole, sums, _ = forward("sbhd", "NO", q, k, v)
    parts = [forward("sbhd", "NO", q, k[a:b], v[a:b]) for a, b in ((0, 2), (2, 6))]
    assert torch.allclose(sums, torch.logaddexp(parts[0][1], parts[1][1]), atol=1e-6)
    weights = [torch.exp(part[1] - sums).permute(2, 0, 1, 3) for part in parts]
    added = sum(w * part[0] for w, part in zip(weights, parts, strict=True))
    assert torch.allclose(added, whole, atol=1e-6)
    d_out = shaped("sbhd", 6, 2, 4, 7)
    dq, dk, dv, *_ = backward("sbhd", "NO", q, k, v, whole, d_out, sums)
    one, two = (
        backward("sbhd", "NO", q, k[a:b], v[a:b], whole, d_out, sums) for a, b in ((0, 2), (2, 6))
    )
    assert torch.allclose(one[0] + two[0], dq, atol=1e-5)
    assert torch.allclose(torch.cat([one[1], two[1]]), dk, atol=1e-5)
    assert torch.allclose(torch.cat([one[2], two[2]]), dv, atol=1e-5)


@pytest.mark.parametrize("mask", ["PADDING", "PADDING_CAUSAL"])
def test_packed_sequences_do_not_see_each_other(mask: str) -> None:
    """Three sequences, padding behind the second, none of which is written to."""
    q, k, v = (drawn(11, h, 4, seed=s) for s, h in enumerate((4, 2, 2)))
    ends, padded = torch.tensor([0, 3, 5, 9]), torch.tensor([0, 3, 7, 11])
    given: dict[str, Any] = {"ends_q": ends, "ends_k": ends, "padded_q": padded, "padded_k": padded}
    out, sums, largest, _ = forward("thd", mask, q, k, v, return_max_logit=True, **given)
    assert sums.shape == (11, 4, 1) == largest.shape
    d_out = drawn(11, 4, 4, seed=5)
    dq, dk, dv, *_ = backward("thd", mask, q, k, v, out, d_out, sums, **given)
    dense = mask.removeprefix("PADDING_") if "CAUSAL" in mask else "NO"
    for first, length in ((0, 3), (3, 2), (7, 4)):
        own = slice(first, first + length)
        alone = [t[own, None] for t in (q, k, v)]
        one, one_sums, _ = forward("sbhd", dense, *alone)
        assert torch.equal(out[own], one[:, 0])
        assert torch.equal(sums[own, :, 0], one_sums[0, :, :, 0].t())
        parts = backward("sbhd", dense, *alone, one, d_out[own, None], one_sums)
        for whole, part in zip((dq, dk, dv), parts, strict=False):
            assert torch.equal(whole[own], part[:, 0])
    assert not out[5:7].any() and not dq[5:7].any() and not dk[5:7].any()


def test_dense_sequences_with_padding() -> None:
    q, k, v = (shaped("bshd", 5, 2, 4, seed) for seed in range(3))
    ends = torch.tensor([0, 5, 8])
    out, sums, _ = forward("bshd", "PADDING", q, k, v, ends_q=ends, ends_k=ends)
    alone, alone_sums, _ = forward("bshd", "NO", q[1:, :3], k[1:, :3], v[1:, :3])
    assert torch.equal(out[1, :3], alone[0]) and not out[1, 3:].any()
    assert torch.equal(sums[1, :, :3], alone_sums[0])
    d_out = shaped("bshd", 5, 2, 4, 7)
    dq, *_ = backward("bshd", "PADDING", q, k, v, out, d_out, sums, ends_q=ends, ends_k=ends)
    assert not dq[1, 3:].any() and torch.isfinite(dq).all()
    with pytest.raises(UnsupportedError, match="needs the sequences' lengths"):
        forward("bshd", "PADDING", q, k, v)


def test_the_largest_score_of_each_query() -> None:
    q, k, v = (shaped("sbhd", 4, 2, 4, seed) for seed in range(3))
    _, _, largest, _ = forward("sbhd", "CAUSAL", q, k, v, (-1, 0), return_max_logit=True)
    scores = bhsd(q, "sbhd") @ bhsd(k, "sbhd").transpose(-1, -2) * _SCALE
    hidden = ~seen("CAUSAL", (-1, 0), 4, 4)
    assert torch.allclose(largest[..., 0], scores.masked_fill(hidden, float("-inf")).amax(-1))


def test_what_has_no_counterpart_is_declined() -> None:
    class Asked:
        dropout = 0.0
        bias_type = NVTE_Bias_Type.NVTE_NO_BIAS
        softmax_type = NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX

    asked = Asked()
    assert get_fused_attn_backend(asked) == (NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "")
    for name, value in (
        ("dropout", 0.1),
        ("bias_type", NVTE_Bias_Type.NVTE_ALIBI),
        ("softmax_type", NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX),
    ):
        other = Asked()
        setattr(other, name, value)
        backend, reason = get_fused_attn_backend(other)
        assert backend == NVTE_Fused_Attn_Backend.NVTE_No_Backend and reason
    q = shaped("sbhd", 2, 2, 4, 0)
    with pytest.raises(UnsupportedError, match="SBHD_SBHD_SBHD, with dropout"):
        forward("sbhd", "NO", q, q, q, dropout=0.1)
