// What every handler starts from: decoding buffers, checking them, and filling a Launch. The launcher comes from the build.
#pragma once
#include <string>

#include "launcher.h"
#include "xla/ffi/api/ffi.h"

typedef uint32_t uint;
#include "kernels/params.h"

namespace ffi = xla::ffi;

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error refuse(const std::string& message) { return ffi::Error::InvalidArgument("jax_fusednorm: " + message); }

namespace launcher {
inline ffi::Error run(Context& context, const Launch& launch) { return run(context, &launch, 1); }
}  // namespace launcher

inline bool storage_of(ffi::DataType dtype, Argument* out) {
  switch (dtype) {
    case ffi::DataType::F32: *out = Argument::Float; return true;
    case ffi::DataType::BF16: *out = Argument::Bfloat; return true;
    case ffi::DataType::F16: *out = Argument::Half; return true;
    default: return false;
  }
}

// [..., width]: its rows and its width.
struct Rows {
  uint32_t rows = 0, width = 0;
  Argument storage;
  size_t row_bytes = 0;
};

inline ffi::Error rows_of(const char* op, const In& x, Rows* out) {
  const auto shape = x.dimensions();
  if (!storage_of(x.element_type(), &out->storage)) return refuse(std::string(op) + ": x is of a dtype that has no kernel");
  if (shape.size() == 0 || shape.back() == 0) return refuse(std::string(op) + ": x needs a last axis of at least one element");
  const uint64_t width = shape.back(), rows = x.element_count() / width;
  if (width >> 31 || rows >> 31) return refuse(std::string(op) + ": x has more than 2^31 rows or columns");
  out->rows = uint32_t(rows);
  out->width = uint32_t(width);
  out->row_bytes = x.size_bytes() / (rows ? rows : 1);
  return ffi::Error::Success();
}

inline void bind(Launch& launch, const In& in) { launch.bind(in.untyped_data(), in.size_bytes(), false); }
inline void bind(Launch& launch, Out& out) { launch.bind(out->untyped_data(), out->size_bytes(), true); }

// A result that is the operand's own memory, of which the kernel may leave parts as they are.
inline ffi::Error bind_updated(Launch& launch, const char* op, const In& in, Out& out) {
  if (in.untyped_data() != out->untyped_data()) return refuse(std::string(op) + ": an operand and the result that takes its place are two arrays");
  launch.bind(out->untyped_data(), out->size_bytes(), true, true);
  return ffi::Error::Success();
}

inline ffi::Error expect(const char* op, const char* name, uint64_t elements, uint64_t wanted) {
  if (elements == wanted) return ffi::Error::Success();
  return refuse(std::string(op) + ": " + name + " has " + std::to_string(elements) + " elements, but " + std::to_string(wanted) + " were wanted");
}

#define RETURN_IF_ERROR(expression) \
  if (ffi::Error error = (expression); error.failure()) return error

// The operands that may be absent, taken in order; each must hold as many elements as it should.
class Rest {
 public:
  Rest(const char* op, const ffi::RemainingArgs& args) : op_(op), args_(args) {}
  bool empty() const { return next_ >= args_.size(); }
  ffi::Error take(In* out) {
    auto found = args_.template get<In>(next_++);
    if (found.has_error()) return found.error();
    *out = *found;
    return ffi::Error::Success();
  }
  ffi::Error take(const char* name, uint64_t elements, In* out) {
    RETURN_IF_ERROR(take(out));
    return expect(op_, name, out->element_count(), elements);
  }

 private:
  const char* op_;
  const ffi::RemainingArgs& args_;
  size_t next_ = 0;
};

// The scale [width], if there is one, and its type.
inline ffi::Error optional_scale(const char* op, const ffi::RemainingArgs& args, uint32_t width, In* scale, Argument* type) {
  Rest rest(op, args);
  if (rest.empty()) return ffi::Error::Success();
  RETURN_IF_ERROR(rest.take("scale", width, scale));
  if (!storage_of(scale->element_type(), type)) return refuse(std::string(op) + ": scale is of a dtype that has no kernel");
  return ffi::Error::Success();
}

// IN_T of the norm kernels, which have no variant for where it would change nothing.
inline Argument rounds_first(Argument storage, Argument scale, bool multiply_before_cast) {
  return flag(!multiply_before_cast && storage != Argument::Float && scale != Argument::Ones);
}

// What a launcher lets XLA assume of every handler; nothing, unless it says so.
#ifndef TRAITS
#define TRAITS {}
#endif

// Defines the handler's exported symbol, jax_fusednorm_<launcher>_<kernel>_v<ABI>, and puts it on the list that Python registers.
struct Target {
  explicit Target(const char* kernel);
};
#define HANDLER_SYMBOL_(launcher, kernel, abi) jax_fusednorm_##launcher##_##kernel##_v##abi
#define HANDLER_SYMBOL(launcher, kernel, abi) HANDLER_SYMBOL_(launcher, kernel, abi)
#define HANDLER(kernel, implementation, binding)                                                                       \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* HANDLER_SYMBOL(LAUNCHER, kernel, ABI)(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(HANDLER_SYMBOL(LAUNCHER, kernel, ABI), implementation, binding, TRAITS);               \
  static const Target target_##kernel(#kernel);
