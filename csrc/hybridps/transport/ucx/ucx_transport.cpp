#include "hybridps/transport/ucx/ucx_transport.h"

#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <string>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/transport/envelope.h"
#include "hybridps/transport/ucx/ucx_transport_impl.h"

namespace hybridps::transport {
namespace {

constexpr unsigned kActiveMessageId = 7;
constexpr core::Duration kRefreshEvery = core::from_seconds(1);
/// Limit for operations that a forced close cancels; UCX needs microseconds.
constexpr core::Duration kCancelTimeout = core::from_seconds(0.25);

core::Status ucs_error(core::Code code, const std::string& what, ucs_status_t status) {
  if (status == UCS_ERR_NO_MEMORY || status == UCS_ERR_NO_RESOURCE || status == UCS_ERR_EXCEEDS_LIMIT)
    code = core::Code::kOutOfResources;
  return {code, what + ": " + text_of(status)};
}

}  // namespace

core::Result<std::unique_ptr<UcxTransport>> UcxTransport::create(const UcxOptions& options) {
  if (core::Status status = need_ucx(); !status.is_ok()) return status;
  static UcpApi libucp;
  return create(options, libucp);
}

core::Result<std::unique_ptr<UcxTransport>> UcxTransport::create(const UcxOptions& options, UcpApi& api) {
  auto transport = std::make_unique<UcxTransportImpl>(options, api);
  if (core::Status status = transport->start(); !status.is_ok()) return status;
  return std::unique_ptr<UcxTransport>(std::move(transport));
}

UcxTransportImpl::UcxTransportImpl(const UcxOptions& options, UcpApi& api)
    : api_(api), options_(options), name_("ucx " + options.label) {
  held_.next = held_.previous = &held_;
}

core::Status UcxTransportImpl::make_context(std::pair<unsigned, unsigned> version, const std::string& where) {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = api_.config_read("HYBRIDPS", &config); status != UCS_OK)
    return ucs_error(core::Code::kInvalidArgument, "UCX does not accept its settings (UCX_*, HYBRIDPS_UCX_*)", status);
  for (const UcxSetting& setting : ucx_settings(options_, version, process_environment())) {
    core::Status bad;
    if (setting.name == "NET_DEVICES" && setting.value != "all") bad = validate_device(setting.value);
    if (bad.is_ok()) {
      const ucs_status_t status = api_.config_modify(config, setting.name.c_str(), setting.value.c_str());
      if (status != UCS_OK && setting.required)
        bad = ucs_error(core::Code::kInternal, "UCX refused " + setting.name + "=" + setting.value, status);
    }
    if (!bad.is_ok()) {
      api_.config_release(config);
      return bad;
    }
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;
  params.name = name_.c_str();
  const ucs_status_t status = api_.init(&params, config, &context_);
  api_.config_release(config);
  if (status != UCS_OK) {
    context_ = nullptr;
    return ucs_error(core::Code::kInvalidArgument, "UCX finds no transport" + where + " (" + name_ + ")", status);
  }
  return core::Status::ok();
}

core::Status UcxTransportImpl::make_worker(std::size_t descriptors_before, const std::string& where) {
  constexpr std::size_t kDescriptorsOfAWorker = 32;  // about 10, and as many again while UCX looks for devices
  ucp_worker_params_t worker_params{};
  worker_params.field_mask =
      UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_NAME | UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  worker_params.name = name_.c_str();
  worker_params.am_alignment = 64;
  const ucs_status_t status = api_.worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) {
    worker_ = nullptr;
    // UCX has closed its descriptors again, so errno tells nothing.
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && descriptors_before + kDescriptorsOfAWorker > limit.rlim_cur)
      return {core::Code::kOutOfResources, "too few file descriptors for UCX" + where + ": " +
                                               std::to_string(descriptors_before) + " of " +
                                               std::to_string(limit.rlim_cur) + " are in use; raise `ulimit -n`"};
    return ucs_error(core::Code::kInternal, "UCX made no worker" + where, status);
  }
  return core::Status::ok();
}

