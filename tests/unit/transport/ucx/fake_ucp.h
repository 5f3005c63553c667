// tests/unit/transport/ucx/fake_ucp.h: a libucp of memory and scripts, for outcomes that real networks rarely
// show.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/transport/ucx/ucp_api.h"

namespace hybridps::transport {

class FakeUcp final : public UcpApi {
 public:
  enum class Send { kAtOnce, kPending, kNever };

  // Scripts
  unsigned major = UCP_API_MAJOR;
  unsigned minor = UCP_API_MINOR;
  ucs_status_t init_status = UCS_OK;
  ucs_status_t worker_status = UCS_OK;
  ucs_status_t handler_status = UCS_OK;
  ucs_status_t map_status = UCS_OK;
  ucs_status_t query_status = UCS_OK;
  std::uint64_t memory_types = UCS_BIT(UCS_MEMORY_TYPE_HOST);
  ucs_status_t ep_status = UCS_OK;
  ucs_status_t arm_status = UCS_OK;
  ucs_status_t send_status = UCS_OK;
  ucs_status_t receive_status = UCS_OK;
  Send send_mode = Send::kPending;
  bool flush_pending = false;

  // What happened
  std::vector<std::pair<std::string, std::string>> settings;
  int configs = 0;  // made minus released; likewise below
  int contexts = 0;
  int workers = 0;
  int maps = 0;
  int endpoints = 0;
  int closes = 0;
  int flushes = 0;
  int requests = 0;
  std::vector<void*> released_data;
  ucp_mem_map_params_t last_map{};
  std::vector<ucp_mem_h> unmapped;
  int untyped = 0;      // memory that UCX would have to ask CUDA about
  bool inside = false;  // a device is current, says the test
  int outside = 0;      // calls that want one, without
  bool armed_inside = false;
  ucp_ep_params_t ep_params{};
  ucp_worker_params_t worker_params{};
  ucp_request_param_t last_send{};
  ucp_request_param_t last_receive{};
  ucp_am_handler_param_t handler{};
  struct Pending {
    ucp_request_param_t param;
    bool never = false;
  };
  std::deque<Pending> sends;     // in flight
  std::deque<Pending> receives;  // in flight
  std::deque<ucp_request_param_t> pending_flushes;
  std::deque<std::function<void()>> queue;  // run by worker_progress()

