// hybridps/core/shared_library.h: the functions of a library that is loaded when it is needed.
//
// Owner    the process: a library stays loaded, because its functions may be called while static objects are destroyed.
// Threads  one thread at a time.
#pragma once

#include <dlfcn.h>

#include <string>

namespace hybridps::core {

class SharedLibrary {
 public:
  /// Takes the library that the process has loaded, under any path; else loads what the loader finds by `file`.
  explicit SharedLibrary(const std::string& file) : handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) {
    if (handle_ == nullptr) handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) return;
    const char* const why = dlerror();
    error_ = why != nullptr ? why : "no reason given";
  }

  bool is_open() const noexcept { return handle_ != nullptr; }
  /// Why it is not open.
  const std::string& error() const noexcept { return error_; }

  /// Sets `function` to null if the library has no function of this name.
  template <typename Function>
  void find_optional(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
  }
  /// The same; missing() then names a function that was not found.
  template <typename Function>
  void find(Function*& function, const char* name) {
    find_optional(function, name);
    if (function == nullptr) missing_ += (missing_.empty() ? "" : ", ") + std::string(name);
  }
  const std::string& missing() const noexcept { return missing_; }

 private:
  void* handle_;
  std::string error_;
  std::string missing_;
};

}  // namespace hybridps::core
