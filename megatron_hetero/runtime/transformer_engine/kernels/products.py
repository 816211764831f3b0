"""Matrix products of linear layers, alone and in groups (`generic_gemm` and its kind)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.transformer_engine.kernels.float8 import in_fp8, rows_of
from megatron_hetero.runtime.transformer_engine.kernels.widths import torch_type, wide

Product = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""(product, gradient of the bias, input of GELU, the other output), as `generic_gemm` returns."""


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> Product:
    """Multiply `B` by `A` in fp32: `x @ w.T` forward, `g @ w` and `g.T @ x` backward.

    Args:
        A: the weight, or in the product of weight gradients the input; 2 dimensions or more, plain
            or fp8.
        transa: `A` is transposed.
        B: the input, or in a backward pass the gradient of the output.
        transb: `B` is transposed.
        D: tensor to write into; None makes one of `out_dtype`.
        quantizer: casts the result to fp8; None leaves it in `out_dtype`.
        out_dtype: type of a new result; None is that of `A`.
        bias: added forward; backward it asks for the gradient of a bias, of type `bias_type`.
        bias_type: type of the bias.
        gelu: apply GELU forward, or its derivative at `gelu_in` backward.
        gelu_in: input of GELU of the forward pass.
        grad: this is a backward pass.
        workspace: memory of the compiled function.
        workspace_size: its bytes.
        accumulate: add `beta` times `D`.
        use_split_accumulator: how fp8 sums.
        comm_overlap: exchange under the product, which is refused.
        comm_type: kind of that exchange.
        extra_output: result of that exchange.
        bulk_overlap: kind of that exchange.
        alpha: factor of the product.
        beta: factor of `D`; None is 1.
    Raises:
        UnsupportedError: fp8 with scales of blocks, or an exchange under the product.
    """
    if comm_overlap is not None:
        raise UnsupportedError(
            "Transformer Engine's exchange under a product (--tp-comm-overlap) has no counterpart "
            "on a CPU. Leave the flag out."
        )
    # A product of fp8 reads the rows of a factor, or the transpose that was made with them.
    rows_a, rows_b = rows_of(A, not transa), rows_of(B, transb)
    product = (rows_b.t() if transb else rows_b) @ (rows_a.t() if transa else rows_a)
    if alpha != 1.0:
        product = product * alpha
    bias_gradient = before_gelu = None
    if grad:
        if bias is not None:
            bias_gradient = rows_b.sum(0).to(torch_type(bias_type, _type(B)))
        if gelu and gelu_in is not None:
            product = _gelu_backward(product, gelu_in)
    else:
        if bias is not None and bias.numel():
            product = product + wide(bias)
        if gelu:
            # The backward pass reads GELU's input in the type of a result.
            before_gelu = product.to(torch_type(out_dtype, _type(A)))
            product = functional.gelu(wide(before_gelu), approximate="tanh")
    # The product has the leading axes of `B`; a weight's gradient has a single one.
    lead = (B.size()[-1],) if transb else B.size()[:-1]
    result = product.reshape(*lead, product.shape[-1])
    if before_gelu is not None:
        before_gelu = before_gelu.reshape(result.shape)
    if D is None:
        result = in_fp8(result.to(torch_type(out_dtype, _type(A))), quantizer, "generic_gemm")
        return result, bias_gradient, before_gelu, extra_output
    # The gradient of a weight is summed over micro-batches.
    if accumulate:
        kept = wide(D) if beta in (None, 1.0) else wide(D) * beta
        D.copy_(kept + result.reshape(D.shape))
    else:
        D.copy_(result.reshape(D.shape))
    return D, bias_gradient, before_gelu, extra_output


def _type(tensor: Any) -> torch.dtype:
    """Return the type of a plain tensor, or the type that an fp8 tensor stands for."""
    kind: torch.dtype = getattr(tensor, "_dtype", None) or tensor.dtype
    return kind


def _gelu_backward(gradient: Tensor, gelu_in: Tensor) -> Tensor:
    point = wide(gelu_in).reshape(gradient.shape).detach().requires_grad_()
    with torch.enable_grad():
        value = functional.gelu(point, approximate="tanh")
    (found,) = torch.autograd.grad(value, point, gradient)
    return found


def te_general_grouped_gemm(
    A: Sequence[Tensor],
    transa: bool,
    B: Sequence[Tensor],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_input: Sequence[Tensor],
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int = 0,
) -> Sequence[Tensor]:
    """Compute the products of several pairs of `A` and `B`, as `generic_gemm` does each.

    Args:
        A: as in `generic_gemm`, for each pair.
        transa: as in `generic_gemm`.
        B: as in `generic_gemm`, for each pair; a pair without rows gives 0.
        transb: as in `generic_gemm`.
        out: results to write into; with `single_output` one, of all rows.
        out_dtype: type of the results.
        m_splits: rows of each pair.
        bias: biases, or in a backward pass gradients to write into; an empty one is none.
        bias_dtype: type of the biases.
        single_output: the results are rows of one tensor.
        gelu_input: room for the inputs of GELU, which is refused.
        grad: this is a backward pass.
        workspaces: memory of the compiled function.
        workspace_size: its bytes.
        accumulate: add to the results.
        use_split_accumulator: how fp8 sums.
        sm_count: multiprocessors of a GPU to use.
    Returns:
        The biases, or their gradients.
    Raises:
        UnsupportedError: GELU, or fp8.
    """
    if any(t is not None and t.numel() for t in gelu_input):
        raise UnsupportedError(
            "Transformer Engine's te_general_grouped_gemm with GELU has no counterpart on a CPU."
        )
    # Row at which the next result begins in a single output.
    first = 0
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        if single_output:
            result = out[0][first : first + m_splits[i]]
            first += m_splits[i]
        else:
            result = out[i]
        own = bias[i] if bias[i] is not None and bias[i].numel() else None
        # An expert without tokens: its product is 0, and so is its bias's gradient.
        if a.numel() == 0 or b.numel() == 0:
            if not accumulate:
                result.zero_()
            if grad and own is not None:
                own.zero_()
            continue
        kind = None if own is None else own.dtype
        _, bias_gradient, _, _ = generic_gemm(
            a, transa, b, transb, result, None, None, own, kind, False, None, grad,
            None, 0, accumulate, use_split_accumulator,
        )  # fmt: skip
        if grad and own is not None and bias_gradient is not None:
            own.copy_(bias_gradient)
    return bias


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add the gradient of a weight to `main_grad`, as Apex's function of that name does.

    Args:
        total_input: [..., in].
        grad_output: [..., out].
        main_grad: [out, in], in fp32 or half precision.
    """
    rows = wide(grad_output.reshape(-1, grad_output.shape[-1]))
    product = rows.t() @ wide(total_input.reshape(-1, total_input.shape[-1]))
    main_grad.copy_(wide(main_grad) + product)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