core::Status UcxTransportImpl::start() {
  if (ucx_inherited_by_fork())
    return {core::Code::kUnsupported, "this process was forked off one that uses UCX; start it with spawn instead"};
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  api_.get_version(&major, &minor, &release);
  if (std::pair(major, minor) < std::pair<unsigned, unsigned>(UCP_API_MAJOR, UCP_API_MINOR))
    return {core::Code::kUnsupported, "UCX " + std::to_string(major) + "." + std::to_string(minor) + " (" +
                                          ucx_library_path() + ") is older than the " + std::to_string(UCP_API_MAJOR) +
                                          "." + std::to_string(UCP_API_MINOR) +
                                          " that hybridps was built with; load that one first or rebuild"};

  const std::string where = options_.net_device.empty() ? std::string() : " on '" + options_.net_device + "'";
  if (core::Status made = make_context({major, minor}, where); !made.is_ok()) return made;
  const std::vector<int> before = open_descriptors();
  if (core::Status made = make_worker(before.size(), where); !made.is_ok()) return made;
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kActiveMessageId;
  handler.cb = &UcxTransportImpl::on_active_message;
  handler.arg = this;
  std::vector<std::byte> worker_address;
  ucs_status_t status = UCS_OK;
  if ((status = api_.set_am_handler(worker_, &handler)) != UCS_OK ||
      (status = api_.worker_address(worker_, &worker_address)) != UCS_OK ||
      (status = api_.worker_get_efd(worker_, &event_fd_)) != UCS_OK)
    return ucs_error(core::Code::kInternal, "UCX's worker cannot be used" + where, status);
  if (worker_address.size() < kUcxEnvelope.bytes_min || worker_address.size() > kUcxEnvelope.bytes_max)
    return {core::Code::kInternal, "a UCX address of " + std::to_string(worker_address.size()) + " bytes"};
  address_ = wrap(kUcxEnvelope, worker_address);
  fork_guard_ = std::make_unique<ForkGuard>(event_fd_, listening_sockets_since(before, worker_address));
  fork_guard_->refresh();
  rx_pool_ = std::make_unique<RxPool>(
      options_.receive_bytes_max,
      RxRegistration{[this](std::span<std::byte> block, void** handle) {
                       ucp_mem_h memh = nullptr;
                       if (!map_block(block, &memh)) return false;
                       *handle = memh;
                       return true;
                     },
                     [this](void* handle) { (void)api_.mem_unmap(context_, static_cast<ucp_mem_h>(handle)); }});
  core::log_info(name_, where, ": UCX ", major, ".", minor, ".", release, " from ", ucx_library_path());
  return core::Status::ok();
}

UcxTransportImpl::~UcxTransportImpl() {
  if (in_child()) {
    leave_to_parent();
    return;
  }
  receiver_ = nullptr;
  if (worker_ != nullptr) {
    run_down();
    for (Receive* receive : waiting_) api_.am_data_release(worker_, receive->descriptor);
    waiting_.clear();
    fork_guard_.reset();
    api_.worker_destroy(worker_);
  }
  for (const Region& region : regions_) within(region.within, [&] { (void)api_.mem_unmap(context_, region.memh); });
  rx_pool_.reset();
  if (context_ != nullptr) api_.cleanup(context_);
  // UCX is gone and uses no payload any more.
  const core::Status closed(core::Code::kClosed, "the transport was destroyed");
  while (held_.next != &held_) {
    SendRequest* request = held_.next;
    unhold(request);
    completions_.push_back({request, closed});
  }
  while (run_completions() > 0) {
  }
}

/// In a forked child: leaks all objects with a destructor that would call UCX or run a `done`.
void UcxTransportImpl::leave_to_parent() noexcept {
  for (auto& request : requests_) (void)request.release();
  for (auto& receive : receives_) (void)receive.release();
  (void)rx_pool_.release();
}

