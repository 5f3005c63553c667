// The state machines of ranks: flow, server and worker of two to four of them, on one to three nodes.
#include "hybridps/core/log.h"
#include "tests/fuzz/cluster_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps;
  static const bool quiet = (core::set_log_level(core::LogLevel::kError), true);
  static_cast<void>(quiet);
  fuzz::Feed feed(data, size);
  const std::vector<std::vector<int>> layouts = {{0, 1}, {0, 0}, {0, 0, 1}, {0, 1, 2}, {0, 0, 1, 1}};
  fuzz::Play(feed, layouts[feed.below(layouts.size())], {}, 0).run();
  return 0;
}
