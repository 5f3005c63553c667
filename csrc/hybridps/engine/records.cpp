#include "hybridps/engine/records.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

namespace hybridps::engine {
namespace {

template <typename To, typename From>
To bytes_as(const From& from) {
  static_assert(sizeof(typename To::value_type) == 1 && sizeof(typename From::value_type) == 1);
  const auto* begin = reinterpret_cast<const typename To::value_type*>(from.data());
  return To(begin, begin + from.size());
}

}  // namespace

bootstrap::Bytes to_record(const std::vector<std::byte>& address) { return bytes_as<bootstrap::Bytes>(address); }

std::vector<std::byte> to_transport(const bootstrap::Bytes& address) {
  return bytes_as<std::vector<std::byte>>(address);
}

PeerRecord peer_record(const bootstrap::MemberRecord& member, std::string where, bool local) {
  PeerRecord peer;
  peer.engine = member.engine;
  peer.local = local;
  peer.data_address = to_transport(member.data_address);
  peer.control_address = to_transport(member.control_address);
  peer.shm_address = to_transport(member.shm_address);
  peer.where = std::move(where);
  peer.eager_bytes = member.eager_bytes;
  return peer;
}

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

core::Result<PrivatePool> map_pool(std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    return core::Status(core::Code::kOutOfResources, "cannot map " + std::to_string(bytes) + " bytes for messages");
  return PrivatePool{{static_cast<std::byte*>(mapped), bytes},
                     std::shared_ptr<void>(mapped, [bytes](void* at) { munmap(at, bytes); })};
}

}  // namespace hybridps::engine
