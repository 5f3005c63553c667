// hybridps/transport/transport.h: opens endpoints to engines, receives their messages, runs progress.
//
// Owner    the engine. Destroying a Transport closes its endpoints; nothing is called back after that.
// Threads  one at a time, whichever drives the engine's loop ("the progress thread"); event_fd() is constant.
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

/// A received payload: read-only bytes lent by a transport, given back by the destructor. Move-only. It must not
/// outlive its Transport and is released on the progress thread.
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

/// Where a Transport delivers. Called on the progress thread, from within progress() only.
class Receiver {
 public:
  virtual ~Receiver() = default;
  /// `header` is valid during the call; `payload` may be kept. Bytes come from a peer: validate before use.
  virtual void on_message(std::span<const std::byte> header, RxPayload payload) noexcept = 0;
  /// The path to `peer` broke (reset, unreachable, process gone). At most once per endpoint; pending sends get their
  /// `done` with the same cause.
  virtual void on_peer_failed(core::EngineId peer, core::Status cause) noexcept = 0;
};

/// Exact counters since creation, bytes as handed to the wire below us: payload and headers apart.
struct TransportStats {
  std::uint64_t tx_messages = 0;
  std::uint64_t tx_payload_bytes = 0;
  std::uint64_t tx_device_bytes = 0;  // of these, what lay in a device's memory
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
  std::uint64_t retransmits = 0;  // segments, since it was made
};

/// A run of an accelerator's memory.
struct DeviceMemory {
  std::span<std::byte> bytes;
  /// Runs the call with the device current on this thread, for libraries that look there. Empty: nothing is needed.
  std::function<void(const std::function<void()>& call)> within;
};

/// How the way to a peer stands.
enum class Way : std::uint8_t {
  kNone,    // connect() would open a connection
  kStands,  // there is one, whoever made it, or it is on its way
  kLacks    // it waits for descriptors, of this process or of the peer
};

class Transport : core::Pinned {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const noexcept = 0;
  /// Registers the pool's memory, once, before the first send with a payload. It must outlive the Transport.
  virtual core::Status attach(std::span<std::byte> pool_memory) = 0;
  /// Registers memory of an accelerator: Buffers that lie in it may then be sent to any peer, and no byte of them is read
  /// by this process's own code. It stays until detach_device(), or outlives the Transport. kUnsupported: this transport
  /// cannot do that, and why; it stays as it was after any error.
  virtual core::Status attach_device(const DeviceMemory& memory);
  /// No Buffer lies in it any more. Not from inside progress().
  virtual void detach_device(std::span<std::byte> memory) noexcept;
  /// What a peer passes to connect(). Opaque bytes, at most a few hundred.
  virtual std::vector<std::byte> address() const = 0;
  /// The endpoint to `peer`, opened on first use; the same object for the same peer. May return before the
  /// connection stands. Malformed addresses are an error, never undefined behaviour.
  virtual core::Result<Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) = 0;
  /// The endpoint to `peer` if connect() made one and it has not failed, else nullptr.
  virtual Endpoint* find(core::EngineId peer) noexcept = 0;
  /// `address`: as for connect().
  virtual Way way(core::EngineId peer, std::span<const std::byte> /*address*/) noexcept {
    return find(peer) != nullptr ? Way::kStands : Way::kNone;
  }
  /// Receives and completes what is there without waiting; returns how much it did (0: nothing to do).
  virtual std::size_t progress() = 0;
  /// Readable when progress() may have work, provided that arm() returned true before. -1: never (poll it).
  virtual int event_fd() const noexcept = 0;
  /// True: nothing to do now and event_fd() will tell. False: call progress() again.
  virtual bool arm() = 0;
  /// Puts on their way what send() has accepted and kept for company, as far as the path takes it now. From anywhere, also
  /// from inside progress(). Before somebody is told that an operation is over, who may end the process upon that. One that
  /// is driven by a thread of its own waits for the end of that one's round, for a bounded time, then warns.
  virtual void send_now() noexcept {}
  /// Messages that leave only if progress() is called again.
  virtual bool has_unsent() const noexcept = 0;
  virtual void set_receiver(Receiver* receiver) noexcept = 0;
  virtual TransportStats stats() const noexcept = 0;
  /// Connections that are open, where the kernel tells of them (TCP); a system call for each. Not from inside progress().
  virtual std::vector<PathInfo> paths() const { return {}; }
  /// Sends to each peer over so many connections of each card, as far as there are any to choose from; 0: as set.
  virtual void use_sockets(std::size_t /*sockets*/) noexcept {}
};

inline core::Status Transport::attach_device(const DeviceMemory& /*memory*/) {
  return {core::Code::kUnsupported, std::string(name()) + " sends from host memory only"};
}
inline void Transport::detach_device(std::span<std::byte> /*memory*/) noexcept {}

}  // namespace hybridps::transport
