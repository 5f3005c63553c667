// The tests of ../*.cpp on CudaDevice, whose driver checks its caller and does the work on the tests' FakeDevices.
#include <numeric>

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
  int together = 0;
  for (const auto& [kind, times] : counts) {
    text += kind + " " + std::to_string(times) + ", ";
    together += times;
  }
  return text + std::to_string(together) + " in all";
}

/// The text of calls_for() for an operation of `slices`.
std::string with(int batches, int copies, int records, int slices, int events) {
  const auto text = [](const char* kind, int times) {
    return times > 0 ? kind + std::string(" ") + std::to_string(times) + ", " : "";
  };
  return text("ask for a capture", 1) + text("batch of copies", batches) + text("copy", copies) +
         text("record", records) + text("wait for a flag", slices) + text("wait for an event", events) +
         text("write a flag", slices + 1) +
         std::to_string(1 + batches + copies + records + slices + events + slices + 1) + " in all";
}

/// A call on 100 tensors of `count` elements for each rank, as a coalesced one is.
worker::Operation on_100_tensors(Kind kind, Values& values, std::size_t size, std::size_t count) {
  constexpr std::size_t kTensors = 100;
  worker::Operation o;
  o.kind = kind;
  const std::size_t ranks = kind == Kind::kAllReduce ? 1 : size;
  values.resize((ranks + 1) * kTensors * count);
  std::vector<worker::Piece> whole;  // rank by rank, each with its part of all tensors
  std::vector<worker::Piece> part;
  for (std::size_t r = 0; r < ranks; ++r)
    for (std::size_t t = 0; t < kTensors; ++t) whole.push_back(piece(values, (t * ranks + r) * count, count));
  for (std::size_t t = 0; t < kTensors; ++t) part.push_back(piece(values, (ranks * kTensors + t) * count, count));
  const std::vector<std::uint64_t> bytes(size, kTensors * count * sizeof(std::int32_t));
  if (kind == Kind::kAllGather) {
    o.input = part;
    o.output = whole;
    o.output_bytes = bytes;
  } else {
    o.op = core::ReduceOp::kSum;
    if (kind == Kind::kReduceScatter) o.input_bytes = bytes;
    if (kind == Kind::kReduceScatter) o.input = whole;
    o.output = kind == Kind::kReduceScatter ? part : whole;
  }
  return o;
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
  // Parts are in two pieces.
  CHECK(of_kind(Kind::kBarrier, 0) == with(0, 0, 3, 1, 2));
  CHECK(of_kind(Kind::kAllReduce, 100) == with(2, 0, 3, 1, 2));
  CHECK(of_kind(Kind::kBroadcast, 100) == with(1, 0, 3, 1, 2));
  CHECK(of_kind(Kind::kAllGather, 100) == with(1, 1, 3, 1, 2));
  CHECK(of_kind(Kind::kReduceScatter, 100) == with(2, 0, 3, 1, 2));
  CHECK(of_kind(Kind::kAllToAll, 100) == with(2, 0, 3, 1, 2));
  std::vector<Values> values(2);
  const auto coalesced = [&](std::size_t count) {
    return calls_for(all, [&, count](int rank) {
      return on_100_tensors(Kind::kAllReduce, values[static_cast<std::size_t>(rank)], 2, count);
    });
  };
  CHECK(coalesced(10) == with(2, 0, 3, 1, 2));
  // Five slices, as of 64 MiB (slices_test.cpp), which wait for the operation whose place they take. The tensor's two
  // pieces meet in one of them.
  CHECK(of_kind(Kind::kAllReduce, 100000) == with(2, 8, 3, 5, 3));
  CHECK(coalesced(1000) == with(10, 0, 3, 5, 3));
}

TEST_CASE("staging/cuda: a coalesced call makes no more calls of the driver with 16 ranks", "[staging][fast]") {
  constexpr std::size_t kRanks = 16;
  std::vector<int> node_of(kRanks);
  std::iota(node_of.begin(), node_of.end(), 0);
  ClusterThread cluster(nodes(node_of, 72));
  ChannelOptions options = small();
  options.limits.slice_bytes = 64 << 10;
  // A batch is one launch to CUDA, and a task for each copy to a FakeDevice, whose queues are finite.
  const auto gpu = [](int rank) {
    FakeOptions fake_options = fake(7200 + static_cast<std::uint64_t>(rank), 2);
    fake_options.launches_max = 100'000;
    return fake_options;
  };
  auto all = ranks_with(cluster, gpu, options);
  std::vector<Values> values(kRanks);
  for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter}) {
    const auto coalesced = [&](std::size_t count) {
      return calls_for(all, [&, count](int rank) {
        return on_100_tensors(kind, values[static_cast<std::size_t>(rank)], kRanks, count);
      });
    };
    CHECK(coalesced(2) == with(5, 0, 3, 1, 2));  // 1,600 pieces one way are four lists of 512 at most
    CHECK(coalesced(64) == with(10, 0, 3, 5, 3));
  }
}

#if CUDA_VERSION >= 12080
TEST_CASE("staging/cuda: a driver before CUDA 12.8 takes a call for each piece", "[staging][fast]") {
  checked().set_batches(false);
  {
    ClusterThread cluster(nodes({0, 1}, 73));
    auto all = ranks(cluster, 73, 8);
    std::vector<Values> values(2);
    const auto operation = [&](int rank) {
      return on_100_tensors(Kind::kAllReduce, values[static_cast<std::size_t>(rank)], 2, 10);
    };
    CHECK(calls_for(all, operation) == with(0, 200, 3, 1, 2));
  }
  checked().set_batches(true);
}
#endif

}  // namespace
