// The endpoint contract over UCX and the loopback interface.
#include <memory>

namespace hybridps::transport {
namespace contract {
struct Pair;
}
struct UcxBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
};
}  // namespace hybridps::transport

#define HYBRIDPS_ENDPOINT_BACKENDS ::hybridps::transport::UcxBackend
#include "tests/unit/transport/ucx/ucx_pair.h"

namespace hybridps::transport {

std::unique_ptr<contract::Pair> UcxBackend::make_pair() { return make_ucx_pair(); }

}  // namespace hybridps::transport
