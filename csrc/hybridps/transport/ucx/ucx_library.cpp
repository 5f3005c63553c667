#include "hybridps/transport/ucx/ucx_library.h"

#include <dlfcn.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include "hybridps/core/shared_library.h"

namespace hybridps::transport {
namespace {

constexpr const char* kSoname = "libucp.so.0";

struct LibraryState {
  std::mutex mutex;
  UcxLoader loader = [] { return core::Result<std::string>(std::string(kSoname)); };
  std::atomic<const UcxLibrary*> library{nullptr};
};

LibraryState& state() {
  static LibraryState* const state = new LibraryState();  // never destroyed: transports may outlive static destructors
  return *state;
}

std::string file_of(const void* function) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  const auto path = std::filesystem::canonical(info.dli_fname, error);
  return error ? std::string(info.dli_fname) : path.string();
}

core::Result<std::unique_ptr<UcxLibrary>> open_library(const std::string& file) {
  const auto bad = [](const std::string& what) {
    return core::Status(core::Code::kUnsupported,
                        "UCX cannot be loaded: " + what +
                            "; install it (pip install libucx-cu13, or the system's libucx0), or let data go over TCP "
                            "(HYBRIDPS_DATA_TRANSPORT=tcp)");
  };
  core::SharedLibrary loaded(file);
  if (!loaded.is_open()) return bad(loaded.error());
  auto library = std::make_unique<UcxLibrary>();
#define HYBRIDPS_FIND(name) loaded.find(library->name, "ucp_" #name)
  HYBRIDPS_FIND(get_version);
  HYBRIDPS_FIND(get_version_string);
  HYBRIDPS_FIND(config_read);
  HYBRIDPS_FIND(config_modify);
  HYBRIDPS_FIND(config_release);
  HYBRIDPS_FIND(init_version);
  HYBRIDPS_FIND(cleanup);
  HYBRIDPS_FIND(context_query);
  HYBRIDPS_FIND(mem_map);
  HYBRIDPS_FIND(mem_unmap);
  HYBRIDPS_FIND(worker_create);
  HYBRIDPS_FIND(worker_destroy);
  HYBRIDPS_FIND(worker_progress);
  HYBRIDPS_FIND(worker_arm);
  HYBRIDPS_FIND(worker_get_efd);
  HYBRIDPS_FIND(worker_query);
  HYBRIDPS_FIND(worker_release_address);
  HYBRIDPS_FIND(worker_set_am_recv_handler);
  HYBRIDPS_FIND(ep_create);
  HYBRIDPS_FIND(ep_flush_nbx);
  HYBRIDPS_FIND(ep_close_nbx);
  HYBRIDPS_FIND(am_send_nbx);
  HYBRIDPS_FIND(am_recv_data_nbx);
  HYBRIDPS_FIND(am_data_release);
  HYBRIDPS_FIND(request_free);
#undef HYBRIDPS_FIND
  loaded.find(library->status_string, "ucs_status_string");  // of libucs, on which libucp depends
  if (!loaded.missing().empty()) return bad(file + " has no " + loaded.missing());
  library->path = file_of(reinterpret_cast<const void*>(library->get_version));
  return library;
}

}  // namespace

void set_ucx_loader(UcxLoader loader) {
  const std::lock_guard lock(state().mutex);
  state().loader = std::move(loader);
}

core::Result<const UcxLibrary*> load_ucx() {
  if (const UcxLibrary* library = loaded_ucx()) return library;
  const std::lock_guard lock(state().mutex);
  if (const UcxLibrary* library = loaded_ucx()) return library;
  core::Result<std::string> file = state().loader();
  if (!file.is_ok()) return file.status();
  core::Result<std::unique_ptr<UcxLibrary>> library = open_library(file.value());
  if (!library.is_ok()) return library.status();
  state().library.store(library.value().release(), std::memory_order_release);
  return loaded_ucx();
}

core::Status need_ucx() { return load_ucx().status(); }

const UcxLibrary* loaded_ucx() noexcept { return state().library.load(std::memory_order_acquire); }

const char* text_of(ucs_status_t status) noexcept {
  const UcxLibrary* const library = loaded_ucx();
  return library == nullptr ? "no UCX" : library->status_string(status);
}

std::string ucx_version() {
  const UcxLibrary* const library = loaded_ucx();
  return library == nullptr ? std::string() : library->get_version_string();
}

std::string ucx_library_path() {
  const UcxLibrary* const library = loaded_ucx();
  return library == nullptr ? std::string() : library->path;
}

}  // namespace hybridps::transport
