// The state machine of dedicated servers: one or two of them beside three ranks; what is forged goes to them.
#include "hybridps/core/log.h"
#include "tests/fuzz/cluster_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps;
  static const bool quiet = (core::set_log_level(core::LogLevel::kError), true);
  static_cast<void>(quiet);
  fuzz::Feed feed(data, size);
  const std::vector<double> servers(1 + feed.below(2), 1.0);
  fuzz::Play(feed, {0, 1, 2}, servers, 3).run();
  return 0;
}
