// The contract of every Transport, on shared memory, with roomy and with tiny rings.
#include <memory>

#include "hybridps/intranode/shm/shm_transport.h"

namespace hybridps::transport::contract {
struct Pair;
}
namespace hybridps::intranode::shm {
struct ShmBackend {
  static std::unique_ptr<transport::contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = false;  // it does, but tells a clean end (kClosed): peer_end_test.cpp
};
/// Everything beyond two messages waits in the heap.
struct TinyShmBackend {
  static std::unique_ptr<transport::contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = false;
};
}  // namespace hybridps::intranode::shm

#define HYBRIDPS_ENDPOINT_BACKENDS ::hybridps::intranode::shm::ShmBackend, ::hybridps::intranode::shm::TinyShmBackend
#include "tests/unit/intranode/shm/shm_sides.h"
#include "tests/unit/transport/endpoint_contract.h"

namespace hybridps::intranode::shm {

std::unique_ptr<transport::contract::Pair> ShmBackend::make_pair() {
  auto pair = std::make_unique<transport::contract::Pair>();
  open_side(pair->a);
  open_side(pair->b);
  return pair;
}

std::unique_ptr<transport::contract::Pair> TinyShmBackend::make_pair() {
  auto pair = std::make_unique<transport::contract::Pair>();
  ShmOptions options;
  options.ring_entries = 2;
  open_side(pair->a, options);
  open_side(pair->b, options);
  return pair;
}

}  // namespace hybridps::intranode::shm
