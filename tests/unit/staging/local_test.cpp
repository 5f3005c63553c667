#include "hybridps/staging/local.h"

#include <cstring>

#include "hybridps/reduce/sum.h"
#include "tests/support/captured_stderr.h"
#include "tests/support/clock.h"
#include "tests/unit/staging/program.h"

namespace {

using namespace hybridps::test::program;
using intranode::FakeLocalGroups;
using intranode::FakeLocalOptions;

TEST_CASE("staging/local: a library's own streams count among those that wait", "[staging][fast]") {
  if (device_on != nullptr) return;  // CudaDevice has the number from the environment
  for (const bool local : {false, true}) {
    test::CapturedStderr captured;
    {
      ClusterThread cluster(nodes({0, 0, 1, 1}, 40));
      FakeOptions device = fake(40);
      device.hardware_queues = 5;  // 2 streams and the program's 2, and 2 of the library
      const Hub hub = local ? FakeLocalGroups::make_hub() : nullptr;
      auto all = ranks_with(cluster, [&](int) { return device; }, small(), hub);
    }
    const std::string told = captured.finish();
    CHECK((told.find("CUDA_DEVICE_MAX_CONNECTIONS=5") != std::string::npos) == local);
  }
}

TEST_CASE("staging/local: on one node no stream waits for the network and nothing is told", "[staging][fast]") {
  if (device_on != nullptr) return;
  for (const auto& layout : {std::vector<int>{0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    test::CapturedStderr captured;
    {
      ClusterThread cluster(nodes(layout, 41));
      FakeOptions device = fake(41);
      device.hardware_queues = 1;
      auto all = ranks_with(cluster, [&](int) { return device; }, small(), FakeLocalGroups::make_hub());
    }
    CHECK((captured.finish().find("CUDA_DEVICE_MAX_CONNECTIONS=1") != std::string::npos) == (layout.size() == 4));
  }
}

TEST_CASE("staging/local: the library's first use makes no call that waits, and what it needs is there for the next",
          "[staging][fast]") {
  ClusterThread cluster(nodes({0, 0, 1, 1}, 42));
  const Hub hub = FakeLocalGroups::make_hub();
  FakeLocalOptions library;
  library.has_first_use = true;
  ChannelOptions options = small();
  options.local = local_of(hub, library);
  auto all = ranks(cluster, 42, 8, options);
  connect(all);
  for (const Rank& rank : all) CHECK(rank.refused.to_string() == "ok");
  CHECK(FakeLocalGroups::calls(*hub) == 8);  // each rank on each leg
  std::vector<std::size_t> streams;
  std::vector<device::DeviceStream> busy;
  for (const Rank& rank : all) {
    busy.push_back(rank.gpu->make_stream().value());
    streams.push_back(rank.gpu->streams());
  }
  for (int round = 0; round < 3; ++round) {
    // Work that waits for the host: a free or the end of a stream would wait for it, too.
    std::atomic<bool> go{false};
    for (std::size_t r = 0; r < all.size(); ++r) {
      Rank& rank = all[r];
      rank.others = {rank.stager->open(rank.accelerator, rank.group, options).value()};
      rank.gpu->launch(busy[r], [&] {
        while (!go.load()) std::this_thread::sleep_for(1ms);
      });
    }
    std::atomic<int> connected{0};
    std::vector<std::thread> threads;
    for (Rank& rank : all)
      threads.emplace_back([&] {
        const bool is_ok = rank.others[0]->connect(0ms).is_ok();
        connected += is_ok ? 1 : 0;
      });
    // The first round may allocate what the pool lacks, which waits.
    if (round > 0) CHECK(eventually([&] { return connected.load() == 4; }));
    go.store(true);
    for (std::thread& thread : threads) thread.join();
    CHECK(connected.load() == 4);
    for (std::size_t r = 0; r < all.size(); ++r) {
      all[r].gpu->synchronize(busy[r]);
      all[r].others.clear();
    }
    // Until their channels' remains are in the pool again.
    for (std::size_t r = 0; r < all.size(); ++r) CHECK(eventually([&] { return all[r].gpu->is_idle(); }));
    std::this_thread::sleep_for(50ms);
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    CHECK(all[r].gpu->streams() <= streams[r] + 3);
    all[r].gpu->destroy(busy[r]);
  }
}

TEST_CASE("staging/local: programs that never wait get every collective's result in stream order", "[staging][fast]") {
  std::uint64_t seed = 50;
  const std::vector<int> layouts[] = {{0, 0},       {0, 0, 0},       {0, 0, 1, 1},          {0, 0, 0, 1},
                                      {0, 1, 0, 1}, {0, 0, 1, 1, 2}, {0, 0, 0, 0, 1, 1, 1}, {1, 0, 0, 0, 1}};
  for (const auto& layout : layouts) {
    for (const int queues : {1, 8, 32}) {
      const Hub hub = FakeLocalGroups::make_hub();
      run_program(layout, queues, seed++, 14, hub);
      CHECK(FakeLocalGroups::mismatches(*hub) == 0);
      CHECK(FakeLocalGroups::calls(*hub) > 0);
      CHECK(FakeLocalGroups::is_one_order(*hub));
    }
  }
}

TEST_CASE("staging/local: slices larger than the reserve keep one order of calls on all ranks", "[staging][fast]") {
  for (const int queues : {1, 8}) {
    ClusterOptions large = nodes({0, 0, 0, 1, 1}, 5);
    large.chunk_bytes = 16 << 10;
    large.eager_bytes = 64 << 10;
    ClusterThread cluster(large);
    const Hub hub = FakeLocalGroups::make_hub();
    ChannelOptions options;
    options.limits.slice_bytes = 64 << 10;
    options.staging_bytes_max = std::uint64_t{1} << 20;
    auto all = ranks(cluster, 5, queues, options, hub);
    std::vector<Part> parts;
    std::vector<std::shared_ptr<Staged>> staged;
    constexpr Kind kTurns[] = {Kind::kAllReduce, Kind::kGather, Kind::kAllGather, Kind::kReduceScatter,
                               Kind::kAllReduce};
    for (std::uint32_t turn = 0; turn < std::size(kTurns); ++turn) {
      for (Rank& rank : all) {
        const std::size_t count = kTurns[turn] == Kind::kAllReduce ? 1000003 : 200000;
        parts.push_back(make(kTurns[turn], rank.group->rank(), 5, count, turn));
        *parts.back().output = parts.back().given_output;
        *parts.back().input = parts.back().given_input;
        staged.push_back(rank.enqueue(parts.back().operation));
        REQUIRE(staged.back());
      }
    }
    for (const auto& s : staged) REQUIRE(s->wait(core::Clock::now() + kLong));
    for (Rank& rank : all)
      REQUIRE(eventually([&] { return rank.over->load() == static_cast<int>(std::size(kTurns)); }));
    for (const auto& s : staged) CHECK(s->status().to_string() == "ok");
    for (const Part& part : parts) REQUIRE((*part.output == part.expected));
    CHECK(FakeLocalGroups::is_one_order(*hub));
    CHECK(FakeLocalGroups::mismatches(*hub) == 0);
  }
}

TEST_CASE("staging/local: an operation of many slices is one launch before them and one after", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 0, 1, 1}, 6));
  const Hub hub = FakeLocalGroups::make_hub();
  auto all = ranks(cluster, 6, 8, small(), hub);
  const struct {
    Kind kind;
    int calls;  // of the four ranks
  } cases[] = {{Kind::kAllReduce, 8}, {Kind::kReduceScatter, 4}, {Kind::kAllGather, 4}, {Kind::kBroadcast, 4}};
  std::uint32_t turn = 0;
  for (const auto& c : cases) {
    INFO(schedule::name_of(c.kind));
    const int before = FakeLocalGroups::calls(*hub);
    std::vector<Part> parts;
    for (Rank& rank : all) {
      parts.push_back(make(c.kind, rank.group->rank(), 4, 40000, turn));  // several slices
      *parts.back().output = parts.back().given_output;
      *parts.back().input = parts.back().given_input;
      REQUIRE(rank.enqueue(parts.back().operation));
    }
    ++turn;
    for (Rank& rank : all) REQUIRE(eventually([&] { return rank.over->load() == static_cast<int>(turn); }));
    CHECK(FakeLocalGroups::calls(*hub) - before == c.calls);
    for (const Part& part : parts) CHECK((*part.output == part.expected));
  }
}

