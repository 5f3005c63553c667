// hybridps/transport/transport.h: opens endpoints to engines, receives their messages, runs progress.
//
// Owner    the engine. Destroying a Transport closes its endpoints; nothing is called back after that.
// Threads  one thread at a time: the thread that drives the engine's loop ("the progress thread"). event_fd() is
//          constant.
// Headers  are opaque bytes to every transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/endpoint.h"

namespace hybridps::transport {

/// A received payload: read-only bytes lent by a transport. The destructor gives the bytes back, on the progress
/// thread. Move-only. An RxPayload must not outlive its Transport.
class RxPayload {
 public:
  using Release = void (*)(void* context, void* token, std::uint64_t extra) noexcept;

  RxPayload() = default;
  RxPayload(const std::byte* data, std::size_t bytes, Release release, void* context, void* token,
            std::uint64_t extra = 0) noexcept
      : data_(data), bytes_(bytes), release_(release), context_(context), token_(token), extra_(extra) {}
  RxPayload(RxPayload&& other) noexcept { *this = std::move(other); }
  RxPayload& operator=(RxPayload&& other) noexcept {
    if (this != &other) {
      reset();
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
      release_ = std::exchange(other.release_, nullptr);
      context_ = other.context_;
      token_ = other.token_;
      extra_ = other.extra_;
    }
    return *this;
  }
  ~RxPayload() { reset(); }

  const std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  void reset() noexcept {
    if (auto release = std::exchange(release_, nullptr)) release(context_, token_, extra_);
    data_ = nullptr;
    bytes_ = 0;
  }

