// The tests of ../*.cpp on CudaDevice, whose driver checks its caller and does the work on the tests' FakeDevices.
#include "tests/support/checked_driver.h"
#include "tests/unit/staging/program.h"

namespace {

using namespace hybridps::test::program;
using hybridps::test::CheckedDriver;

/// Never destroyed: devices of all tests are on it.
CheckedDriver& checked() {
  static auto& driver = *new CheckedDriver(/*fails_at_once=*/true);
  return driver;
}

const bool set = [] {
  device_on = [](const std::shared_ptr<FakeDevice>& fake) -> std::shared_ptr<device::Device> {
    return checked().open(fake);
  };
  fake_of = [](const std::shared_ptr<device::Device>& device) { return checked().fake(device->index()); };
  return true;
}();

TEST_CASE("staging/cuda: a channel that goes while a graph is recorded does not spoil the graph", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 70));
  auto all = ranks(cluster, 70, 8);
  all[0].open(small());  // and never used: the driver's thread has made no call yet
  checked().begin_capture();
  all[0].others.clear();
  std::this_thread::sleep_for(50ms);
  CHECK(checked().end_capture());
}

/// "copy 2, record 3": calls of the driver that rank 0's caller makes for an operation whose like was there before.
/// Each takes a context and puts it back. That, and the making of events, is not counted.
std::string calls_for(std::vector<Rank>& all, const std::function<worker::Operation(int rank)>& operation) {
  std::map<std::string, int> counts;
  for (int turn = 0; turn < 6; ++turn) {  // rings have gone round, where operations are large
    std::vector<std::shared_ptr<Staged>> staged;
    for (Rank& rank : all) {
      const auto enqueue = [&] { staged.push_back(rank.enqueue(operation(rank.group->rank()))); };
      if (&rank == &all.front())
        counts = CheckedDriver::counted(enqueue);
      else
        enqueue();
      REQUIRE(staged.back());
    }
    for (const auto& s : staged) REQUIRE(eventually([&] { return s->is_over(); }));
  }
  for (const char* const kind : {"context", "create"}) counts.erase(kind);
  std::string text;
  for (const auto& [kind, times] : counts) text += (text.empty() ? "" : ", ") + kind + " " + std::to_string(times);
  return text;
}

// It promises no speed, but who makes an operation dearer sees it here.
TEST_CASE("staging/cuda: an operation makes no more calls of the driver than it did", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 71));
  auto all = ranks(cluster, 71, 8);
  std::vector<Part> parts;  // on the streams until the end
  const auto of_kind = [&](Kind kind, std::size_t count) {
    return calls_for(all, [&, kind, count](int rank) {
      parts.push_back(make(kind, rank, 2, count, 1));
      return parts.back().operation;
    });
  };
  const auto with = [](int copies, int records, int slices, int events) {
    const auto text = [](const char* kind, int times) { return kind + std::to_string(times); };
    return "ask for a capture 1, " + (copies > 0 ? text("copy ", copies) + ", " : "") + text("record ", records) +
           text(", wait for a flag ", slices) + text(", wait for an event ", events) +
           text(", write a flag ", slices + 1);
  };
  // Parts are in two pieces, and each piece is a copy.
  CHECK(of_kind(Kind::kBarrier, 0) == with(0, 3, 1, 2));
  CHECK(of_kind(Kind::kAllReduce, 100) == with(4, 3, 1, 2));
  CHECK(of_kind(Kind::kBroadcast, 100) == with(2, 3, 1, 2));
  CHECK(of_kind(Kind::kAllGather, 100) == with(4, 3, 1, 2));
  CHECK(of_kind(Kind::kReduceScatter, 100) == with(6, 3, 1, 2));
  CHECK(of_kind(Kind::kAllToAll, 100) == with(4, 3, 1, 2));
  // A coalesced call has a piece for each tensor.
  std::vector<Values> values(2, Values(1000));
  CHECK(calls_for(all, [&](int rank) {
          worker::Operation o;
          o.kind = Kind::kAllReduce;
          o.op = core::ReduceOp::kSum;
          for (std::size_t i = 0; i < 100; ++i)
            o.output.push_back(piece(values[static_cast<std::size_t>(rank)], 10 * i, 10));
          return o;
        }) == with(200, 3, 1, 2));
  // Five slices, as of 64 MiB (slices_test.cpp), which wait for the operation whose place they take.
  CHECK(of_kind(Kind::kAllReduce, 100000) == with(12, 3, 5, 3));
}

}  // namespace
