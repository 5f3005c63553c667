#include "hybridps/engine/roster_shelf.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/ids.h"
#include "hybridps/intranode/shm/handshake.h"
#include "hybridps/tls/hmac.h"

namespace hybridps::engine {
namespace {

namespace shm = intranode::shm;
using bootstrap::Bytes;

constexpr int kBacklog = 1024;
constexpr off_t kBytesMax = off_t{1} << 30;
// The socket of a rank that has just claimed it does not listen yet.
constexpr int kRefusalsMax = 20;
constexpr std::size_t kReadersMax = kBacklog;

/// What only those can compute who have read the roster's nonce in the Store.
tls::Mac mac_of(std::uint64_t name, std::string_view role, const std::array<shm::Nonce, 2>& nonces) {
  const std::array<std::uint64_t, 3> key{name, geteuid(), bootstrap::machine_id()};
  const auto bytes_of = [](const auto& words) {
    return std::span(reinterpret_cast<const std::uint8_t*>(words.data()), sizeof words);
  };
  return tls::hmac(bytes_of(key), {tls::bytes_of(role), bytes_of(nonces)});
}

tls::Mac mac_of(std::uint64_t name, std::string_view role, const shm::Packet& packet) {
  return mac_of(name, role, std::array{packet.nonce, packet.echo});
}

class RosterShelf final : public bootstrap::NodeShelf {
 public:
  ShelfClaim claim(std::uint64_t name) override {
    drop();
    int error = 0;
    listener_ = shm::listen_on(roster_socket_name(name), kBacklog, error);
    name_ = name;
    if (listener_) return ShelfClaim::kOurs;
    return error == EADDRINUSE ? ShelfClaim::kOthers : ShelfClaim::kNone;
  }

  void put(std::uint64_t /*name*/, std::span<const std::uint8_t> value) override {
    is_put_ = true;
    {
      const core::ForkLock lock;
      memory_ = core::Descriptor(lock, memfd_create("hybridps-roster", MFD_CLOEXEC));
    }
    for (std::size_t done = 0; memory_ && done < value.size();) {
      const ssize_t written = write(memory_.get(), value.data() + done, value.size() - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) memory_.reset();  // no memory: the others are sent away
      done += static_cast<std::size_t>(written);
    }
    serve();
  }

  void serve() override {
    int error = 0;
    int pid = 0;
    while (listener_ && readers_.size() < kReadersMax) {
      ShelfReader reader{shm::accept_from(listener_.get(), error), shm::draw_nonce(), std::nullopt};
      if (!reader.socket) break;
      shm::Packet packet = shm::make_packet(shm::PacketKind::kMeet, {}, {});
      packet.nonce = reader.nonce;
      if (shm::is_same_user(reader.socket.get(), pid) && shm::send_packet(reader.socket.get(), packet))
        readers_.push_back(std::move(reader));
    }
    std::erase_if(readers_, [&](ShelfReader& reader) { return is_done_with(reader); });
  }

  std::optional<Bytes> look(std::uint64_t name) override {
    int error = 0;
    int pid = 0;
    if (!reading_ || reading_name_ != name) {
      if (std::exchange(reading_name_, name) != name) refusals_ = 0;
      proof_.reset();
      reading_ = shm::connect_to(roster_socket_name(name), error);
      if (!reading_)
        return error == EAGAIN || ++refusals_ < kRefusalsMax ? std::nullopt : std::optional<Bytes>(Bytes());
      if (!shm::is_same_user(reading_.get(), pid)) return give_up();
    }
    shm::Packet packet;
    std::array<core::Descriptor, shm::kDescriptorsMax> descriptors;
    if (!proof_) {
      const shm::Received met = shm::receive_packet(reading_.get(), packet, descriptors);
      if (met == shm::Received::kNothing) return std::nullopt;
      if (met != shm::Received::kPacket || packet.kind != shm::PacketKind::kMeet) return give_up();
      proof_ = shm::make_packet(shm::PacketKind::kProof, {}, {});
      proof_->nonce = shm::draw_nonce();
      proof_->echo = packet.nonce;
      proof_->mac = mac_of(name, kReaderRole, *proof_);
      if (!shm::send_packet(reading_.get(), *proof_)) return give_up();
    }
    const shm::Received received = shm::receive_packet(reading_.get(), packet, descriptors);
    if (received == shm::Received::kNothing) return std::nullopt;
    if (received != shm::Received::kPacket || packet.kind != shm::PacketKind::kHello ||
        !tls::is_equal(mac_of(name, kServerRole, *proof_), packet.mac.data()))
      return give_up();
    reading_.reset();
    return content_of(descriptors[0].get());
  }