/// Closes the endpoints in the friendly way for close_timeout, then by force.
void UcxTransportImpl::run_down() {
  for (auto& [peer, endpoint] : endpoints_)
    close(*endpoint, core::Status(core::Code::kClosed, "the transport was destroyed"));
  const core::Deadline deadline = core::Deadline::after(options_.close_timeout + kCancelTimeout);
  while (!deadline.has_passed()) {
    std::size_t did = 0;
    within_first([&] { did = api_.worker_progress(worker_); });
    did += attend();
    if (attention_.empty() && closing_.empty() && held_.next == &held_ && receives_pending_ == 0 &&
        closes_pending_ == 0)
      return;
    if (did == 0 && attention_.empty() && arm_worker() == UCS_OK) {
      pollfd event{event_fd_, POLLIN, 0};
      (void)::poll(&event, 1, 1);
    }
  }
}

core::Status UcxTransportImpl::child_error() const {
  return {core::Code::kClosed, name_ + " belongs to the parent process"};
}

core::Status UcxTransportImpl::attach(std::span<std::byte> pool_memory) {
  if (in_child()) return child_error();
  if (pool_memory.empty()) return {core::Code::kInvalidArgument, "no memory to attach"};
  return map({pool_memory, nullptr, UCS_MEMORY_TYPE_HOST});
}

bool UcxTransportImpl::map_block(std::span<std::byte> block, ucp_mem_h* memh) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;  // otherwise UCX asks CUDA, if it has CUDA
  params.address = block.data();
  params.length = block.size();
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  return api_.mem_map(context_, &params, memh) == UCS_OK;
}

core::Status UcxTransportImpl::map(Region region) {
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = region.memory.data();
  params.length = region.memory.size();
  params.memory_type = region.type;
  const bool device = region.type != UCS_MEMORY_TYPE_HOST;
  ucs_status_t status = UCS_OK;
  within(region.within, [&] { status = api_.mem_map(context_, &params, &region.memh); });
  if (status != UCS_OK)
    return ucs_error(
        core::Code::kOutOfResources,
        "UCX cannot register " + std::to_string(region.memory.size()) +
            (device ? " bytes of GPU memory (see `lsmod | grep nvidia_peermem`)" : " bytes (see ulimit -l)"),
        status);
  regions_.push_back(std::move(region));
  return core::Status::ok();
}

core::Status UcxTransportImpl::attach_device(const DeviceMemory& memory) {
  if (in_child()) return child_error();
  if (memory.bytes.empty()) return {core::Code::kInvalidArgument, "no memory to attach"};
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  const ucs_status_t status = api_.context_query(context_, &attributes);
  if (status != UCS_OK) return ucs_error(core::Code::kInternal, "UCX does not say what memory it knows", status);
  if ((attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) == 0)
    return {core::Code::kUnsupported,
            "UCX (" + ucx_library_path() +
                ") has no CUDA support here; `ucx_info -d | grep cuda` shows what it has, and "
                "UCX_TLS must not leave out cuda_copy"};
  return map({memory.bytes, nullptr, UCS_MEMORY_TYPE_CUDA, memory.within});
}

void UcxTransportImpl::detach_device(std::span<std::byte> memory) noexcept {
  if (in_child()) return;
  const auto is_it = [&](const Region& region) { return region.memory.data() == memory.data(); };
  const auto found = std::find_if(regions_.begin(), regions_.end(), is_it);
  if (found == regions_.end()) return;
  within(found->within, [&] { (void)api_.mem_unmap(context_, found->memh); });
  regions_.erase(found);
}

template <typename Call>
void UcxTransportImpl::within(const Within& device, const Call& call) {
  if (device)
    device([&] { call(); });
  else
    call();
}

template <typename Call>
void UcxTransportImpl::within_first(const Call& call) const {
  for (const Region& region : regions_)
    if (region.within) return within(region.within, call);
  call();
}

ucs_status_t UcxTransportImpl::arm_worker() const {
  ucs_status_t status = UCS_OK;
  within_first([&] { status = api_.worker_arm(worker_); });  // with device memory UCX asks CUDA's events
  return status;
}

