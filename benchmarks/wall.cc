// A custom call that does nothing and hands its operands on as its results (aliased, so nothing is copied). XLA cannot fuse
// across it, as it cannot fuse across the matmuls that stand between two norms of a model.
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Wall(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(wall, Wall, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
