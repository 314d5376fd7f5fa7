#include <algorithm>

#include "ffi/handler.h"
#include "launch/shape.h"

namespace {

// The launch that norms the first columns of y, in which each of y.rows has y.width columns.
ffi::Error prepare_norm(const char* op, const Rows& y, const void* data, In& scale, Out& normed, Out& unnormed, float epsilon,
                        float scale_offset, bool multiply_before_cast, PartialNormParams* params, Launch* launch) {
  Argument scale_type;
  if (!storage_of(scale.element_type(), &scale_type)) return refuse(std::string(op) + ": scale is of a dtype that has no kernel");
  Rows at = y;
  at.width = uint32_t(std::min<uint64_t>(scale.element_count(), y.width));
  RETURN_IF_ERROR(expect(op, "scale", scale.element_count(), at.width));
  RETURN_IF_ERROR(expect(op, "normed", normed->element_count(), uint64_t(y.rows) * at.width));
  RETURN_IF_ERROR(expect(op, "unnormed", unnormed->element_count(), uint64_t(y.rows) * (y.width - at.width)));

  *params = {y.rows, at.width, y.width, epsilon, scale_offset};
  launch->specialize(at.storage, scale_type, rounds_first(at.storage, scale_type, multiply_before_cast));
  launch->bind(data, y.rows * y.row_bytes, false);
  bind(*launch, scale);
  bind(*launch, normed);
  bind(*launch, unnormed);
  launch->aligned = y.row_bytes % load_bytes == 0;
  launch->over(y.rows, at, 2 * y.row_bytes, 1, *params);
  return ffi::Error::Success();
}

ffi::Error partial_rms_norm(launcher::Context context, In y, In scale, Out normed, Out unnormed, float epsilon, float scale_offset,
                            bool multiply_before_cast) {
  const char* op = "partial_rms_norm";
  Rows at;
  RETURN_IF_ERROR(rows_of(op, y, &at));
  PartialNormParams params;
  Launch norm(op);
  RETURN_IF_ERROR(prepare_norm(op, at, y.untyped_data(), scale, normed, unnormed, epsilon, scale_offset, multiply_before_cast, &params, &norm));
  return launcher::run(context, norm);
}

ffi::Error matmul_partial_rms_norm(launcher::Context context, In x, In weight, In scale, Out normed, Out unnormed, Out product,
                                   float epsilon, float scale_offset, bool multiply_before_cast, bool transpose_b) {
  const char* op = "matmul_partial_rms_norm";
  Rows at;
  RETURN_IF_ERROR(rows_of(op, x, &at));
  const auto shape = weight.dimensions();
  if (shape.size() != 2 || shape[transpose_b] != at.width || weight.element_type() != x.element_type() || shape[!transpose_b] == 0 ||
      shape[!transpose_b] >> 31)
    return refuse(std::string(op) + ": weight must have x's dtype, one axis of x's width and one of 1 to 2^31 outputs");
  Rows y = at;
  y.width = uint32_t(shape[!transpose_b]);
  y.row_bytes = size_t(y.width) * bytes_of(at.storage);
  RETURN_IF_ERROR(expect(op, "product", product->element_count(), uint64_t(y.rows) * y.width));

  const MatvecParams params{at.rows, at.width, y.width, launcher::strip};
  Launch multiply(transpose_b ? "matvec" : "vecmat");
  multiply.specialize(at.storage);
  multiply.streams = transpose_b;
  bind(multiply, x);
  bind(multiply, weight);
  bind(multiply, product);
  const uint32_t outputs = transpose_b ? outputs_a_team : params.strip;
  multiply.over(at.rows ? (y.width - 1) / outputs + 1 : 0, transpose_b ? at : y, outputs * at.row_bytes, transpose_b ? 0 : at.rows, params);

  PartialNormParams norm_params;
  Launch launches[2] = {multiply, Launch("partial_rms_norm")};
  RETURN_IF_ERROR(prepare_norm(op, y, product->untyped_data(), scale, normed, unnormed, epsilon, scale_offset, multiply_before_cast,
                               &norm_params, &launches[1]));
  return launcher::run(context, launches, 2);
}

}  // namespace

#define NORM() Attr<float>("epsilon").Attr<float>("scale_offset").Attr<bool>("multiply_before_cast")
HANDLER(partial_rms_norm, partial_rms_norm, BIND().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().NORM())
HANDLER(matmul_partial_rms_norm, matmul_partial_rms_norm,
        BIND().Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().NORM().Attr<bool>("transpose_b"))
