"""Flax linen modules over the ops."""

from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import linen
from jax.nn.initializers import Initializer
from jax.typing import ArrayLike, DTypeLike

from ..core.types import Activation, Implementation, Placement, Rounding, Style
from ..ops.add_rms_norm import add_rms_norm
from ..ops.matmul_partial_rms_norm import matmul_partial_rms_norm
from ..ops.rms_norm import rms_norm
from ..ops.rms_norm_add import rms_norm_add
from . import common

__all__ = ["AddRMSNorm", "GatedGroupRMSNorm", "MatmulPartialRMSNorm", "QKNormRope", "RMSNorm", "RMSNormAdd"]


class RMSNorm(linen.RMSNorm):
    """flax.linen.RMSNorm on `jax_fusednorm.rms_norm`: the same fields, parameters and checkpoints, and three more options.

    Equivalent to flax.linen.RMSNorm, whose own code it runs for what has no kernel (other reduction or feature axes,
    axis_name, mask, force_float32_reductions=False).

    Fields:
      scale_init: the scale's initializer; by default what makes scale + scale_offset one.
      scale_offset, multiply_before_cast, implementation: as in `rms_norm`.
      the rest: as in flax.linen.RMSNorm. With dtype=None a bfloat16 input and a float32 scale give float32, as in Flax; set
        dtype=jnp.bfloat16 to stay in bfloat16.
    """

    scale_init: Initializer | None = None
    scale_offset: float = 0.0
    multiply_before_cast: bool = True
    implementation: Implementation | None = None

    def __post_init__(self):
        if self.scale_init is None:
            self.scale_init = common.default_scale_init  # Flax's path calls it
        common.checked_implementation(self, self.implementation)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: ArrayLike, *, mask: jax.Array | None = None) -> jax.Array:
        if not common.has_kernel(self, x, mask) or not self.force_float32_reductions:
            common.check_flax_path(self)
            return super().__call__(x, mask=mask)
        init = common.initial_scale(self.scale_init, self.scale_offset)
        scale = self.param("scale", init, (jnp.shape(x)[-1],), self.param_dtype) if self.use_scale else None
        x, = common.promote(self.dtype, scale, x)
        return rms_norm(x, scale, epsilon=self.epsilon, scale_offset=self.scale_offset,
                        multiply_before_cast=self.multiply_before_cast, implementation=self.implementation)


class _Module(linen.Module):
    """One that is told an implementation."""

    def __post_init__(self):
        common.checked_implementation(self, self.implementation)
        super().__post_init__()


class _ResidualNorm(_Module):
    """A scale, and the options that the norms with a residual share."""

    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_scale: bool = True
    scale_init: Initializer | None = None
    scale_offset: float = 0.0
    multiply_before_cast: bool = True
    implementation: Implementation | None = None

    def _apply(self, op, x, residual, **options):
        init = common.initial_scale(self.scale_init, self.scale_offset)
        scale = self.param("scale", init, (jnp.shape(x)[-1],), self.param_dtype) if self.use_scale else None
        x, residual = common.promote(self.dtype, scale, x, residual)
        return op(x, residual, scale, epsilon=self.epsilon, scale_offset=self.scale_offset,
                  multiply_before_cast=self.multiply_before_cast, implementation=self.implementation, **options)


class AddRMSNorm(_ResidualNorm):
    """`jax_fusednorm.add_rms_norm` with its scale: `normed, sum = AddRMSNorm()(x, residual)`.

    A pre-norm block carries `sum` as its residual stream and feeds `normed` to its next layer.

    Fields:
      epsilon, scale_offset, multiply_before_cast, sum_rounding, return_sum, implementation: as in `add_rms_norm`.
      dtype: what x and residual are cast to; None: what they and the scale promote to.
      param_dtype: the scale's dtype.
      use_scale: False for no scale.
      scale_init: the scale's initializer; by default what makes scale + scale_offset one.
    """

    sum_rounding: Rounding = "float32"
    return_sum: bool = True

    @linen.compact
    def __call__(self, x: ArrayLike, residual: ArrayLike) -> Any:  # a pair, or with return_sum=False an array
        return self._apply(add_rms_norm, x, residual, sum_rounding=self.sum_rounding, return_sum=self.return_sum)


class MatmulPartialRMSNorm(_Module):
    """`jax_fusednorm.matmul_partial_rms_norm` with its weight and scale: `normed, unnormed = MatmulPartialRMSNorm(N, n)(x)`.

    Fields:
      features: N of the kernel [K, N], which is laid out and initialized as linen.Dense's.
      num_normed: how many outputs, the first, are normalized: from 1 to N.
      epsilon, scale_offset, multiply_before_cast, implementation: as in `matmul_partial_rms_norm`.
      dtype: what x and the kernel are cast to; None: what they and the scale promote to.
      param_dtype: the parameters' dtype.
      kernel_init, scale_init: their initializers; the scale's is by default what makes scale + scale_offset one.
    """

    features: int
    num_normed: int
    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = common.default_kernel_init
    scale_init: Initializer | None = None
    scale_offset: float = 0.0
    multiply_before_cast: bool = True
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, x: ArrayLike) -> tuple[jax.Array, jax.Array]:
        kernel = self.param("kernel", self.kernel_init, (jnp.shape(x)[-1], self.features), self.param_dtype)
        scale = self.param("scale", common.initial_scale(self.scale_init, self.scale_offset), (self.num_normed,), self.param_dtype)
        x, kernel = common.promote(self.dtype, scale, x, kernel)
        return matmul_partial_rms_norm(x, kernel, scale, epsilon=self.epsilon, scale_offset=self.scale_offset, transpose_b=False,
                                       multiply_before_cast=self.multiply_before_cast, implementation=self.implementation)