/// Element `i` of rank `r`: small, so that sums are exact in every type.
std::vector<std::byte> elements(core::DType dtype, int rank, std::size_t count) {
  std::vector<std::byte> bytes(count * core::size_of(dtype));
  // From int8 or float, by way of the kernels: a sum of one input, scaled.
  for (std::size_t i = 0; i < count; ++i) {
    const int value = 4 * (1 + (static_cast<int>(i) + rank) % 3);
    std::byte* at = bytes.data() + i * core::size_of(dtype);
    const auto put = [&](auto v) { std::memcpy(at, &v, sizeof v); };
    switch (dtype) {
      case core::DType::kUint8: put(static_cast<std::uint8_t>(value)); break;
      case core::DType::kInt8: put(static_cast<std::int8_t>(value)); break;
      case core::DType::kInt16:
      case core::DType::kUint16: put(static_cast<std::int16_t>(value)); break;
      case core::DType::kInt32:
      case core::DType::kUint32: put(static_cast<std::int32_t>(value)); break;
      case core::DType::kInt64:
      case core::DType::kUint64: put(static_cast<std::int64_t>(value)); break;
      case core::DType::kFloat16:
        put(static_cast<std::uint16_t>(value == 4 ? 0x4400 : value == 8 ? 0x4800 : 0x4a00));
        break;
      case core::DType::kBfloat16:
        put(static_cast<std::uint16_t>(value == 4 ? 0x4080 : value == 8 ? 0x4100 : 0x4140));
        break;
      case core::DType::kFloat32: put(static_cast<float>(value)); break;
      case core::DType::kFloat64: put(static_cast<double>(value)); break;
      case core::DType::kComplex64: put(static_cast<float>(value)); break;
      case core::DType::kComplex128: put(static_cast<double>(value)); break;
      case core::DType::kBool: put(static_cast<std::uint8_t>(value == 4)); break;
      default: put(static_cast<std::uint8_t>(0x40)); break;  // float8: one value in each of its kinds
    }
  }
  return bytes;
}

