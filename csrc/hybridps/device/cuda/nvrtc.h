// hybridps/device/cuda/nvrtc.h: kernels made at run time, for the GPU that is there, by the compiler that torch brings.
//
// Why not nvcc: torch's wheels have no toolkit, and a wheel of ours would have to hold every architecture that they do.
// Why not linked: as the driver (driver.h). A plain table, so that tests can fill it; nvrtc.h is not needed.
#pragma once

#include <cstddef>
#include <string>

#include "hybridps/core/status.h"

namespace hybridps::device {

/// NVRTC's functions that we call. Results: 0 is success.
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

/// The one that torch has loaded, or what the linker finds; loaded once. kUnsupported says which were looked for.
const core::Result<Nvrtc>& load_nvrtc();

/// The text of device/int8.h.
extern const char kInt8Source[];

/// `source` for GPUs of compute capability `capability` (90: 9.0), with arithmetic as it is written: nothing fused, nothing flushed to
/// zero, divisions rounded. `binary`: what the driver loads at once; else PTX. kUnsupported: what the compiler says.
core::Result<std::string> compile(const Nvrtc& nvrtc, const char* source, int capability, bool binary = true);

}  // namespace hybridps::device
