"""What the ops must return: float64 numpy, with the roundings of the specification written out one by one.

The formulas share no code with jax_fusednorm. `rounded` is the only place that rounds.
"""

from .comparisons import (  # noqa: F401
    ATOL, RTOL, assert_close, assert_derivative_close, assert_rotated_close, assert_same_bits, assert_same_casts, assert_scale_cotangent_close,
    assert_sum_close, bits, ulps)
from .heads import (  # noqa: F401
    head_rms_norm_rope, head_rms_norm_rope_vjp, inverse_frequencies, paged_places, pairs_of, qk_rms_norm_rope_paged)
from .ropes import scaled_frequencies  # noqa: F401
from .rounding import name_of, rounded, wide  # noqa: F401
from .rows import (  # noqa: F401
    add_rms_norm, add_rms_norm_jvp, add_rms_norm_vjp, gated_group_rms_norm, gated_group_rms_norm_jvp, gated_group_rms_norm_vjp,
    matmul_partial_rms_norm, matmul_partial_rms_norm_vjp, rms_norm, rms_norm_add, rms_norm_jvp, rms_norm_vjp)