TEST_CASE("staging/local: every type and operation has the result that it has without", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 0, 0, 1}, 8));
  const Hub hub = FakeLocalGroups::make_hub();
  auto with = ranks(cluster, 8, 8, small(), hub);
  ClusterThread other(nodes({0, 0, 0, 1}, 8));
  auto without = ranks(other, 8, 8);
  int by_library = 0;
  for (unsigned d = 0; d < core::kDTypeCount; ++d) {
    for (unsigned p = 0; p < core::kReduceOpCount; ++p) {
      const auto dtype = static_cast<core::DType>(d);
      const auto op = static_cast<core::ReduceOp>(p);
      if (!core::is_reducible(dtype, op)) continue;
      for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kReduce}) {
        INFO(core::name_of(dtype) << " " << core::name_of(op) << " " << schedule::name_of(kind));
        constexpr std::size_t kCount = 4 * 1100;
        const int before = FakeLocalGroups::calls(*hub);
        std::vector<std::vector<std::byte>> results;
        for (auto* side : {&with, &without}) {
          std::vector<std::vector<std::byte>> in;
          std::vector<std::vector<std::byte>> out;
          std::vector<std::shared_ptr<Staged>> staged;
          for (Rank& rank : *side) {
            in.push_back(elements(dtype, rank.group->rank(), kCount));
            const std::size_t all = in.back().size();
            out.push_back(kind == Kind::kAllReduce ? in.back()
                                                   : std::vector<std::byte>(kind == Kind::kReduce ? all : all / 4));
          }
          for (Rank& rank : *side) {
            const auto r = static_cast<std::size_t>(rank.group->rank());
            worker::Operation o;
            o.kind = kind;
            o.dtype = dtype;
            o.op = op;
            o.premul = op == core::ReduceOp::kPremulSum ? 0.5 * static_cast<double>(1 + r % 2) : 1.0;
            if (kind != Kind::kAllReduce) o.input = {{in[r].data(), in[r].size()}};
            if (kind != Kind::kReduce || r == 1) o.output = {{out[r].data(), out[r].size()}};
            if (kind == Kind::kReduceScatter) o.input_bytes.assign(4, in[r].size() / 4);
            if (kind == Kind::kReduce) o.root = 1;
            staged.push_back(rank.enqueue(o));
            REQUIRE(staged.back());
          }
          for (const auto& s : staged) {
            REQUIRE(eventually([&] { return s->is_over(); }));
            REQUIRE(s->status().to_string() == "ok");
          }
          for (std::size_t r = 0; r < out.size(); ++r)
            if (kind != Kind::kReduce || r == 1) results.push_back(out[r]);
        }
        const std::size_t half = results.size() / 2;
        for (std::size_t r = 0; r < half; ++r) REQUIRE((results[r] == results[half + r]));
        if (FakeLocalGroups::calls(*hub) != before) ++by_library;
      }
    }
  }
  CHECK(by_library > 100);
}