core::Result<Endpoint*> UcxTransportImpl::connect(core::EngineId peer, std::span<const std::byte> address) {
  if (in_child()) return child_error();
  if (const auto found = endpoints_.find(peer); found != endpoints_.end()) {
    if (!found->second->is_open()) return found->second->cause_;
    return static_cast<Endpoint*>(found->second.get());
  }
  const auto worker_address = unwrap(kUcxEnvelope, address);
  if (!worker_address.is_ok()) return worker_address.status();
  auto endpoint = std::make_unique<UcxEndpoint>(*this, peer);
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  // UCX reads structures from the address, so the address must be aligned.
  std::vector<std::uint64_t> aligned((worker_address.value().size() + 7) / 8);
  std::memcpy(aligned.data(), worker_address.value().data(), worker_address.value().size());
  params.address = reinterpret_cast<const ucp_address_t*>(aligned.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcxEndpoint::on_error;
  params.err_handler.arg = endpoint.get();
  const ucs_status_t status = api_.ep_create(worker_, &params, &endpoint->ep_);
  if (status != UCS_OK)
    return ucs_error(core::Code::kPeerDead,
                     "engine " + core::to_string(peer) + " cannot be reached (" + name_ +
                         "); see whether both machines use the same network and the same HYBRIDPS_DATA_TRANSPORT",
                     status);
  Endpoint* result = endpoint.get();
  endpoints_.emplace(peer, std::move(endpoint));
  next_refresh_ = {};
  return result;
}

Endpoint* UcxTransportImpl::find(core::EngineId peer) noexcept {
  const auto found = endpoints_.find(peer);
  return found != endpoints_.end() && found->second->is_open() ? found->second.get() : nullptr;
}

std::size_t UcxTransportImpl::progress() {
  if (in_child()) return 0;
  std::size_t did = 0;
  within_first([&] { did = api_.worker_progress(worker_); });
  did += run_completions();
  did += attend();
  did += start_waiting_receives();
  return did;
}

bool UcxTransportImpl::arm() {
  if (in_child()) return true;
  if (!completions_.empty() || !attention_.empty() || start_waiting_receives() > 0) return false;
  if (const core::TimePoint now = core::Clock::now(); now >= next_refresh_) {
    next_refresh_ = now + kRefreshEvery;
    fork_guard_->refresh();
  }
  const ucs_status_t status = arm_worker();
  if (status != UCS_OK && status != UCS_ERR_BUSY) {
    static core::LogRate rate(core::from_seconds(10));
    if (rate.permit()) core::log_warn(name_, ": UCX cannot arm its events: ", text_of(status));
  }
  return status == UCS_OK;
}

TransportStats UcxTransportImpl::stats() const noexcept {
  TransportStats stats = stats_;
  for (const auto& [peer, endpoint] : endpoints_) stats.endpoints_open += endpoint->is_open() ? 1 : 0;
  return stats;
}

UcxCounters UcxTransportImpl::counters() const noexcept {
  UcxCounters counters = counters_;
  counters.receive_bytes_mapped = rx_pool_->bytes_mapped();
  counters.receive_slots_in_use = rx_pool_->slots_in_use();
  return counters;
}

// Sending

const UcxTransportImpl::Region* UcxTransportImpl::region_of(const std::byte* data, std::size_t bytes) const noexcept {
  for (const Region& region : regions_)
    if (data >= region.memory.data() && data + bytes <= region.memory.data() + region.memory.size()) return &region;
  return nullptr;
}

core::Status UcxTransportImpl::send(UcxEndpoint& endpoint, std::span<const std::byte> header, const Buffer& payload,
                                    std::size_t payload_bytes, SendDone done) {
  if (in_child()) return child_error();
  if (!endpoint.is_open()) return endpoint.cause_;
  if (header.empty() || header.size() > kHeaderBytesMax)
    return {core::Code::kInvalidArgument, "a header of " + std::to_string(header.size()) + " bytes"};
  const Region* region = nullptr;
  if (payload_bytes > 0) {
    if (!payload || payload_bytes > payload.capacity_bytes())
      return {core::Code::kInvalidArgument, "more payload than its buffer holds"};
    region = region_of(payload.data(), payload_bytes);
    if (region == nullptr)
      return {core::Code::kInvalidArgument, "the payload's memory was not attached to this transport"};
  }
  SendRequest* request = acquire_request();
  request->endpoint = &endpoint;
  std::memcpy(request->header.data(), header.data(), header.size());
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &UcxTransportImpl::on_sent;
  param.user_data = request;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  const void* data = nullptr;
  if (region != nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = region->memh;
    param.memory_type = region->type;
    data = payload.data();
    request->payload = payload;
  }
  request->done = std::move(done);
  hold(request);
  const bool from_device = region != nullptr && region->type != UCS_MEMORY_TYPE_HOST;
  ucs_status_ptr_t posted = nullptr;
  const auto post = [&] {
    posted = api_.am_send(endpoint.ep_, kActiveMessageId, request->header.data(), header.size(), data, payload_bytes,
                          &param);
  };
  static const Within kNowhere;
  within(region != nullptr ? region->within : kNowhere, post);
  if (UCS_PTR_IS_ERR(posted)) {
    const ucs_status_t status = UCS_PTR_STATUS(posted);
    unhold(request);
    request->payload = Buffer();
    request->done = SendDone();  // dropped unrun
    release_request(request);
    if (status == UCS_ERR_NO_MEMORY || status == UCS_ERR_NO_RESOURCE)
      return ucs_error(core::Code::kOutOfResources, "UCX cannot queue a message", status);
    UcxEndpoint::on_error(&endpoint, endpoint.ep_, status);
    return endpoint.cause_;
  }
  endpoint.used_ = true;
  ++stats_.tx_messages;
  stats_.tx_header_bytes += header.size();
  stats_.tx_payload_bytes += payload_bytes;
  if (from_device) stats_.tx_device_bytes += payload_bytes;
  if (posted == nullptr) {  // sent already; `done` never runs inside send()
    unhold(request);
    completions_.push_back({request, core::Status::ok()});
  }
  return core::Status::ok();
}

SendRequest* UcxTransportImpl::acquire_request() {
  if (free_requests_.empty()) {
    requests_.push_back(std::make_unique<SendRequest>());
    free_requests_.reserve(requests_.size());
    return requests_.back().get();
  }
  SendRequest* request = free_requests_.back();
  free_requests_.pop_back();
  return request;
}

void UcxTransportImpl::release_request(SendRequest* request) { free_requests_.push_back(request); }

void UcxTransportImpl::hold(SendRequest* request) {
  request->previous = held_.previous;
  request->next = &held_;
  held_.previous->next = request;
  held_.previous = request;
  ++request->endpoint->in_flight_;
}

void UcxTransportImpl::unhold(SendRequest* request) {
  request->previous->next = request->next;
  request->next->previous = request->previous;
  --request->endpoint->in_flight_;
}

void UcxTransportImpl::on_sent(void* ucp_request, ucs_status_t status, void* user_data) {
  auto* request = static_cast<SendRequest*>(user_data);
  UcxEndpoint& endpoint = *request->endpoint;
  UcxTransportImpl& self = endpoint.transport_;
  if (status != UCS_OK) UcxEndpoint::on_error(&endpoint, endpoint.ep_, status);
  self.unhold(request);
  self.completions_.push_back({request, endpoint.is_open() ? core::Status::ok() : endpoint.cause_});
  self.api_.request_free(ucp_request);
}

std::size_t UcxTransportImpl::run_completions() {
  if (completions_.empty()) return 0;
  std::swap(running_completions_, completions_);
  for (UcxCompletion& completion : running_completions_) {
    completion.request->payload = Buffer();  // first, so that `done` may use the slot
    SendDone done = std::move(completion.request->done);
    release_request(completion.request);
    done(std::move(completion.status));
  }
  const std::size_t count = running_completions_.size();
  running_completions_.clear();
  return count;
}

// Receiving

// Closing

void UcxTransportImpl::close(UcxEndpoint& endpoint, core::Status cause) {
  if (in_child() || !endpoint.is_open()) return;
  const bool friendly = cause.is_ok() || cause.code() == core::Code::kClosed;
  endpoint.cause_ = cause.is_ok() ? core::Status(core::Code::kClosed, "the endpoint was closed") : std::move(cause);
  endpoint.state_ = friendly ? UcxEndpoint::UcxState::kDraining : UcxEndpoint::UcxState::kDoomed;
  endpoint.close_deadline_ = core::Deadline::after(options_.close_timeout);
  needs_attention(endpoint);
}

void UcxTransportImpl::needs_attention(UcxEndpoint& endpoint) { attention_.push_back(&endpoint); }

std::size_t UcxTransportImpl::attend() {
  if (attention_.empty() && closing_.empty()) return 0;
  const core::TimePoint now = core::Clock::now();
  std::size_t did = 0;
  std::erase_if(closing_, [&](UcxEndpoint* endpoint) {
    const bool again = step(*endpoint, now);
    if (!again) ++did;
    return !again;
  });
  const std::vector<UcxEndpoint*> attention = std::exchange(attention_, {});
  did += attention.size();
  for (UcxEndpoint* endpoint : attention)
    if (step(*endpoint, now)) closing_.push_back(endpoint);
  for (UcxEndpoint* endpoint : attention)
    if (std::exchange(endpoint->report_, false) && receiver_ != nullptr)
      receiver_->on_peer_failed(endpoint->peer_, endpoint->cause_);
  return did;
}

bool UcxTransportImpl::step(UcxEndpoint& endpoint, core::TimePoint now) {
  using UcxState = UcxEndpoint::UcxState;
  const bool late = endpoint.close_deadline_.has_passed(now);
  if (endpoint.state_ == UcxState::kDraining && endpoint.used_ && !late) {
    if (endpoint.in_flight_ > 0) return true;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = &UcxTransportImpl::on_flushed;
    param.user_data = &endpoint;
    endpoint.state_ = UcxState::kFlushing;
    ++closes_pending_;
    if (!UCS_PTR_IS_PTR(api_.ep_flush(endpoint.ep_, &param))) {
      --closes_pending_;
      endpoint.flush_done_ = true;
    }
  }
  switch (endpoint.state_) {
    case UcxState::kFlushing:
      if (!endpoint.flush_done_ && !late) return true;
      break;
    case UcxState::kDraining:
    case UcxState::kDoomed: break;
    case UcxState::kOpen:
    case UcxState::kGone: return false;
  }
  force_close(endpoint);
  return false;
}

void UcxTransportImpl::force_close(UcxEndpoint& endpoint) {
  endpoint.state_ = UcxEndpoint::UcxState::kGone;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = &UcxTransportImpl::on_closed;
  param.user_data = this;
  ++closes_pending_;
  const ucs_status_ptr_t posted = api_.ep_close(std::exchange(endpoint.ep_, nullptr), &param);
  if (!UCS_PTR_IS_PTR(posted)) --closes_pending_;
  if (UCS_PTR_IS_ERR(posted))
    core::log_debug(name_, ": closing the endpoint to ", core::to_string(endpoint.peer_), ": ",
                    text_of(UCS_PTR_STATUS(posted)));
}

void UcxTransportImpl::on_flushed(void* ucp_request, ucs_status_t /*status*/, void* user_data) {
  auto& endpoint = *static_cast<UcxEndpoint*>(user_data);
  endpoint.flush_done_ = true;
  --endpoint.transport_.closes_pending_;
  endpoint.transport_.api_.request_free(ucp_request);
}

void UcxTransportImpl::on_closed(void* ucp_request, ucs_status_t /*status*/, void* user_data) {
  auto& self = *static_cast<UcxTransportImpl*>(user_data);
  --self.closes_pending_;
  self.api_.request_free(ucp_request);
}

}  // namespace hybridps::transport
