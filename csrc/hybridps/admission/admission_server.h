// hybridps/admission/admission_server.h: the TCP conversation between a job and a dedicated server.
//
// The messages are in messages.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/sleeper.h"
#include "hybridps/core/status.h"
#include "hybridps/admission/messages.h"
#include "hybridps/tls/authority.h"
#include "hybridps/tls/knock.h"

namespace hybridps::admission {

struct Address {
  std::string host;
  int port = 0;
  std::string text() const {
    return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
  }
};

/// "host:port" or "[v6]:port"; kInvalidArgument says what is wrong.
core::Result<Address> parse_address(const std::string& text);
/// Several addresses, separated by commas. kInvalidArgument if an address is wrong or occurs twice.
core::Result<std::vector<Address>> parse_addresses(const std::string& text);

/// Whether only this machine reaches what listens at `address`. A name counts only if all it stands for is loopback.
bool is_loopback(const Address& address);

/// No token is shorter than these 128 bits.
inline constexpr std::size_t kTokenBytesMin = 16;

/// `token` unless empty, else the first line of the file at `file_path` ("~/" stands for HOME). Empty if both are
/// empty. kInvalidArgument: the file cannot be read, is neither ours nor root's, has no token in its first 4 KiB, or
/// others may access it. The group may read a file of root's.
/// `second`: receives the token of a second line "also TOKEN", that a server takes as well. May be null.
core::Result<core::SecretBytes> read_token(const std::string& token, const std::string& file_path,
                                           core::SecretBytes* second = nullptr);

/// What a job and its servers share.
struct Secret {
  Secret() = default;
  Secret(core::SecretBytes text, std::shared_ptr<const tls::Authority> of = {},  // NOLINT: a token is a secret
         std::shared_ptr<const tls::Identity> own = {})
      : token(std::move(text)), authority(std::move(of)), identity(std::move(own)) {}
  Secret(const std::string& text) : token(text) {}  // NOLINT: the same
  Secret(const char* text) : token(text) {}         // NOLINT: the same
  std::vector<core::SecretBytes> tokens() const {
    return second.empty() ? std::vector{token} : std::vector{token, second};
  }

  core::SecretBytes token;
  core::SecretBytes second;                         // that a server takes as well; empty: none
  std::shared_ptr<const tls::Authority> authority;  // null: conversations go in clear
  std::shared_ptr<const tls::Identity> identity;    // of this process; null: each conversation makes one
};

/// Sends one request and returns its answer. Waits until `deadline` at most, and 1 s for a connection to each address
/// of the host. Errors name the address: kPeerDead (refused, unreachable, ended), kTimeout, kMismatch (no hybridps
/// server, another version), kInvalidArgument (no such host, wrong token, above 64 MiB), or the server's answer.
core::Result<Bytes> ask(const Address& address, const Secret& secret, const Bytes& body, core::Deadline deadline);

struct AdmissionStats {
  std::atomic<std::uint64_t> accepted{0};
  std::atomic<std::uint64_t> answered{0};
  std::atomic<std::uint64_t> refused{0};  // strangers, wrong tokens, too slow, or displaced
};

class AdmissionServer : core::Pinned {
 public:
  /// Runs on the admission server's thread.
  using Handler = admission::Handler;

  /// Listens at once; port 0: the kernel chooses. kInvalidArgument or kOutOfResources: the text says what to do. A
  /// request has `body_bytes_max` at most, and kLargeBodiesMax requests above kLargeBytes are read at a time.
  static core::Result<std::unique_ptr<AdmissionServer>> open(const Address& listen, Secret secret, Handler handler,
                                                             std::size_t body_bytes_max = kBodyBytesMax);
  static constexpr std::size_t kLargeBodiesMax = 4;
  ~AdmissionServer();

  int port() const noexcept { return port_; }
  const AdmissionStats& stats() const noexcept { return stats_; }

 private:
  struct Guest;
  AdmissionServer(Secret secret, Handler handler, std::size_t body_bytes_max)
      : secret_(std::move(secret)),
        tokens_(secret_.tokens()),
        handler_(std::move(handler)),
        body_bytes_max_(body_bytes_max) {}
  void run();
  bool serve(Guest& guest);
  void refuse(const Guest& guest);
  void leave(const Guest& guest);

  const Secret secret_;
  const std::vector<core::SecretBytes> tokens_;
  std::shared_ptr<const tls::Identity> identity_;  // null: in clear
  std::optional<tls::KnockGuard> guard_;           // in TLS; of the server's thread
  const Handler handler_;
  const std::size_t body_bytes_max_;
  std::size_t large_bodies_ = 0;  // guests whose large body is being read
  int listen_fd_ = -1;
  core::EventFd wake_;
  int port_ = 0;
  AdmissionStats stats_;
  std::thread thread_;
};

}  // namespace hybridps::admission