TEST_CASE("staging/local: ranks that cannot have it all go through shared memory", "[staging][fast]") {
  struct Case {
    const char* what;
    bool warns;  // where each rank has a card of its own, it is a loss
    std::function<void(int rank, ChannelOptions&, FakeOptions&, const Hub&)> change;
  };
  const Case cases[] = {
      {"no library on rank 2", true,
       [](int r, ChannelOptions& o, FakeOptions&, const Hub&) {
         if (r == 2) o.local = staging::LocalOptions{nullptr, "not found", false};
       }},
      {"switched off", false,
       [](int, ChannelOptions& o, FakeOptions&, const Hub&) {
         o.local = staging::LocalOptions{nullptr, "switched off", false, true};
       }},
      {"a shared card", false,
       [](int, ChannelOptions&, FakeOptions& f, const Hub&) { f.physical_id = "0000:01:00.0"; }},
      {"other libraries", true,
       [](int r, ChannelOptions& o, FakeOptions&, const Hub& hub) {
         o.local = local_of(hub, FakeLocalOptions{"fake " + std::to_string(r), false});
       }},
  };
  for (const Case& c : cases) {
    INFO(c.what);
    test::CapturedStderr captured;
    ClusterThread cluster(nodes({0, 0, 1, 1}, 3));
    const Hub hub = FakeLocalGroups::make_hub();
    std::vector<Rank> all;
    for (auto& group : ClusterGroup::open(cluster)) {
      ChannelOptions options = small();
      options.local = local_of(hub);
      FakeOptions card = fake(static_cast<std::uint64_t>(group->rank()));
      c.change(group->rank(), options, card, hub);
      all.emplace_back(group, card, options);
    }
    connect(all);
    std::vector<Part> parts;
    for (Rank& rank : all) {
      CHECK(rank.refused.to_string() == "ok");
      CHECK_FALSE(rank.channel->has_local());
      parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 4, 5000, 1));
      *parts.back().output = parts.back().given_output;
      REQUIRE(rank.enqueue(parts.back().operation));
    }
    for (Rank& rank : all) REQUIRE(eventually([&] { return rank.over->load() == 1; }));
    for (const Part& part : parts) CHECK((*part.output == part.expected));
    CHECK(FakeLocalGroups::calls(*hub) == 0);
    const std::string log = captured.finish();
    CHECK((log.find("go through shared memory inside the nodes") != std::string::npos) == c.warns);
  }
}

TEST_CASE("staging/local: of several reasons the first is told", "[staging][fast]") {
  test::CapturedStderr captured;
  ClusterThread cluster(nodes({0, 0}, 3));
  std::vector<Rank> all;
  for (auto& group : ClusterGroup::open(cluster)) {
    ChannelOptions options = small();
    options.local = staging::LocalOptions{nullptr, "no library was found", true};
    all.emplace_back(group, fake(1), options);
    all.back().gpu->break_down("a card that does not say which it is");
  }
  connect(all);
  const std::string log = captured.finish();
  INFO(log);
  CHECK(log.find("rank 0: no library was found") != std::string::npos);
  CHECK(log.find("a card that does not say") == std::string::npos);
}

TEST_CASE("staging/local: a library that fails on one rank is left alone by all", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 0, 1, 1}, 3));
  const Hub hub = FakeLocalGroups::make_hub();
  std::vector<Rank> all;
  for (auto& group : ClusterGroup::open(cluster)) {
    ChannelOptions options = small();
    options.local = local_of(hub, FakeLocalOptions{"fake library 1", group->rank() == 3});
    all.emplace_back(group, fake(static_cast<std::uint64_t>(group->rank())), options);
  }
  connect(all, 2s);  // its neighbour waits for it, for half of that
  std::vector<Part> parts;
  for (Rank& rank : all) {
    CHECK(rank.refused.to_string() == "ok");
    CHECK_FALSE(rank.channel->has_local());
    parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 4, 5000, 1));
    *parts.back().output = parts.back().given_output;
    REQUIRE(rank.enqueue(parts.back().operation));
  }
  for (Rank& rank : all) REQUIRE(eventually([&] { return rank.over->load() == 1; }));
  for (const Part& part : parts) CHECK((*part.output == part.expected));
}