class RMSNormAdd(_ResidualNorm):
    """`jax_fusednorm.rms_norm_add` with its scale: `stream = RMSNormAdd()(x, stream)`.

    Fields:
      norm_rounding: as in `rms_norm_add`.
      the rest: as in AddRMSNorm.
    """

    norm_rounding: Rounding = "float32"

    @linen.compact
    def __call__(self, x: ArrayLike, residual: ArrayLike) -> jax.Array:
        return self._apply(rms_norm_add, x, residual, norm_rounding=self.norm_rounding)


class GatedGroupRMSNorm(_Module):
    """`jax_fusednorm.gated_group_rms_norm` with its scale: `out = GatedGroupRMSNorm(I, group_size=I // 8)(y, gate)`.

    Fields:
      num_features: I, the size of y's last axis.
      group_size, epsilon, norm_before_gate, gate_start, activation, rounding, implementation: as in `gated_group_rms_norm`.
      dtype: what y is cast to; None: what it and the scale promote to. The gate keeps its own.
      param_dtype, scale_init: as in AddRMSNorm.
    """

    num_features: int
    group_size: int | None = None
    epsilon: float = 1e-5
    norm_before_gate: bool = False
    gate_start: int | None = None
    activation: Activation = "silu"
    rounding: Rounding = "storage"
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation | None = None
    scale_init: Initializer = common.ONES

    @linen.compact
    def __call__(self, y: ArrayLike, gate: ArrayLike) -> jax.Array:
        return common.gated(self, self.param("scale", self.scale_init, (self.num_features,), self.param_dtype), y, gate)


class _Scale(linen.Module):
    """A norm's parameter without the norm."""

    init_scale: Initializer
    param_dtype: DTypeLike

    @linen.compact
    def __call__(self, width: int) -> jax.Array:
        return self.param("scale", self.init_scale, (width,), self.param_dtype)


class QKNormRope(_Module):
    """`jax_fusednorm.qk_rms_norm_rope` with its scales: `q, k = QKNormRope()(q, k, positions)`.

    The parameters are `q_norm.scale` and `k_norm.scale`, as in Qwen3 and Gemma 3.

    Fields:
      theta, rope_dim, style, placement, epsilon, scale_offset, multiply_before_cast, round_before_rope, implementation: as in
        `qk_rms_norm_rope`.
      dtype: what q and k are cast to; None: what they and the scales promote to.
      param_dtype: the scales' dtype.
      scale_init: the scales' initializer; by default what makes scale + scale_offset one.
      head_dim: D; needed for a fused projection alone, whose shape does not tell it.

    Called with q [..., T, Hq, D], k [..., T, Hk, D], positions, and where wanted freq_factors or freqs_cis, as `qk_rms_norm_rope` is; or with
    a fused projection [..., T, W], None, positions and num_heads, num_kv_heads, q_start, k_start and v_start.
    """

    theta: float = 10000.0
    rope_dim: int | None = None
    style: Style = "neox"
    placement: Placement = "prefix"
    epsilon: float = 1e-6
    scale_offset: float = 0.0
    multiply_before_cast: bool = True
    round_before_rope: bool | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    scale_init: Initializer | None = None
    implementation: Implementation | None = None
    head_dim: int | None = None

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

    @linen.compact
    def __call__(self, q: ArrayLike, k: ArrayLike | None, positions: ArrayLike | None, *, freq_factors: ArrayLike | None = None,
                 freqs_cis: ArrayLike | None = None, num_heads: int | None = None, num_kv_heads: int | None = None,
                 q_start: int = 0, k_start: int | None = None, v_start: int | None = None,
                 ) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]:
        if k is None and self.head_dim is None:
            raise ValueError("QKNormRope: `head_dim` is None, but a fused projection's shape does not tell how wide a head is: give the field.")
        width = jnp.shape(q)[-1] if self.head_dim is None else self.head_dim
        init = common.initial_scale(self.scale_init, self.scale_offset)
        scales = [_Scale(init, self.param_dtype, name=name)(width) for name in ("q_norm", "k_norm")]
        return common.rotated(self, scales, q, k, positions, freq_factors, freqs_cis, num_heads=num_heads, num_kv_heads=num_kv_heads,
                              q_start=q_start, k_start=k_start, v_start=v_start)