  Bytes digest_of(std::span<const std::uint8_t> value) const override {
    const tls::Mac mac = tls::hmac({}, {tls::bytes_of("hybridps roster"), value});
    return {mac.begin(), mac.end()};
  }

  void clear(std::uint64_t /*name*/) override { drop(); }

 private:
  static constexpr std::string_view kReaderRole = "hybridps roster reader";
  static constexpr std::string_view kServerRole = "hybridps roster server";
  struct ShelfReader {
    core::Descriptor socket;
    shm::Nonce nonce{};
    std::optional<shm::Packet> proof;
  };

  Bytes give_up() {
    reading_.reset();
    return {};
  }

  /// What was sent to a reader stays there until the reader takes it.
  bool is_done_with(ShelfReader& reader) const {
    if (!reader.proof) {
      shm::Packet packet;
      std::array<core::Descriptor, shm::kDescriptorsMax> descriptors;
      const shm::Received received = shm::receive_packet(reader.socket.get(), packet, descriptors);
      if (received == shm::Received::kNothing) return false;
      if (received != shm::Received::kPacket || packet.kind != shm::PacketKind::kProof || packet.echo != reader.nonce ||
          !tls::is_equal(mac_of(name_, kReaderRole, packet), packet.mac.data()))
        return true;
      reader.proof = packet;
    }
    if (!is_put_) return false;
    shm::Packet packet = shm::make_packet(shm::PacketKind::kHello, {}, {});
    packet.mac = mac_of(name_, kServerRole, *reader.proof);
    const int memory = memory_.get();
    if (memory_) shm::send_packet(reader.socket.get(), packet, std::span(&memory, 1));
    return true;
  }

  void drop() {
    listener_.reset();
    readers_.clear();
    memory_.reset();
    is_put_ = false;
  }

  static Bytes content_of(int memory) {
    struct stat about{};
    if (memory < 0 || fstat(memory, &about) != 0 || !S_ISREG(about.st_mode) || about.st_size > kBytesMax) return {};
    Bytes value(static_cast<std::size_t>(about.st_size));
    for (std::size_t done = 0; done < value.size();) {
      // All readers share the file's position.
      const ssize_t got = pread(memory, value.data() + done, value.size() - done, static_cast<off_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return {};
      done += static_cast<std::size_t>(got);
    }
    return value;
  }

  std::uint64_t name_ = 0;
  core::Descriptor listener_;  // of the rank that has claimed the name
  core::Descriptor memory_;
  bool is_put_ = false;
  std::vector<ShelfReader> readers_;  // not answered yet

  std::uint64_t reading_name_ = 0;
  core::Descriptor reading_;
  std::optional<shm::Packet> proof_;  // sent there
  int refusals_ = 0;
};

}  // namespace

std::string roster_socket_name(std::uint64_t nonce) {
  const tls::Mac mac = mac_of(nonce, "hybridps roster name", std::array<shm::Nonce, 2>{});
  std::string name = "hybridps-roster-";
  for (const std::uint8_t byte : std::span(mac).first(16)) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

std::unique_ptr<bootstrap::NodeShelf> roster_shelf() { return std::make_unique<RosterShelf>(); }

}  // namespace hybridps::engine