 private:
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Release release_ = nullptr;
  void* context_ = nullptr;
  void* token_ = nullptr;
  std::uint64_t extra_ = 0;
};

/// Receives what a Transport delivers. Methods are called on the progress thread, from within progress() only.
class Receiver {
 public:
  virtual ~Receiver() = default;
  /// `from`: whose connection the message came by. Where nobody has introduced the other end yet, a number that stands
  /// for it: see Transport::name_of(). Zero: this transport cannot tell. `header` is valid during the call; `payload`
  /// may be kept. Bytes come from a peer: validate before use.
  virtual void on_message(core::EngineId from, std::span<const std::byte> header, RxPayload payload) noexcept = 0;
  /// The path to `peer` broke (reset, unreachable, process gone). At most once per endpoint; pending sends get their
  /// `done` with the same cause.
  virtual void on_peer_failed(core::EngineId peer, core::Status cause) noexcept = 0;
};

/// Exact counters since creation. Bytes are counted as handed to the layer below, payloads and headers apart.
struct TransportStats {
  std::uint64_t tx_messages = 0;
  std::uint64_t tx_payload_bytes = 0;
  std::uint64_t tx_device_bytes = 0;  // part of tx_payload_bytes that lay in a device's memory
  std::uint64_t tx_header_bytes = 0;
  std::uint64_t rx_messages = 0;
  std::uint64_t rx_payload_bytes = 0;
  std::uint64_t rx_header_bytes = 0;
  std::uint64_t endpoints_open = 0;
};

/// A connection to a peer, as the kernel sees it.
struct PathInfo {
  core::EngineId peer;
  double rtt_seconds = 0;         // smoothed
  double min_rtt_seconds = 0;     // the shortest of the last minutes; 0: not known
  double bytes_per_second = 0;    // that the peer acknowledged lately, payload of TCP; 0: not known
  double busy_seconds = 0;        // for which bytes were under way, since the connection was opened; 0: not known
  std::uint64_t retransmits = 0;  // segments, since the connection was opened
  std::uint64_t resumptions = 0;  // how often it broke and went on over a new one
};

/// A contiguous range of an accelerator's memory.
struct DeviceMemory {
  std::span<std::byte> bytes;
  /// Runs `call` with the device current on this thread, for libraries that use the current device. Empty: not needed.
  std::function<void(const std::function<void()>& call)> within;
};

/// State of the connection to a peer.
enum class Way : std::uint8_t {
  kNone,    // connect() would open a connection
  kOpens,   // a connection is being made, or made again after it broke
  kStands,  // there is a connection
  kLacks    // the connection waits for file descriptors of this process or of the peer
};

class Transport : core::Pinned {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const noexcept = 0;
  /// Registers the pool's memory, once, before the first send with a payload. The memory must outlive the Transport.
  virtual core::Status attach(std::span<std::byte> pool_memory) = 0;
  /// Registers an accelerator's memory. Buffers in this memory may then be sent to any peer. This process's own code
  /// never reads the memory. The memory must stay valid until detach_device() or outlive the Transport. kUnsupported:
  /// this transport cannot send device memory; the text says why. After any error the transport is unchanged.
  virtual core::Status attach_device(const DeviceMemory& memory);
  /// The caller guarantees that no Buffer lies in `memory` any more. Not from inside progress().
  virtual void detach_device(std::span<std::byte> memory) noexcept;
  /// The address that a peer passes to connect(). Opaque bytes, at most a few hundred.
  virtual std::vector<std::byte> address() const = 0;
  /// The endpoint to `peer`, opened on first use; the same object for the same peer. connect() may return before the
  /// connection is established. Malformed addresses are an error, never undefined behaviour.
  virtual core::Result<Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) = 0;
  /// Says that the transport with this address is `peer`'s. Connections that it has begun, or begins, are `peer`'s,
  /// too: on_message() names them so. Opens nothing.
  virtual void introduce(core::EngineId /*peer*/, std::span<const std::byte> /*address*/) {}
  /// What `from`, as on_message() gave it earlier, is known to be now: an engine if its end was introduced since.
  virtual core::EngineId name_of(core::EngineId from) { return from; }
  /// Closes the connections by which messages of `from` come, as close() does with an endpoint.
  virtual void cut(core::EngineId from, const core::Status& cause);
  /// The endpoint to `peer` if connect() made one and the endpoint has not failed, else nullptr.
  virtual Endpoint* find(core::EngineId peer) noexcept = 0;
  /// State of the connection to `peer`. `address`: as for connect().
  virtual Way way(core::EngineId peer, std::span<const std::byte> /*address*/) noexcept {
    return find(peer) != nullptr ? Way::kStands : Way::kNone;
  }
  /// Receives and completes pending work without waiting. Returns the number of things done (0: nothing to do).
  virtual std::size_t progress() = 0;
  /// Readable when progress() may have work, provided that arm() returned true before. -1: no descriptor.
  virtual int event_fd() const noexcept = 0;
  /// True: nothing to do now, and event_fd() will signal work. False: call progress() again.
  virtual bool arm() = 0;
  /// Sends the messages that send() has accepted but held back for batching, as far as the network takes them now. May
  /// be called from anywhere, also inside progress(). Call send_now() before reporting that an operation is over,
  /// because the program may end the process then. A threaded transport waits for a bounded time, then warns.
  virtual void send_now() noexcept {}
  /// True: some messages leave only if progress() is called again.
  virtual bool has_unsent() const noexcept = 0;
  virtual void set_receiver(Receiver* receiver) noexcept = 0;
  virtual TransportStats stats() const noexcept = 0;
  /// The open connections, if the kernel reports on them (TCP). A few system calls each. Not inside progress().
  virtual std::vector<PathInfo> paths() const { return {}; }
  /// Sends to each peer over `sockets` connections per card, or all if there are fewer. 0: the configured number.
  virtual void use_sockets(std::size_t /*sockets*/) noexcept {}
};

inline core::Status Transport::attach_device(const DeviceMemory& /*memory*/) {
  return {core::Code::kUnsupported, std::string(name()) + " sends from host memory only"};
}
inline void Transport::cut(core::EngineId from, const core::Status& cause) {
  if (Endpoint* const endpoint = find(from); endpoint != nullptr) endpoint->close(cause);
}
inline void Transport::detach_device(std::span<std::byte> /*memory*/) noexcept {}

}  // namespace hybridps::transport
