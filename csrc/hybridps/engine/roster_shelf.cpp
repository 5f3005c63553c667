#include "hybridps/engine/roster_shelf.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/descriptor.h"
#include "hybridps/core/ids.h"
#include "hybridps/intranode/shm/handshake.h"

namespace hybridps::engine {
namespace {

namespace shm = intranode::shm;
using bootstrap::Bytes;

constexpr int kBacklog = 1024;
constexpr off_t kBytesMax = off_t{1} << 30;
// The socket of a rank that has just claimed it does not listen yet.
constexpr int kRefusalsMax = 20;

class RosterShelf final : public bootstrap::NodeShelf {
 public:
  ShelfClaim claim(std::uint64_t name) override {
    drop();
    int error = 0;
    listener_ = shm::listen_on(socket_name(name), kBacklog, error);
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
    while (listener_) {
      core::Descriptor reader = shm::accept_from(listener_.get(), error);
      if (!reader) break;
      if (shm::is_same_user(reader.get(), pid)) readers_.push_back(std::move(reader));
    }
    if (!is_put_) return;
    const shm::Packet packet = shm::make_packet(shm::PacketKind::kHello, {}, core::EngineId{name_});
    for (const core::Descriptor& reader : readers_) {
      const int memory = memory_.get();
      if (memory_) shm::send_packet(reader.get(), packet, std::span(&memory, 1));
    }
    readers_.clear();  // what was sent stays there until it is read
  }

  std::optional<Bytes> look(std::uint64_t name) override {
    int error = 0;
    int pid = 0;
    if (!reading_ || reading_name_ != name) {
      if (std::exchange(reading_name_, name) != name) refusals_ = 0;
      reading_ = shm::connect_to(socket_name(name), error);
      if (!reading_)
        return error == EAGAIN || ++refusals_ < kRefusalsMax ? std::nullopt : std::optional<Bytes>(Bytes());
      if (!shm::is_same_user(reading_.get(), pid)) return Bytes();
    }
    shm::Packet packet;
    std::array<core::Descriptor, shm::kDescriptorsMax> descriptors;
    const shm::Received received = shm::receive_packet(reading_.get(), packet, descriptors);
    if (received == shm::Received::kNothing) return std::nullopt;
    reading_.reset();
    if (received != shm::Received::kPacket || packet.to != name) return Bytes();
    return content_of(descriptors[0].get());
  }

  void clear(std::uint64_t /*name*/) override { drop(); }

 private:
  static std::string socket_name(std::uint64_t name) {
    return "hybridps-roster-" + core::to_string(core::EngineId{name});
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
  std::vector<core::Descriptor> readers_;  // not answered yet

  std::uint64_t reading_name_ = 0;
  core::Descriptor reading_;
  int refusals_ = 0;
};

}  // namespace

std::unique_ptr<bootstrap::NodeShelf> roster_shelf() { return std::make_unique<RosterShelf>(); }

}  // namespace hybridps::engine