TEST_CASE("staging/local: channels connect before the first collective or with it", "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1}}) {
    for (const bool before : {true, false}) {
      ClusterThread cluster(nodes(layout, 3));
      const Hub hub = FakeLocalGroups::make_hub();
      std::vector<Rank> all;
      for (auto& group : ClusterGroup::open(cluster)) {
        ChannelOptions options = small();
        options.local = local_of(hub);
        all.emplace_back(group, fake(static_cast<std::uint64_t>(group->rank())), options);
      }
      for (const Rank& rank : all) CHECK_FALSE(rank.channel->has_local());
      if (before) {
        for (int twice = 0; twice < 2; ++twice) {
          connect(all);
          for (const Rank& rank : all) CHECK(rank.refused.to_string() == "ok");
        }
        for (const Rank& rank : all) CHECK(rank.channel->has_local());
        CHECK(FakeLocalGroups::calls(*hub) == 0);
      }
      std::vector<Part> parts;
      for (Rank& rank : all) {
        parts.push_back(make(Kind::kAllToAll, rank.group->rank(), cluster.size(), 500, 1));
        *parts.back().input = parts.back().given_input;
      }
      std::vector<std::shared_ptr<Staged>> staged(all.size());
      if (before) {  // nobody waits in the call: one after the other
        for (std::size_t r = 0; r < all.size(); ++r) staged[r] = all[r].enqueue(parts[r].operation);
      } else {
        std::vector<std::thread> threads;
        for (std::size_t r = 0; r < all.size(); ++r)
          threads.emplace_back([&, r] { staged[r] = all[r].enqueue(parts[r].operation); });
        for (std::thread& thread : threads) thread.join();
      }
      for (std::size_t r = 0; r < all.size(); ++r) {
        REQUIRE(staged[r]);
        REQUIRE(eventually([&] { return staged[r]->is_over(); }));
        CHECK((*parts[r].output == parts[r].expected));
        CHECK(all[r].channel->has_local());
      }
    }
  }
}

TEST_CASE("staging/local: of what stays on one node the engine has the witness alone", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 0}, 3));
  const Hub hub = FakeLocalGroups::make_hub();
  auto all = ranks(cluster, 4, 8, small(), hub);
  const std::uint64_t before = all[0].group->sequence_submitted();
  std::vector<Part> parts;
  for (Rank& rank : all) {
    parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, 20000, 1));
    REQUIRE(rank.enqueue(parts.back().operation));
  }
  for (Rank& rank : all) {
    REQUIRE(eventually([&] { return rank.over->load() == 1; }));
    CHECK(rank.group->sequence_submitted() == before + 1);
  }
}

TEST_CASE("staging/local: a rank that does not connect is named", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 0, 1}, 3));
  const Hub hub = FakeLocalGroups::make_hub();
  std::vector<Rank> all;
  for (auto& group : ClusterGroup::open(cluster)) {
    ChannelOptions options = small();
    options.local = local_of(hub);
    all.emplace_back(group, fake(static_cast<std::uint64_t>(group->rank())), options);
  }
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < 2; ++r)
    threads.emplace_back([&rank = all[r]] { rank.refused = rank.channel->connect(3s); });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t r = 0; r < 2; ++r) {
    INFO(all[r].refused.to_string());
    CHECK(all[r].refused.to_string().find("rank 2 (host2)") != std::string::npos);
    CHECK_FALSE(all[r].channel->connect(3s).is_ok());
  }
}

/// Every rank's first failure.
std::vector<std::string> failures(std::vector<Rank>& all, const std::vector<std::shared_ptr<Staged>>& staged) {
  std::vector<std::string> texts;
  for (const auto& s : staged) {
    if (!s) continue;
    REQUIRE(eventually([&] { return s->has_failed(); }));
    REQUIRE(eventually([&] { return s->is_over(); }));  // no stream hangs
    texts.push_back(s->status().to_string());
  }
  for (Rank& rank : all) CHECK(eventually([&] { return !rank.group->status().is_ok(); }));
  return texts;
}

