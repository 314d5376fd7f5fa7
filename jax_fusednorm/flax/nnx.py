"""Flax nnx modules over the ops."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.nn.initializers import Initializer
from jax.typing import ArrayLike, DTypeLike

from ..core.types import Activation, Implementation, Placement, Rounding, Style
from ..ops.add_rms_norm import add_rms_norm
from ..ops.matmul_partial_rms_norm import matmul_partial_rms_norm
from ..ops.rms_norm import rms_norm
from ..ops.rms_norm_add import rms_norm_add
from . import common

__all__ = ["AddRMSNorm", "GatedGroupRMSNorm", "MatmulPartialRMSNorm", "QKNormRope", "RMSNorm", "RMSNormAdd"]


class RMSNorm(nnx.RMSNorm):
    """flax.nnx.RMSNorm on `jax_fusednorm.rms_norm`: the same arguments, parameters and checkpoints, and three more options.

    Equivalent to flax.nnx.RMSNorm, whose own code it runs for what has no kernel (other reduction or feature axes,
    axis_name, mask, a promote_dtype of one's own).

    Args:
      num_features: D, the size of the last axis.
      scale_init: the scale's initializer; by default what makes scale + scale_offset one.
      scale_offset, multiply_before_cast, implementation: as in `rms_norm`.
      the rest: as in flax.nnx.RMSNorm. With dtype=None a bfloat16 input and a float32 scale give float32, as in Flax; set
        dtype=jnp.bfloat16 to stay in bfloat16. The scale is used in its own dtype, with multiply_before_cast=False rounded to x's.
    """

    def __init__(self, num_features: int, *, epsilon: float = 1e-6, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
                 use_scale: bool = True, scale_init: Initializer | None = None, scale_offset: float = 0.0, multiply_before_cast: bool = True,
                 implementation: Implementation | None = None, reduction_axes: int | Sequence[int] = -1, feature_axes: int | Sequence[int] = -1,
                 axis_name: str | None = None, axis_index_groups: Any = None, use_fast_variance: bool = True,
                 promote_dtype: Callable[..., Any] = dtypes.promote_dtype, rngs: nnx.Rngs,
                 scale_metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_features, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, use_scale=use_scale,
                         scale_init=common.initial_scale(scale_init, scale_offset), reduction_axes=reduction_axes, feature_axes=feature_axes,
                         axis_name=axis_name, axis_index_groups=axis_index_groups, use_fast_variance=use_fast_variance,
                         promote_dtype=promote_dtype, rngs=rngs, scale_metadata=scale_metadata or {})
        self.scale_offset = scale_offset
        self.multiply_before_cast = multiply_before_cast
        self.implementation = common.checked_implementation(self, implementation)

    def __call__(self, x: ArrayLike, mask: jax.Array | None = None) -> jax.Array:
        if not common.has_kernel(self, x, mask) or self.promote_dtype is not dtypes.promote_dtype:
            common.check_flax_path(self)
            return super().__call__(x, mask)
        scale = self.scale[...] if self.use_scale else None
        x, = common.promote(self.dtype, scale, x)
        return rms_norm(x, scale, epsilon=self.epsilon, scale_offset=self.scale_offset,
                        multiply_before_cast=self.multiply_before_cast, implementation=self.implementation)


class _ResidualNorm(nnx.Module):
    """A scale, and the options that the norms with a residual share."""

    def __init__(self, num_features: int, *, epsilon: float = 1e-6, dtype: DTypeLike | None = None,
                 param_dtype: DTypeLike = jnp.float32, use_scale: bool = True, scale_init: Initializer | None = None, scale_offset: float = 0.0,
                 multiply_before_cast: bool = True, implementation: Implementation | None = None, rngs: nnx.Rngs,
                 scale_metadata: Mapping[str, Any] | None = None) -> None:
        self.num_features, self.dtype, self.param_dtype, self.use_scale = num_features, dtype, param_dtype, use_scale
        if use_scale:
            init = common.initial_scale(scale_init, scale_offset)
            self.scale = nnx.Param(init(rngs.params(), (num_features,), param_dtype), **(scale_metadata or {}))
        else:
            self.scale = nnx.data(None)
        self.epsilon, self.scale_offset, self.multiply_before_cast = epsilon, scale_offset, multiply_before_cast
        self.implementation = common.checked_implementation(self, implementation)

    def _apply(self, op, x, residual, **options):
        scale = self.scale[...] if self.use_scale else None
        x, residual = common.promote(self.dtype, scale, x, residual)
        return op(x, residual, scale, epsilon=self.epsilon, scale_offset=self.scale_offset,
                  multiply_before_cast=self.multiply_before_cast, implementation=self.implementation, **options)


class AddRMSNorm(_ResidualNorm):
    """`jax_fusednorm.add_rms_norm` with its scale: `normed, sum = AddRMSNorm(D, rngs=rngs)(x, residual)`.

    A pre-norm block carries `sum` as its residual stream and feeds `normed` to its next layer.

    Args:
      num_features: D, the size of the last axis.
      epsilon, scale_offset, multiply_before_cast, sum_rounding, return_sum, implementation: as in `add_rms_norm`.
      dtype: what x and residual are cast to; None: what they and the scale promote to.
      param_dtype: the scale's dtype.
      use_scale: False for no scale.
      scale_init: the scale's initializer; by default what makes scale + scale_offset one.
      scale_metadata: metadata of the scale's nnx.Param, its sharding for one.
      rngs: the key of the initializer.
    """

    def __init__(self, num_features: int, *, sum_rounding: Rounding = "float32", return_sum: bool = True,
                 epsilon: float = 1e-6, dtype: DTypeLike | None = None,
                 param_dtype: DTypeLike = jnp.float32, use_scale: bool = True, scale_init: Initializer | None = None, scale_offset: float = 0.0,
                 multiply_before_cast: bool = True, implementation: Implementation | None = None, rngs: nnx.Rngs,
                 scale_metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_features, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, use_scale=use_scale, scale_init=scale_init,
                         scale_offset=scale_offset, multiply_before_cast=multiply_before_cast, implementation=implementation, rngs=rngs,
                         scale_metadata=scale_metadata)
        self.sum_rounding, self.return_sum = sum_rounding, return_sum

    def __call__(self, x: ArrayLike, residual: ArrayLike) -> Any:  # a pair, or with return_sum=False an array
        return self._apply(add_rms_norm, x, residual, sum_rounding=self.sum_rounding, return_sum=self.return_sum)


class MatmulPartialRMSNorm(nnx.Module):
    """`jax_fusednorm.matmul_partial_rms_norm` with its weight and scale: `normed, unnormed = MatmulPartialRMSNorm(K, N, n, rngs=rngs)(x)`.

    Args:
      in_features, out_features: K and N of the kernel [K, N], which is laid out and initialized as nnx.Linear's.
      num_normed: how many outputs, the first, are normalized: from 1 to N.
      epsilon, scale_offset, multiply_before_cast, implementation: as in `matmul_partial_rms_norm`.
      dtype: what x and the kernel are cast to; None: what they and the scale promote to.
      param_dtype: the parameters' dtype.
      kernel_init, scale_init: their initializers; the scale's is by default what makes scale + scale_offset one.
      kernel_metadata, scale_metadata: metadata of the nnx.Params, their sharding for one.
      rngs: the keys of the initializers.
    """

    def __init__(self, in_features: int, out_features: int, num_normed: int, *, epsilon: float = 1e-6, dtype: DTypeLike | None = None,
                 param_dtype: DTypeLike = jnp.float32, kernel_init: Initializer = common.default_kernel_init,
                 scale_init: Initializer | None = None, scale_offset: float = 0.0, multiply_before_cast: bool = True,
                 implementation: Implementation | None = None, rngs: nnx.Rngs, kernel_metadata: Mapping[str, Any] | None = None,
                 scale_metadata: Mapping[str, Any] | None = None) -> None:
        self.in_features, self.out_features, self.num_normed = in_features, out_features, num_normed
        self.dtype, self.param_dtype = dtype, param_dtype
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features), param_dtype), **(kernel_metadata or {}))
        init = common.initial_scale(scale_init, scale_offset)
        self.scale = nnx.Param(init(rngs.params(), (num_normed,), param_dtype), **(scale_metadata or {}))
        self.epsilon, self.scale_offset, self.multiply_before_cast = epsilon, scale_offset, multiply_before_cast
        self.implementation = common.checked_implementation(self, implementation)

    def __call__(self, x: ArrayLike) -> tuple[jax.Array, jax.Array]:
        scale = self.scale[...]
        x, kernel = common.promote(self.dtype, scale, x, self.kernel[...])
        return matmul_partial_rms_norm(x, kernel, scale, epsilon=self.epsilon, scale_offset=self.scale_offset, transpose_b=False,
                                       multiply_before_cast=self.multiply_before_cast, implementation=self.implementation)


class RMSNormAdd(_ResidualNorm):
    """`jax_fusednorm.rms_norm_add` with its scale: `stream = RMSNormAdd(D, rngs=rngs)(x, stream)`.

    Args:
      norm_rounding: as in `rms_norm_add`.
      the rest: as in AddRMSNorm.
    """

    def __init__(self, num_features: int, *, norm_rounding: Rounding = "float32", epsilon: float = 1e-6, dtype: DTypeLike | None = None,
                 param_dtype: DTypeLike = jnp.float32, use_scale: bool = True, scale_init: Initializer | None = None, scale_offset: float = 0.0,
                 multiply_before_cast: bool = True, implementation: Implementation | None = None, rngs: nnx.Rngs,
                 scale_metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_features, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, use_scale=use_scale, scale_init=scale_init,
                         scale_offset=scale_offset, multiply_before_cast=multiply_before_cast, implementation=implementation, rngs=rngs,
                         scale_metadata=scale_metadata)
        self.norm_rounding = norm_rounding

    def __call__(self, x: ArrayLike, residual: ArrayLike) -> jax.Array:
        return self._apply(rms_norm_add, x, residual, norm_rounding=self.norm_rounding)


class GatedGroupRMSNorm(nnx.Module):
    """`jax_fusednorm.gated_group_rms_norm` with its scale: `out = GatedGroupRMSNorm(I, group_size=I // 8, rngs=rngs)(y, gate)`.

    Args:
      num_features: I, the size of y's last axis.
      group_size, epsilon, norm_before_gate, gate_start, activation, rounding, implementation: as in `gated_group_rms_norm`.
      dtype: what y is cast to; None: what it and the scale promote to. The gate keeps its own.
      param_dtype, scale_init, scale_metadata, rngs: as in AddRMSNorm.
    """

    def __init__(self, num_features: int, *, group_size: int | None = None, epsilon: float = 1e-5, norm_before_gate: bool = False,
                 gate_start: int | None = None, activation: Activation = "silu", rounding: Rounding = "storage",
                 dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, implementation: Implementation | None = None,
                 scale_init: Initializer = common.ONES, rngs: nnx.Rngs, scale_metadata: Mapping[str, Any] | None = None) -> None:
        self.num_features, self.group_size, self.epsilon, self.norm_before_gate = num_features, group_size, epsilon, norm_before_gate
        self.gate_start, self.activation, self.rounding = gate_start, activation, rounding
        self.dtype, self.param_dtype = dtype, param_dtype
        self.implementation = common.checked_implementation(self, implementation)
        self.scale = nnx.Param(scale_init(rngs.params(), (num_features,), param_dtype), **(scale_metadata or {}))

    def __call__(self, y: ArrayLike, gate: ArrayLike) -> jax.Array:
        return common.gated(self, self.scale[...], y, gate)


class _Scale(nnx.Module):
    """A norm's parameter without the norm."""

    def __init__(self, width, init, param_dtype, rngs, metadata):
        self.scale = nnx.Param(init(rngs.params(), (width,), param_dtype), **(metadata or {}))


class QKNormRope(nnx.Module):
    """`jax_fusednorm.qk_rms_norm_rope` with its scales: `q, k = QKNormRope(D, rngs=rngs)(q, k, positions)`.

    The parameters are `q_norm.scale` and `k_norm.scale`, as in Qwen3 and Gemma 3.

    Args:
      head_dim: D, the channels of a head.
      theta, rope_dim, style, placement, epsilon, scale_offset, multiply_before_cast, round_before_rope, implementation: as in
        `qk_rms_norm_rope`.
      dtype: what q and k are cast to; None: what they and the scales promote to.
      param_dtype: the scales' dtype.
      scale_init: the scales' initializer; by default what makes scale + scale_offset one.
      scale_metadata: metadata of the nnx.Params, their sharding for one.
      rngs: the key of the initializer.

    Called with q [..., T, Hq, D], k [..., T, Hk, D], positions, and where wanted freq_factors or freqs_cis, as `qk_rms_norm_rope` is; or with
    a fused projection [..., T, W], None, positions and num_heads, num_kv_heads, q_start, k_start and v_start.
    """

    def __init__(self, head_dim: int, *, theta: float = 10000.0, rope_dim: int | None = None, style: Style = "neox",
                 placement: Placement = "prefix", epsilon: float = 1e-6, scale_offset: float = 0.0, multiply_before_cast: bool = True,
                 round_before_rope: bool | None = None, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
                 scale_init: Initializer | None = None, implementation: Implementation | None = None, rngs: nnx.Rngs,
                 scale_metadata: Mapping[str, Any] | None = None) -> None:
        init = common.initial_scale(scale_init, scale_offset)
        self.q_norm = _Scale(head_dim, init, param_dtype, rngs, scale_metadata)
        self.k_norm = _Scale(head_dim, init, param_dtype, rngs, scale_metadata)
        self.head_dim, self.dtype, self.param_dtype = head_dim, dtype, param_dtype
        self.theta, self.rope_dim, self.style, self.placement = theta, rope_dim, style, placement
        self.epsilon, self.scale_offset, self.multiply_before_cast = epsilon, scale_offset, multiply_before_cast
        self.round_before_rope = round_before_rope
        self.implementation = common.checked_implementation(self, implementation)

    @overload
    def __call__(self, q: ArrayLike, k: ArrayLike, positions: ArrayLike | None, *, freq_factors: ArrayLike | None = None,
                 freqs_cis: ArrayLike | None = None) -> tuple[jax.Array, jax.Array]: ...

    @overload
    def __call__(self, q: ArrayLike, k: None, positions: ArrayLike | None, *, freq_factors: ArrayLike | None = None,
                 freqs_cis: ArrayLike | None = None, num_heads: int, num_kv_heads: int, q_start: int = 0,
                 k_start: int, v_start: None = None) -> tuple[jax.Array, jax.Array]: ...

    @overload
    def __call__(self, q: ArrayLike, k: None, positions: ArrayLike | None, *, freq_factors: ArrayLike | None = None,
                 freqs_cis: ArrayLike | None = None, num_heads: int, num_kv_heads: int, q_start: int = 0,
                 k_start: int, v_start: int) -> tuple[jax.Array, jax.Array, jax.Array]: ...

    def __call__(self, q: ArrayLike, k: ArrayLike | None, positions: ArrayLike | None, *, freq_factors: ArrayLike | None = None,
                 freqs_cis: ArrayLike | None = None, num_heads: int | None = None, num_kv_heads: int | None = None,
                 q_start: int = 0, k_start: int | None = None, v_start: int | None = None,
                 ) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]:
        scales = self.q_norm.scale[...], self.k_norm.scale[...]
        return common.rotated(self, scales, q, k, positions, freq_factors, freqs_cis, num_heads=num_heads, num_kv_heads=num_kv_heads,
                              q_start=q_start, k_start=k_start, v_start=v_start)
