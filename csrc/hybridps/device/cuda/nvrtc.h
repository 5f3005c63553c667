// hybridps/device/cuda/nvrtc.h: compiles kernels at run time, for the GPU in use, with the compiler that torch brings.
//
// Not nvcc, because torch's wheels have no toolkit, and our wheel would have to hold every architecture that torch's
// wheels hold. Not linked, for the same reasons as the driver (driver.h). A plain table, so that tests can fill it;
// nvrtc.h is not needed.
#pragma once

#include <cstddef>
#include <string>

#include "hybridps/core/status.h"

namespace hybridps::device {

/// The NVRTC functions that we call. Result 0 is success.
struct Nvrtc {
  using Program = void*;
  int (*create)(Program* program, const char* source, const char* name, int headers, const char* const* header_texts,
                const char* const* header_names) = nullptr;
  int (*destroy)(Program* program) = nullptr;
  int (*compile)(Program program, int options, const char* const* texts) = nullptr;
  int (*log_size)(Program program, std::size_t* bytes) = nullptr;
  int (*log)(Program program, char* text) = nullptr;
  int (*binary_size)(Program program, std::size_t* bytes) = nullptr;
  int (*binary)(Program program, char* out) = nullptr;
  int (*ptx_size)(Program program, std::size_t* bytes) = nullptr;
  int (*ptx)(Program program, char* out) = nullptr;
  const char* (*error_string)(int result) = nullptr;
};

/// The library that torch has loaded, or that the linker finds. Loaded once. Error kUnsupported names the file.
const core::Result<Nvrtc>& load_nvrtc();

/// The text of device/int8.h.
extern const char kInt8Source[];

/// Compiles `source` for compute capability `capability` (90: 9.0), with arithmetic as written: no fusing, no flush to
/// zero, rounded divisions. Returns what the driver loads directly (`binary`), else PTX. Error kUnsupported: the
/// compiler's message.
core::Result<std::string> compile(const Nvrtc& nvrtc, const char* source, int capability, bool binary = true);

}  // namespace hybridps::device