TEST_CASE("staging/local: ranks of a node that mean to exchange different sizes are told", "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    for (const Kind kind : {Kind::kAllToAll, Kind::kGather, Kind::kScatter}) {
      INFO(schedule::name_of(kind) << " of " << layout.size());
      ClusterThread cluster(nodes(layout, 3));
      const Hub hub = FakeLocalGroups::make_hub();
      std::vector<Part> parts;  // what was refused may be on the streams in part, until they end
      auto all = ranks(cluster, 4, 8, small(), hub);
      std::vector<std::shared_ptr<Staged>> staged;
      for (Rank& rank : all) {
        const int r = rank.group->rank();
        parts.push_back(make(kind, r, cluster.size(), 5000, 2 * static_cast<std::uint32_t>(cluster.size())));  // root 0
        worker::Operation& o = parts.back().operation;
        if (r == 1 && kind == Kind::kAllToAll) {  // 4 bytes for rank 2 go to rank 0
          o.input_bytes[0] += 4;
          o.input_bytes[2] -= 4;
        } else if (r == 1) {
          (kind == Kind::kGather ? o.input : o.output).front().bytes -= 4;
        }
        staged.push_back(rank.enqueue(o));
        if (!staged.back()) CHECK(rank.refused.to_string().find("ranks disagree") != std::string::npos);
      }
      for (const std::string& text : failures(all, staged)) {
        INFO(text);
        CHECK(text.find("ranks disagree") != std::string::npos);
        CHECK(text.find("with other sizes per rank") != std::string::npos);
      }
    }
  }
}

TEST_CASE("staging/local: ranks that call different operations are told", "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    for (const Kind others : {Kind::kAllReduce, Kind::kBroadcast, Kind::kAllToAll, Kind::kScatter}) {
      const bool sizes = others == Kind::kAllReduce;
      ClusterThread cluster(nodes(layout, 3));
      const Hub hub = FakeLocalGroups::make_hub();
      std::vector<Part> parts;  // what was refused may be on the streams in part, until they end
      auto all = ranks(cluster, 4, 8, small(), hub);
      std::vector<std::shared_ptr<Staged>> staged;
      for (Rank& rank : all) {
        const bool odd = rank.group->rank() == 1;
        parts.push_back(make(sizes || !odd ? Kind::kAllReduce : others, rank.group->rank(), cluster.size(),
                             sizes && odd ? 5001 : 5000, 1));
        staged.push_back(rank.enqueue(parts.back().operation));
        // Told that early, it may be refused.
        if (!staged.back()) CHECK(rank.refused.to_string().find("ranks disagree") != std::string::npos);
      }
      for (const std::string& text : failures(all, staged)) {
        INFO(text);
        CHECK(text.find("ranks disagree") != std::string::npos);
      }
    }
  }
}

TEST_CASE("staging/local: a rank that never calls is named after the timeout", "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    ClusterThread cluster(nodes(layout, 3));
    const Hub hub = FakeLocalGroups::make_hub();
    auto all = ranks(cluster, 4, 8, small(), hub);
    std::vector<Part> parts;
    std::vector<std::shared_ptr<Staged>> staged;
    for (Rank& rank : all) {
      if (rank.group->rank() == 1) continue;
      parts.push_back(make(Kind::kAllReduce, rank.group->rank(), cluster.size(), 5000, 1));
      parts.back().operation.timeout = 3s;
      staged.push_back(rank.enqueue(parts.back().operation));
      REQUIRE(staged.back());
    }
    for (const std::string& text : failures(all, staged)) {
      INFO(text);
      CHECK(text.find("without rank 1 (host1)") != std::string::npos);
    }
    // The next call says so.
    CHECK_FALSE(all.front().enqueue(parts.front().operation));
  }
}

TEST_CASE("staging/local: a stream that does not come to the operation ends it on all ranks", "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    ClusterThread cluster(nodes(layout, 3));
    const Hub hub = FakeLocalGroups::make_hub();
    auto all = ranks(cluster, 4, 8, small(), hub);
    warm(all);
    std::atomic<bool> go{false};
    all[1].gpu->launch(all[1].caller, [&] {
      while (!go.load()) std::this_thread::sleep_for(1ms);
    });
    std::vector<Part> parts;
    std::vector<std::shared_ptr<Staged>> staged;
    for (Rank& rank : all) {
      parts.push_back(make(Kind::kAllReduce, rank.group->rank(), cluster.size(), 5000, 1));
      parts.back().operation.timeout = 300ms;
      staged.push_back(rank.enqueue(parts.back().operation));
      REQUIRE(staged.back());
    }
    for (const auto& s : staged) {
      INFO("rank " << &s - staged.data() << " of " << staged.size() << " " << s->status().to_string() << s->is_over());
      REQUIRE(eventually([&] { return s->has_failed(); }));
    }
    CHECK(staged[0]->status().to_string().find("timed out after 0.3 s") != std::string::npos);
    for (std::size_t r = 0; r < staged.size(); ++r)
      if (r != 1) CHECK(eventually([&] { return staged[r]->is_over(); }));
    go.store(true);
    CHECK(eventually([&] { return staged[1]->is_over(); }));
  }
}

