#include "hybridps/device/cuda/nvrtc.h"

#include <cuda.h>

#include <iterator>

#include "hybridps/core/shared_library.h"

namespace hybridps::device {
namespace {

using core::Code;
using core::Status;

// Needs CUDA 11.2, the first version with binaries for a real architecture.
core::Result<Nvrtc> open_nvrtc() {
  const std::string name = "libnvrtc.so." + std::to_string(CUDA_VERSION / 1000);
  // Torch loads this library for its own kernels, so its path is known.
  core::SharedLibrary library(name);
  if (!library.is_open()) return Status(Code::kUnsupported, name + " cannot be opened: " + library.error());
  Nvrtc nvrtc;
  library.find(nvrtc.create, "nvrtcCreateProgram");
  library.find(nvrtc.destroy, "nvrtcDestroyProgram");
  library.find(nvrtc.compile, "nvrtcCompileProgram");
  library.find(nvrtc.log_size, "nvrtcGetProgramLogSize");
  library.find(nvrtc.log, "nvrtcGetProgramLog");
  library.find(nvrtc.binary_size, "nvrtcGetCUBINSize");
  library.find(nvrtc.binary, "nvrtcGetCUBIN");
  library.find(nvrtc.ptx_size, "nvrtcGetPTXSize");
  library.find(nvrtc.ptx, "nvrtcGetPTX");
  library.find(nvrtc.error_string, "nvrtcGetErrorString");
  if (!library.missing().empty())
    return Status(Code::kUnsupported, name + " is too old: it lacks " + library.missing());
  return nvrtc;
}

std::string log_of(const Nvrtc& nvrtc, Nvrtc::Program program) {
  std::size_t bytes = 0;
  if (nvrtc.log_size(program, &bytes) != 0 || bytes == 0) return "it says nothing";
  std::string text(bytes, '\0');
  if (nvrtc.log(program, text.data()) != 0) return "it says nothing";
  while (!text.empty() && (text.back() == '\0' || text.back() == '\n')) text.pop_back();
  return text;
}

core::Result<std::string> compiled(const Nvrtc& nvrtc, Nvrtc::Program program, int capability, bool binary) {
  const std::string architecture =
      std::string("--gpu-architecture=") + (binary ? "sm_" : "compute_") + std::to_string(capability);
  const char* const options[] = {architecture.c_str(), "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true"};
  if (const int result = nvrtc.compile(program, static_cast<int>(std::size(options)), options); result != 0)
    return Status(Code::kUnsupported, std::string("NVRTC cannot compile for compute capability ") +
                                          std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
                                          ": " + nvrtc.error_string(result) + ": " + log_of(nvrtc, program));
  std::size_t bytes = 0;
  int result = binary ? nvrtc.binary_size(program, &bytes) : nvrtc.ptx_size(program, &bytes);
  std::string made(bytes, '\0');
  if (result == 0) result = binary ? nvrtc.binary(program, made.data()) : nvrtc.ptx(program, made.data());
  if (result == 0 && bytes > 0) return made;
  return Status(Code::kUnsupported, std::string("NVRTC has no result: ") + nvrtc.error_string(result));
}

}  // namespace

core::Result<std::string> compile(const Nvrtc& nvrtc, const char* source, int capability, bool binary) {
  Nvrtc::Program program = nullptr;
  if (const int result = nvrtc.create(&program, source, "int8.cu", 0, nullptr, nullptr); result != 0)
    return Status(Code::kUnsupported, std::string("NVRTC: nvrtcCreateProgram failed: ") + nvrtc.error_string(result));
  core::Result<std::string> made = compiled(nvrtc, program, capability, binary);
  nvrtc.destroy(&program);
  return made;
}

const core::Result<Nvrtc>& load_nvrtc() {
  static const core::Result<Nvrtc> nvrtc = open_nvrtc();
  return nvrtc;
}

}  // namespace hybridps::device
