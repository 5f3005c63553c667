// hybridps/transport/ucx/ucx_transport.h: the Transport between machines, one UCX context and one worker.
//
// Owner    the engine, which makes two: "data", and "control" with tcp_only.
// Threads  one thread at a time for everything, destructor included; UCX's own thread only opens connections.
// Memory   attach() maps a pool once. attach_device() maps GPU memory if UCX supports CUDA. Every send names the handle
//          and kind of its memory. Incoming payloads land in registered memory that the transport owns, or stay where
//          UCX received them; 64-byte aligned.
// Failure  a broken connection fails the endpoint at once and is reported from progress(). `done` of a pending send
//          runs when UCX no longer uses its payload. An endpoint that failed or was closed is never opened again.
// Fork     in a forked child every method does nothing or returns kClosed, and destruction leaks on purpose: touching
//          UCX there would break the parent.
#pragma once

#include <cstdint>
#include <memory>

#include "hybridps/core/status.h"
#include "hybridps/transport/transport.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::transport {

class UcpApi;

/// Counts since creation: how messages were received, and problems that are not reported as errors.
struct UcxCounters {
  std::uint64_t dropped_malformed = 0;  // empty or long header, payload above the cap
  std::uint64_t receives_failed = 0;    // the sender broke off during a rendezvous, or no memory
  std::uint64_t receives_waited = 0;    // large messages that waited for receive memory
  std::uint64_t receives_kept = 0;      // eager messages kept in UCX's own buffer
  std::uint64_t receives_copied = 0;    // eager messages copied out of UCX's buffer
  std::uint64_t receives_rendezvous = 0;
  std::uint64_t receive_bytes_mapped = 0;  // now
  std::uint64_t receive_slots_in_use = 0;  // now
};

class UcxTransport : public Transport {
 public:
  /// kInvalidArgument: no such device (see validate_device()), or UCX found no transport on it. kUnsupported: the
  /// libucp in this process is older than the one compiled against, or this process was forked from one that uses UCX.
  static core::Result<std::unique_ptr<UcxTransport>> create(const UcxOptions& options);
  /// The same with another libucp, for tests. `api` must outlive the transport.
  static core::Result<std::unique_ptr<UcxTransport>> create(const UcxOptions& options, UcpApi& api);

  virtual UcxCounters counters() const noexcept = 0;
};

}  // namespace hybridps::transport