TEST_CASE("staging/local: a dead rank of the same node or another is named and every stream goes on",
          "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 0, 0, 1}}) {
    for (const int queues : {1, 8}) {
      ClusterThread cluster(nodes(layout, 21));
      const Hub hub = FakeLocalGroups::make_hub();
      auto all = ranks(cluster, 22, queues, small(), hub);
      std::vector<Part> parts;
      std::vector<std::shared_ptr<Staged>> staged;
      for (std::uint32_t turn = 0; turn < 10; ++turn) {
        if (turn == 5) cluster.post([](Cluster& c) { c.kill(1); });
        for (Rank& rank : all) {
          const int r = rank.group->rank();
          if (turn >= 5 && r == 1) continue;
          constexpr Kind kTurns[] = {Kind::kAllReduce, Kind::kAllToAll, Kind::kAllGather, Kind::kReduceScatter,
                                     Kind::kGather,    Kind::kAllToAll, Kind::kScatter,   Kind::kBroadcast};
          parts.push_back(make(kTurns[turn % std::size(kTurns)], r, cluster.size(), 30000, turn));
          auto made = rank.enqueue(parts.back().operation);
          if (!made) continue;  // the group has failed already
          REQUIRE(made->wait_on(rank.caller).is_ok());
          if (r != 1) staged.push_back(std::move(made));
        }
      }
      for (Rank& rank : all) rank.gpu->synchronize(rank.caller);
      for (const auto& s : staged) {
        REQUIRE(s->wait(core::Clock::now() + kLong));
        INFO(s->status().to_string());
        if (!s->status().is_ok()) CHECK(s->status().to_string().find("rank 1 (host1) is gone") != std::string::npos);
      }
      for (Rank& rank : all)
        if (rank.group->rank() != 1) CHECK(eventually([&] { return !rank.group->status().is_ok(); }));
      Part after = make(Kind::kAllReduce, 0, cluster.size(), 100, 99);
      CHECK_FALSE(all[0].enqueue(after.operation));
    }
  }
}

TEST_CASE("staging/local: abort in the middle of many operations ends them all", "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 0, 0, 1}}) {
    ClusterThread cluster(nodes(layout, 3));
    const Hub hub = FakeLocalGroups::make_hub();
    auto all = ranks(cluster, 4, 8, small(), hub);
    std::vector<Part> parts;
    std::vector<std::shared_ptr<Staged>> staged;
    for (std::uint32_t turn = 0; turn < 12; ++turn) {
      for (Rank& rank : all) {
        if (turn >= 6 && rank.group->rank() == 0) continue;  // it does not come to the rest
        constexpr Kind kTurns[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kAllToAll};
        parts.push_back(make(kTurns[turn % 3], rank.group->rank(), cluster.size(), 20000, turn));
        staged.push_back(rank.enqueue(parts.back().operation));
        REQUIRE(staged.back());
      }
    }
    all[1].group->abort("enough");
    for (const auto& s : staged) REQUIRE(eventually([&] { return s->is_over(); }));
    int aborted = 0;
    for (const auto& s : staged)
      if (const std::string text = s->status().to_string(); text.find("enough") != std::string::npos) ++aborted;
    CHECK(aborted >= 6 * (cluster.size() - 1));
  }
}

/// One operation on the ranks of node 0; node 1 does not come.
std::vector<std::shared_ptr<Staged>> begin_on_node_0(std::vector<Rank>& all, std::vector<Part>& parts) {
  std::vector<std::shared_ptr<Staged>> staged;
  for (std::size_t r = 0; r < 2; ++r) {
    parts.push_back(make(Kind::kAllReduce, static_cast<int>(r), static_cast<int>(all.size()), 20000, 1));
    staged.push_back(all[r].enqueue(parts.back().operation));
    REQUIRE(staged.back());
  }
  for (std::size_t r = 0; r < 2; ++r) all[r].gpu->synchronize(all[r].caller);
  std::this_thread::sleep_for(50ms);  // for the sums within the node
  return staged;
}

