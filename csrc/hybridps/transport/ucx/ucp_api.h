// hybridps/transport/ucx/ucp_api.h: the libucp calls that this room uses, replaceable in tests.
//
// Each method is one libucp call, made by the base class. Tests derive a class that simulates rare outcomes: no memory,
// an unreachable peer, a request that UCX never gives back.
// Threads  as the transport that uses it.
// Errors   the base class can be made without libucp, but its methods must not be called then.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <span>
#include <vector>

#include "hybridps/transport/ucx/ucx_library.h"

#if UCP_API_VERSION < UCP_VERSION(1, 13)
#error "hybridps needs UCX 1.13 or later"
#endif

namespace hybridps::transport {

class UcpApi {
 public:
  UcpApi() {
    if (const auto library = load_ucx(); library.is_ok()) ucp_ = library.value();
  }
  virtual ~UcpApi() = default;

  virtual void get_version(unsigned* major, unsigned* minor, unsigned* release) {
    ucp_->get_version(major, minor, release);
  }
  virtual ucs_status_t config_read(const char* prefix, ucp_config_t** config) {
    return ucp_->config_read(prefix, nullptr, config);
  }
  virtual ucs_status_t config_modify(ucp_config_t* config, const char* name, const char* value) {
    return ucp_->config_modify(config, name, value);
  }
  virtual void config_release(ucp_config_t* config) { ucp_->config_release(config); }

  virtual ucs_status_t init(const ucp_params_t* params, const ucp_config_t* config, ucp_context_h* context) {
    return ucp_->init_version(UCP_API_MAJOR, UCP_API_MINOR, params, config, context);
  }
  virtual void cleanup(ucp_context_h context) { ucp_->cleanup(context); }
  virtual ucs_status_t context_query(ucp_context_h context, ucp_context_attr_t* attributes) {
    return ucp_->context_query(context, attributes);
  }
  virtual ucs_status_t mem_map(ucp_context_h context, const ucp_mem_map_params_t* params, ucp_mem_h* memh) {
    return ucp_->mem_map(context, params, memh);
  }
  virtual ucs_status_t mem_unmap(ucp_context_h context, ucp_mem_h memh) { return ucp_->mem_unmap(context, memh); }

  virtual ucs_status_t worker_create(ucp_context_h context, const ucp_worker_params_t* params, ucp_worker_h* worker) {
    return ucp_->worker_create(context, params, worker);
  }
  virtual void worker_destroy(ucp_worker_h worker) { ucp_->worker_destroy(worker); }
  virtual unsigned worker_progress(ucp_worker_h worker) { return ucp_->worker_progress(worker); }
  virtual ucs_status_t worker_arm(ucp_worker_h worker) { return ucp_->worker_arm(worker); }
  virtual ucs_status_t worker_get_efd(ucp_worker_h worker, int* fd) { return ucp_->worker_get_efd(worker, fd); }
  /// ucp_worker_query and ucp_worker_release_address: copies the address, network devices only.
  virtual ucs_status_t worker_address(ucp_worker_h worker, std::vector<std::byte>* address) {
    ucp_worker_attr_t attributes{};
    attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
    attributes.address_flags = UCP_WORKER_ADDRESS_FLAG_NET_ONLY;
    const ucs_status_t status = ucp_->worker_query(worker, &attributes);
    if (status != UCS_OK) return status;
    const auto bytes =
        std::as_bytes(std::span(reinterpret_cast<const unsigned char*>(attributes.address), attributes.address_length));
    address->assign(bytes.begin(), bytes.end());
    ucp_->worker_release_address(worker, attributes.address);
    return UCS_OK;
  }
  virtual ucs_status_t set_am_handler(ucp_worker_h worker, const ucp_am_handler_param_t* param) {
    return ucp_->worker_set_am_recv_handler(worker, param);
  }

  virtual ucs_status_t ep_create(ucp_worker_h worker, const ucp_ep_params_t* params, ucp_ep_h* ep) {
    return ucp_->ep_create(worker, params, ep);
  }
  virtual ucs_status_ptr_t ep_flush(ucp_ep_h ep, const ucp_request_param_t* param) {
    return ucp_->ep_flush_nbx(ep, param);
  }
  virtual ucs_status_ptr_t ep_close(ucp_ep_h ep, const ucp_request_param_t* param) {
    return ucp_->ep_close_nbx(ep, param);
  }

  virtual ucs_status_ptr_t am_send(ucp_ep_h ep, unsigned id, const void* header, std::size_t header_bytes,
                                   const void* payload, std::size_t payload_bytes, const ucp_request_param_t* param) {
    return ucp_->am_send_nbx(ep, id, header, header_bytes, payload, payload_bytes, param);
  }
  virtual ucs_status_ptr_t am_receive(ucp_worker_h worker, void* descriptor, void* buffer, std::size_t bytes,
                                      const ucp_request_param_t* param) {
    return ucp_->am_recv_data_nbx(worker, descriptor, buffer, bytes, param);
  }
  virtual void am_data_release(ucp_worker_h worker, void* data) { ucp_->am_data_release(worker, data); }
  virtual void request_free(void* request) { ucp_->request_free(request); }

 private:
  const UcxLibrary* ucp_ = nullptr;
};

}  // namespace hybridps::transport
