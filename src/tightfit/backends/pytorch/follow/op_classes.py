"""The class of an op, by its name: the one of the device's limits that binds it.

Contractions are the ops with a FLOP formula. Normalization is whatever reduces: softmax, norms, losses, sums.
Element-wise are the ops that torch tags as pointwise, multi-tensor and fused optimizer ops, dropout and backward ops
that nothing else claims. Data movement copies, picks, places, fills and generates.
"""

from __future__ import annotations

from typing import Any

import torch

from tightfit.backends.pytorch.follow.op_flops import FLOPS, registered_flops
from tightfit.trace import OpClass


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NORMALIZATION = _names("""
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax softmax log_softmax
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
    native_batch_norm_backward _native_batch_norm_legit cudnn_batch_norm cudnn_batch_norm_backward
    batch_norm_backward _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward rms_norm
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
    sum mean var std var_mean std_mean prod amax amin max min aminmax argmax argmin any all logsumexp norm
    linalg_vector_norm count_nonzero cumsum cumprod logcumsumexp _foreach_norm _foreach_max topk sort
    _amp_foreach_non_finite_check_and_unscale_
""")
MOVEMENT = _names("""
    copy_ copy clone contiguous cat stack _chunk_cat index index_select index_put index_put_ _unsafe_index_put
    index_add index_add_ index_copy index_copy_ index_fill index_fill_ gather scatter scatter_ scatter_add scatter_add_
    scatter_reduce scatter_reduce_ take_along_dim embedding embedding_dense_backward embedding_backward
    slice_backward select_backward slice_scatter select_scatter diagonal_backward unfold_backward constant_pad_nd
    roll flip repeat repeat_interleave masked_select masked_scatter masked_scatter_ nonzero tril triu tril_ triu_
    fill fill_ zero_ zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full arange scalar_tensor
    linspace eye one_hot split_with_sizes_copy narrow_copy as_strided_copy permute_copy transpose_copy
    _foreach_copy_ _foreach_zero_ _local_scalar_dense item _pin_memory normal_ uniform_ bernoulli bernoulli_
    exponential_ random_ rand randn rand_like randn_like randint randint_like randperm normal multinomial im2col col2im
    chunk_cat all_gather_copy_in
""")

WITHOUT_KERNEL = _names("""
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided _efficientzerotensor _unsafe_view
    _reshape_alias lift lift_fresh t_ transpose_ squeeze_ unsqueeze_ as_strided_ detach_ set_ resize_ swapaxes_
    is_same_size sym_size sym_stride sym_numel sym_storage_offset is_pinned record_stream device
    _record_function_enter_new _record_function_exit _RecordFunction wait_tensor
""")
"""Ops that run no kernel although their schema calls them no view: allocation, metadata, bookkeeping."""

WRITE_ONLY = _names("""
    copy_ fill_ zero_ normal_ uniform_ bernoulli_ exponential_ random_ _foreach_zero_ _foreach_copy_
""")
"""In-place ops that do not read what they overwrite."""


SHAPE_ONLY = _names("""
    zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full
""")
"""Ops that take an argument's shape and dtype, not its values."""


COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of torch's collectives."""


def class_of(name: str, func: Any) -> OpClass:
    """The class of an op. Copies count as data movement here; a cast among them is for the caller to find.

    name: the op's name without namespace and overload. func: the op itself.
    """
    if name in FLOPS or registered_flops(func) is not None:
        return OpClass.CONTRACTION
    if name in NORMALIZATION:
        return OpClass.NORMALIZATION
    if name in MOVEMENT:
        return OpClass.MOVEMENT
    pointwise = torch.Tag.pointwise in getattr(func, "tags", ())
    if pointwise or name.startswith(("_foreach_", "_fused_")) or name.endswith("_backward") or "dropout" in name:
        return OpClass.ELEMENTWISE
    if name in ("_to_copy", "_amp_update_scale_", "dequantize_nf4", "dequantize_int8"):
        return OpClass.ELEMENTWISE
    if getattr(func, "namespace", "") in COLLECTIVES:
        return OpClass.COMMUNICATION
    return OpClass.OTHER