TEST_CASE("staging/local: a stream goes on after a failure when the library is stopped and not before",
          "[staging][fast]") {
  ClusterThread cluster(nodes({0, 0, 1, 1}, 3));
  const Hub hub = FakeLocalGroups::make_hub();
  auto all = ranks(cluster, 4, 8, small(), hub);
  FakeLocalGroups::hold_stops(*hub, true);
  std::vector<Part> parts;
  const auto staged = begin_on_node_0(all, parts);
  all[0].group->abort("enough");
  for (const auto& s : staged) REQUIRE(eventually([&] { return s->has_failed(); }));
  std::this_thread::sleep_for(200ms);
  for (const auto& s : staged) CHECK_FALSE(s->is_over());
  FakeLocalGroups::hold_stops(*hub, false);
  for (const auto& s : staged) REQUIRE(eventually([&] { return s->is_over(); }));
  CHECK(FakeLocalGroups::late_kernels(*hub) == 0);
}

TEST_CASE("staging/local: a library that cannot be stopped does not hold up streams for ever", "[staging][fast]") {
  test::MovableClock clock;
  ClusterThread cluster(nodes({0, 0, 1, 1}, 3));
  const Hub hub = FakeLocalGroups::make_hub();
  auto all = ranks(cluster, 4, 8, small(), hub);
  FakeLocalGroups::hold_stops(*hub, true);
  std::vector<Part> parts;
  const auto staged = begin_on_node_0(all, parts);
  all[0].group->abort("enough");
  for (const auto& s : staged) REQUIRE(eventually([&] { return s->has_failed(); }));
  for (const auto& s : staged)
    REQUIRE(eventually([&] {
      clock.pass(2ms);
      return s->is_over();
    }));
  FakeLocalGroups::hold_stops(*hub, false);
}

TEST_CASE("staging/local: a library's memory stays until all that it has put on the streams is over",
          "[staging][fast]") {
  for (const int queues : {1, 8}) {
    ClusterThread cluster(nodes({0, 0, 1, 1}, 3));
    const Hub hub = FakeLocalGroups::make_hub();
    std::atomic<bool> go{false};
    std::vector<Part> parts;  // what is on the streams uses them, although it was refused
    std::vector<std::shared_ptr<FakeDevice>> gpus;
    {
      auto all = ranks(cluster, 4, queues, small(), hub);
      warm(all);
      for (Rank& rank : all) {
        gpus.push_back(rank.gpu);
        rank.gpu->launch(rank.caller, [&go] {
          while (!go.load()) std::this_thread::sleep_for(100us);
        });
        // What cannot be put as a whole leaves work on the streams that nobody waits for.
        rank.gpu->fail_records_after(2);
        parts.push_back(make(Kind::kAllReduce, rank.group->rank(), cluster.size(), 20000, 1));
        CHECK_FALSE(rank.enqueue(parts.back().operation));
        rank.channel.reset();
      }
      std::this_thread::sleep_for(50ms);
      go.store(true);
    }
    CHECK(FakeLocalGroups::late_kernels(*hub) == 0);
    for (const auto& gpu : gpus) {
      CHECK(eventually([&] { return gpu->pinned_bytes() == 0; }));
      CHECK(gpu->streams() == 0);
    }
  }
}

TEST_CASE("staging/local: what hangs within the node ends when the channel is aborted and the group let go",
          "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    ClusterThread cluster(nodes(layout, 3));
    const Hub hub = FakeLocalGroups::make_hub();
    auto all = ranks(cluster, 4, 8, small(), hub);
    std::vector<Part> parts;
    std::vector<std::shared_ptr<Staged>> staged;
    for (std::uint32_t turn = 0; turn < 3; ++turn) {  // the others do not come, and nothing has a deadline
      parts.push_back(make(Kind::kAllReduce, 0, cluster.size(), 20000, turn));
      staged.push_back(all[0].enqueue(parts.back().operation));
      REQUIRE(staged.back());
    }
    all[0].group.reset();
    all[0].channel->abort(core::Status(core::Code::kAborted, "enough"));
    for (const auto& s : staged) {
      REQUIRE(eventually([&] { return s->is_over(); }));
      CHECK(s->status().to_string().find("enough") != std::string::npos);
    }
  }
}

}  // namespace
