// hybridps/transport/ucx/ucx_library.h: the libucp of this process, loaded when the first transport needs it.
//
// Why      Loading UCX takes longer than the rest of a rank's start, and our own TCP does not use UCX. So nothing here
//          links to libucp: its functions are looked up by name.
// Threads  any.
// Errors   kUnsupported: libucp was not found or lacks a function. The next call looks for it again.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

#include "hybridps/core/status.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::transport {

/// The functions of libucp and libucs that this room calls, named without their prefix ucp_ or ucs_.
struct UcxLibrary {
  decltype(&ucp_get_version) get_version = nullptr;
  decltype(&ucp_get_version_string) get_version_string = nullptr;
  decltype(&ucp_config_read) config_read = nullptr;
  decltype(&ucp_config_modify) config_modify = nullptr;
  decltype(&ucp_config_release) config_release = nullptr;
  decltype(&ucp_init_version) init_version = nullptr;
  decltype(&ucp_cleanup) cleanup = nullptr;
  decltype(&ucp_context_query) context_query = nullptr;
  decltype(&ucp_mem_map) mem_map = nullptr;
  decltype(&ucp_mem_unmap) mem_unmap = nullptr;
  decltype(&ucp_worker_create) worker_create = nullptr;
  decltype(&ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&ucp_worker_progress) worker_progress = nullptr;
  decltype(&ucp_worker_arm) worker_arm = nullptr;
  decltype(&ucp_worker_get_efd) worker_get_efd = nullptr;
  decltype(&ucp_worker_query) worker_query = nullptr;
  decltype(&ucp_worker_release_address) worker_release_address = nullptr;
  decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler = nullptr;
  decltype(&ucp_ep_create) ep_create = nullptr;
  decltype(&ucp_ep_flush_nbx) ep_flush_nbx = nullptr;
  decltype(&ucp_ep_close_nbx) ep_close_nbx = nullptr;
  decltype(&ucp_am_send_nbx) am_send_nbx = nullptr;
  decltype(&ucp_am_recv_data_nbx) am_recv_data_nbx = nullptr;
  decltype(&ucp_am_data_release) am_data_release = nullptr;
  decltype(&ucp_request_free) request_free = nullptr;
  decltype(&ucs_status_string) status_string = nullptr;
  std::string path;  // path of the library's file
};

/// Loads UCX unless an earlier call succeeded; UCX stays loaded. See set_ucx_loader() (ucx_config.h).
core::Result<const UcxLibrary*> load_ucx();
/// Null: load_ucx() has not succeeded yet.
const UcxLibrary* loaded_ucx() noexcept;
/// UCX's text for `status`.
const char* text_of(ucs_status_t status) noexcept;

}  // namespace hybridps::transport