  FakeUcp() : event_fd_(eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  ~FakeUcp() override { ::close(event_fd_); }

  void break_connection(ucs_status_t status) {
    queue.emplace_back([this, status] { ep_params.err_handler.cb(ep_params.err_handler.arg, nullptr, status); });
  }
  void complete_sends(ucs_status_t status) {
    auto all = std::exchange(sends, {});
    for (const Pending& send : all) {
      if (send.never) {
        sends.push_back(send);
        continue;
      }
      queue.emplace_back(
          [this, send, status] { send.param.cb.send(new_request(), status, const_cast<void*>(send.param.user_data)); });
    }
  }
  void complete_receive(ucs_status_t status, std::size_t bytes) {
    const Pending receive = receives.front();
    receives.pop_front();
    queue.emplace_back([this, receive, status, bytes] {
      receive.param.cb.recv_am(new_request(), status, bytes, const_cast<void*>(receive.param.user_data));
    });
  }
  /// As if a message had come in; the result of the callback.
  ucs_status_t arrive(const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                      std::uint64_t attributes) {
    ucp_am_recv_param_t param{};
    param.recv_attr = attributes;
    return handler.cb(handler.arg, header, header_bytes, data, bytes, &param);
  }

  void get_version(unsigned* a, unsigned* b, unsigned* c) override { *a = major, *b = minor, *c = 0; }
  ucs_status_t config_read(const char*, ucp_config_t** config) override {
    *config = fake<ucp_config_t*>(1);
    ++configs;
    return UCS_OK;
  }
  ucs_status_t config_modify(ucp_config_t*, const char* name, const char* value) override {
    settings.emplace_back(name, value);
    return UCS_OK;
  }
  void config_release(ucp_config_t*) override { --configs; }
  ucs_status_t init(const ucp_params_t*, const ucp_config_t*, ucp_context_h* context) override {
    if (init_status == UCS_OK) *context = fake<ucp_context_h>(2), ++contexts;
    return init_status;
  }
  void cleanup(ucp_context_h) override { --contexts; }
  ucs_status_t context_query(ucp_context_h, ucp_context_attr_t* attributes) override {
    attributes->memory_types = memory_types;
    return (attributes->field_mask & UCP_ATTR_FIELD_MEMORY_TYPES) != 0 ? query_status : UCS_ERR_INVALID_PARAM;
  }
  ucs_status_t mem_map(ucp_context_h, const ucp_mem_map_params_t* params, ucp_mem_h* memh) override {
    last_map = *params;
    if ((params->field_mask & UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE) == 0) ++untyped;
    if (params->memory_type == UCS_MEMORY_TYPE_CUDA && !inside) ++outside;
    if (map_status == UCS_OK) *memh = fake<ucp_mem_h>(100 + static_cast<std::uintptr_t>(++maps));
    return map_status;
  }
  ucs_status_t mem_unmap(ucp_context_h, ucp_mem_h memh) override {
    --maps;
    unmapped.push_back(memh);
    return UCS_OK;
  }
  ucs_status_t worker_create(ucp_context_h, const ucp_worker_params_t* params, ucp_worker_h* worker) override {
    worker_params = *params;
    if (worker_status == UCS_OK) *worker = fake<ucp_worker_h>(3), ++workers;
    return worker_status;
  }
  void worker_destroy(ucp_worker_h) override { --workers; }
  unsigned worker_progress(ucp_worker_h) override {
    unsigned count = 0;
    for (auto now = std::exchange(queue, {}); !now.empty(); now.pop_front(), ++count) now.front()();
    return count;
  }
  ucs_status_t worker_arm(ucp_worker_h) override {
    armed_inside = inside;
    return queue.empty() ? arm_status : UCS_ERR_BUSY;
  }
  ucs_status_t worker_get_efd(ucp_worker_h, int* fd) override {
    *fd = event_fd_;
    return UCS_OK;
  }
  ucs_status_t worker_address(ucp_worker_h, std::vector<std::byte>* address) override {
    address->assign(48, std::byte{0x5a});
    return UCS_OK;
  }
  ucs_status_t set_am_handler(ucp_worker_h, const ucp_am_handler_param_t* param) override {
    handler = *param;
    return handler_status;
  }
  ucs_status_t ep_create(ucp_worker_h, const ucp_ep_params_t* params, ucp_ep_h* ep) override {
    ep_params = *params;
    if (ep_status == UCS_OK) *ep = fake<ucp_ep_h>(4), ++endpoints;
    return ep_status;
  }
  ucs_status_ptr_t ep_flush(ucp_ep_h, const ucp_request_param_t* param) override {
    ++flushes;
    if (!flush_pending) return nullptr;
    pending_flushes.push_back(*param);
    return fake<void*>(5);
  }
  ucs_status_ptr_t ep_close(ucp_ep_h, const ucp_request_param_t* param) override {
    ++closes;
    --endpoints;
    forced = (param->op_attr_mask & UCP_OP_ATTR_FIELD_FLAGS) != 0 && (param->flags & UCP_EP_CLOSE_FLAG_FORCE) != 0;
    complete_sends(UCS_ERR_CANCELED);
    for (auto& flush : std::exchange(pending_flushes, {}))
      queue.emplace_back(
          [this, flush] { flush.cb.send(new_request(), UCS_ERR_CANCELED, const_cast<void*>(flush.user_data)); });
    return nullptr;
  }
  ucs_status_ptr_t am_send(ucp_ep_h, unsigned, const void*, std::size_t, const void*, std::size_t,
                           const ucp_request_param_t* param) override {
    last_send = *param;
    if ((param->op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE) == 0) ++untyped;
    if (param->memory_type == UCS_MEMORY_TYPE_CUDA && !inside) ++outside;
    if (send_status != UCS_OK) return UCS_STATUS_PTR(send_status);
    if (send_mode == Send::kAtOnce) return nullptr;
    sends.push_back({*param, send_mode == Send::kNever});
    return fake<void*>(6);
  }
  ucs_status_ptr_t am_receive(ucp_worker_h, void*, void*, std::size_t, const ucp_request_param_t* param) override {
    last_receive = *param;
    if ((param->op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE) == 0) ++untyped;
    if (receive_status != UCS_OK) return UCS_STATUS_PTR(receive_status);
    receives.push_back({*param, false});
    return fake<void*>(7);
  }
  void am_data_release(ucp_worker_h, void* data) override { released_data.push_back(data); }
  void request_free(void* request) override {
    --requests;
    ::operator delete(request);
  }

  bool forced = false;

 private:
  template <typename T>
  static T fake(std::uintptr_t value) {
    return reinterpret_cast<T>(value << 8);
  }
  void* new_request() {
    ++requests;
    return ::operator new(1);
  }
  int event_fd_;
};

}  // namespace hybridps::transport
