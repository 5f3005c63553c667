// hybridps/transport/ucx/ucx_transport_impl.h: UcxTransport's state. Internal to this room.
//
// UCX callbacks only record what happened, except that they deliver messages. `done` callbacks, closes and failure
// reports run from progress(), after ucp_worker_progress() has returned.
#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/fork.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/rx_pool.h"
#include "hybridps/transport/transport.h"
#include "hybridps/transport/ucx/fork_guard.h"
#include "hybridps/transport/ucx/ucp_api.h"
#include "hybridps/transport/ucx/ucx_config.h"
#include "hybridps/transport/ucx/ucx_endpoint.h"
#include "hybridps/transport/ucx/ucx_transport.h"

namespace hybridps::transport {

class UcxTransportImpl final : public UcxTransport {
 public:
  UcxTransportImpl(const UcxOptions& options, UcpApi& api);
  ~UcxTransportImpl() override;
  core::Status start();
  // Parts of start(); `where` is used in error texts.
  core::Status make_context(std::pair<unsigned, unsigned> version, const std::string& where);
  core::Status make_worker(std::size_t descriptors_before, const std::string& where);

  std::string_view name() const noexcept override { return name_; }
  core::Status attach(std::span<std::byte> pool_memory) override;
  core::Status attach_device(const DeviceMemory& memory) override;
  void detach_device(std::span<std::byte> memory) noexcept override;
  std::vector<std::byte> address() const override { return address_; }
  core::Result<Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override;
  Endpoint* find(core::EngineId peer) noexcept override;
  std::size_t progress() override;
  int event_fd() const noexcept override { return event_fd_; }
  bool arm() override;
  bool has_unsent() const noexcept override { return held_.next != &held_; }
  void set_receiver(Receiver* receiver) noexcept override { receiver_ = receiver; }
  TransportStats stats() const noexcept override;
  UcxCounters counters() const noexcept override;

 private:
  friend class UcxEndpoint;

  using Within = decltype(DeviceMemory::within);
  struct Region {
    std::span<std::byte> memory;
    ucp_mem_h memh = nullptr;
    ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
    Within within{};  // set for a device's memory only
  };
  struct UcxCompletion {
    SendRequest* request = nullptr;
    core::Status status;
  };
  /// A rendezvous message: first waiting for memory (slot null), then being received.
  struct Receive {
    UcxTransportImpl* transport = nullptr;
    void* descriptor = nullptr;
    RxSlot* slot = nullptr;
    std::size_t payload_bytes = 0;
    std::uint32_t header_bytes = 0;
    bool pending = false;  // UCX holds the request
    std::array<std::byte, kHeaderBytesMax> header;
  };

  bool in_child() const noexcept { return core::fork_generation() != generation_; }
  core::Status child_error() const;
  const Region* region_of(const std::byte* data, std::size_t bytes) const noexcept;
  core::Status map(Region region);
  bool map_block(std::span<std::byte> block, ucp_mem_h* memh);
  /// Runs a UCX call about the memory of one region. `device` is empty for host memory.
  template <typename Call>
  static void within(const Within& device, const Call& call);
  /// Runs a UCX call that may concern any region, with the first device current. UCX finds others by address.
  template <typename Call>
  void within_first(const Call& call) const;
  ucs_status_t arm_worker() const;

  // Sending
  core::Status send(UcxEndpoint& endpoint, std::span<const std::byte> header, const Buffer& payload,
                    std::size_t payload_bytes, SendDone done);
  SendRequest* acquire_request();
  void release_request(SendRequest* request);
  void hold(SendRequest* request);
  void unhold(SendRequest* request);
  std::size_t run_completions();
  static void on_sent(void* ucp_request, ucs_status_t status, void* request);

  // Receiving
  static ucs_status_t on_active_message(void* transport, const void* header, std::size_t header_bytes, void* data,
                                        std::size_t bytes, const ucp_am_recv_param_t* param);
  ucs_status_t receive_eager(std::span<const std::byte> header, void* data, std::size_t bytes, bool may_keep);
  ucs_status_t receive_rendezvous(std::span<const std::byte> header, void* descriptor, std::size_t bytes);
  void start_receive(Receive* receive);
  void finish_receive(Receive* receive, ucs_status_t status);
  std::size_t start_waiting_receives();
  static void on_received(void* ucp_request, ucs_status_t status, std::size_t bytes, void* receive);
  void deliver(std::span<const std::byte> header, RxPayload payload);
  static void release_kept(void* transport, void* data, std::uint64_t) noexcept;
  static void release_slot(void* transport, void* slot, std::uint64_t) noexcept;

  // Closing
  void close(UcxEndpoint& endpoint, core::Status cause);
  void needs_attention(UcxEndpoint& endpoint);
  std::size_t attend();
  /// True: the endpoint needs another step() later.
  bool step(UcxEndpoint& endpoint, core::TimePoint now);
  void force_close(UcxEndpoint& endpoint);
  static void on_flushed(void* ucp_request, ucs_status_t status, void* endpoint);
  static void on_closed(void* ucp_request, ucs_status_t status, void* transport);
  void leave_to_parent() noexcept;
  void run_down();

  UcpApi& api_;
  const UcxOptions options_;
  const std::string name_;
  const std::uint64_t generation_ = core::fork_generation();
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::vector<std::byte> address_;
  std::unique_ptr<ForkGuard> fork_guard_;
  core::TimePoint next_refresh_{};
  Receiver* receiver_ = nullptr;
  std::vector<Region> regions_;
  std::unordered_map<core::EngineId, std::unique_ptr<UcxEndpoint>> endpoints_;

  std::vector<std::unique_ptr<SendRequest>> requests_;
  std::vector<SendRequest*> free_requests_;
  SendRequest held_;  // head of the list of requests that UCX holds
  std::vector<UcxCompletion> completions_;
  std::vector<UcxCompletion> running_completions_;

  std::unique_ptr<RxPool> rx_pool_;
  std::vector<std::unique_ptr<Receive>> receives_;
  std::vector<Receive*> free_receives_;
  std::deque<Receive*> waiting_;
  std::size_t receives_pending_ = 0;
  void* data_in_callback_ = nullptr;  // during a delivery: UCX's buffer, which the callback's result keeps or releases
  bool released_in_callback_ = false;

  std::vector<UcxEndpoint*> attention_;  // endpoints with new work
  std::vector<UcxEndpoint*> closing_;    // friendly closes under way
  std::size_t closes_pending_ = 0;

  TransportStats stats_;
  UcxCounters counters_;
};

}  // namespace hybridps::transport
