// tests/unit/staging/program.h: programs on fake devices over a Cluster, for the tests of staging.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/device/fake/fake_device.h"
#include "hybridps/intranode/fake/fake_local_group.h"
#include "hybridps/staging/stager.h"
#include "tests/support/catch.h"
#include "tests/support/cluster_group.h"

namespace hybridps::test::program {

using namespace hybridps;
using namespace std::chrono_literals;
using device::FakeDevice;
using device::FakeOptions;
using schedule::Kind;
using staging::Channel;
using staging::ChannelOptions;
using staging::Staged;
using staging::Stager;
using staging::StagingRequest;
using test::Cluster;
using test::ClusterGroup;
using test::ClusterOptions;
using test::ClusterThread;

using Values = std::vector<std::int32_t>;

inline constexpr auto kLong = 60s;  // no test takes so long

inline worker::Piece piece(Values& values, std::size_t from = 0, std::size_t count = ~std::size_t{0}) {
  count = std::min(count, values.size() - from);
  return {reinterpret_cast<std::byte*>(values.data() + from), count * sizeof(std::int32_t)};
}

inline std::int32_t value(int rank, std::size_t i, std::uint32_t turn) {
  return static_cast<std::int32_t>(turn * 1000003U + static_cast<std::uint32_t>(rank) * 4001U +
                                   static_cast<std::uint32_t>(i) * 17U);
}

/// The Device that staging gets; null: the FakeDevice itself. unit_staging_cuda sets it before any test.
inline std::shared_ptr<device::Device> (*device_on)(const std::shared_ptr<FakeDevice>&) = nullptr;
inline std::shared_ptr<FakeDevice> (*fake_of)(const std::shared_ptr<device::Device>&) = nullptr;

/// One GPU and what a program has on it.
struct Rank {
  Rank(std::shared_ptr<ClusterGroup> g, FakeOptions fake, ChannelOptions options)
      : group(std::move(g)), gpu(std::make_shared<FakeDevice>(fake)), stager(std::make_shared<Stager>()) {
    accelerator = device_on != nullptr ? device_on(gpu) : gpu;
    caller = gpu->make_stream().value();
    auto opened = stager->open(accelerator, group, options);
    REQUIRE(opened.is_ok());
    channel = opened.value();
  }
  ~Rank() {
    if (!gpu) return;
    gpu->synchronize(caller);
    channel.reset();
    others.clear();
    stager->stop(10s);
    stager.reset();
    gpu->destroy(caller);
  }
  Rank(Rank&&) = default;

  std::shared_ptr<Channel> open(ChannelOptions options) {
    others.push_back(stager->open(accelerator, group, options).value());
    return others.back();
  }
  std::shared_ptr<Staged> enqueue(worker::Operation operation, Channel* on = nullptr, bool leave_open = false) {
    if (operation.dtype == core::DType::kBytes) operation.dtype = core::DType::kInt32;
    StagingRequest request;
    if (const auto bytes = channel->scratch_bytes(operation); bytes.is_ok() && bytes.value() > 0) {
      auto scratch = std::make_shared<std::vector<std::byte>>(bytes.value());
      request.scratch = scratch->data();
      scratches.push_back(std::move(scratch));
    }
    request.operation = std::move(operation);
    request.caller = caller;
    request.what = "operation";
    request.leave_open = leave_open;
    request.code = code;
    request.codes = codes;
    request.done = [count = over](const core::Status&) { count->fetch_add(1); };
    auto staged = (on != nullptr ? *on : *channel).enqueue(std::move(request));
    if (!staged.is_ok()) refused = staged.status();
    return staged.is_ok() ? staged.value() : nullptr;
  }

  std::shared_ptr<ClusterGroup> group;
  std::shared_ptr<FakeDevice> gpu;
  std::shared_ptr<device::Device> accelerator;
  std::shared_ptr<Stager> stager;
  std::shared_ptr<Channel> channel;
  std::vector<std::shared_ptr<Channel>> others;
  device::DeviceStream caller;
  std::shared_ptr<std::atomic<int>> over = std::make_shared<std::atomic<int>>(0);
  core::Status refused;
  std::function<bool(worker::Operation&, const std::byte*)> code;  // of what comes
  std::function<std::byte*(std::uint64_t)> codes;
  std::vector<std::shared_ptr<std::vector<std::byte>>> scratches;
};

inline ClusterOptions nodes(std::vector<int> node_of, std::uint64_t seed) {
  ClusterOptions options;
  options.node_of = std::move(node_of);
  options.seed = seed;
  return options;
}

inline FakeOptions fake(std::uint64_t seed, int queues = 8) {
  FakeOptions options;
  options.seed = seed;
  options.hardware_queues = queues;
  return options;
}

inline ChannelOptions small() {
  ChannelOptions options;
  options.limits.slice_bytes = 4096;
  options.staging_bytes_max = std::uint64_t{2} << 20;
  return options;
}

using Hub = std::shared_ptr<intranode::FakeLocalHub>;

inline staging::LocalOptions local_of(const Hub& hub, intranode::FakeLocalOptions options = {}) {
  staging::LocalOptions local;
  options.fake_of = fake_of;
  local.library = std::make_shared<intranode::FakeLocalGroups>(hub, options);
  return local;
}

/// On a thread each, since every rank waits for the others. Collectives do not wait then.
inline void connect(std::vector<Rank>& all, std::chrono::milliseconds timeout = 0ms) {
  std::vector<std::thread> threads;
  for (Rank& rank : all) threads.emplace_back([&rank, timeout] { rank.refused = rank.channel->connect(timeout); });
  for (std::thread& thread : threads) thread.join();
}

/// `hub`: ranks of a node work together by a fake library. `device`: of a rank.
inline std::vector<Rank> ranks_with(ClusterThread& cluster, const std::function<FakeOptions(int rank)>& device,
                                    ChannelOptions options = small(), const Hub& hub = nullptr) {
  // The engine's loop: streams wait for it.
  cluster.run([](Cluster&) { static thread_local const device::NoDriverCalls streams_wait_for_this_thread; });
  std::vector<Rank> made;
  if (hub) options.local = local_of(hub);
  for (auto& group : ClusterGroup::open(cluster)) made.emplace_back(group, device(group->rank()), options);
  if (!hub) return made;
  connect(made);
  for (const Rank& rank : made) REQUIRE(rank.refused.to_string() == "ok");
  return made;
}

inline std::vector<Rank> ranks(ClusterThread& cluster, std::uint64_t seed, int queues, ChannelOptions options = small(),
                               const Hub& hub = nullptr) {
  return ranks_with(
      cluster, [&](int rank) { return fake(seed * 100 + static_cast<std::uint64_t>(rank), queues); },
      std::move(options), hub);
}

/// What one rank gives to an operation and must get.
struct Part {
  worker::Operation operation;
  std::shared_ptr<Values> input = std::make_shared<Values>();
  std::shared_ptr<Values> output = std::make_shared<Values>();
  Values given_input;
  Values given_output;
  Values expected;  // of output
};

/// Operation `turn` of `kind` with `count` elements (per rank where ranks have parts).
inline Part make(Kind kind, int me, int size, std::size_t count, std::uint32_t turn) {
  Part part;
  worker::Operation& o = part.operation;
  o.kind = kind;
  const auto n = static_cast<std::size_t>(size);
  const auto r = static_cast<std::size_t>(me);
  const int root = static_cast<int>(turn) % size;
  const auto length = [&](std::size_t of) { return count + 3 * of; };  // parts differ
  std::size_t all = 0;
  std::vector<std::size_t> from;
  std::vector<std::uint64_t> bytes;
  for (std::size_t p = 0; p < n; ++p) {
    from.push_back(all);
    bytes.push_back(length(p) * sizeof(std::int32_t));
    all += length(p);
  }
  const auto fill = [&](Values& values, std::size_t many, int rank) {
    values.resize(many);
    for (std::size_t i = 0; i < many; ++i) values[i] = value(rank, i, turn);
  };
  const auto total = [&](std::size_t i) {
    std::uint32_t sum = 0;
    for (int p = 0; p < size; ++p) sum += static_cast<std::uint32_t>(value(p, i, turn));
    return static_cast<std::int32_t>(sum);
  };
  const Values untouched(all, -7);
  switch (kind) {
    case Kind::kAllReduce:
      o.op = core::ReduceOp::kSum;
      fill(part.given_output, count, me);
      for (std::size_t i = 0; i < count; ++i) part.expected.push_back(total(i));
      break;
    case Kind::kReduce:
      o.op = core::ReduceOp::kSum;
      o.root = root;
      fill(part.given_input, count, me);
      if (me == root) part.given_output.assign(count, -7);
      for (std::size_t i = 0; i < count && me == root; ++i) part.expected.push_back(total(i));
      break;
    case Kind::kBroadcast:
      o.root = root;
      if (me == root)
        fill(part.given_output, count, me);
      else
        part.given_output.assign(count, -7);
      fill(part.expected, count, root);
      break;
    case Kind::kAllGather:
    case Kind::kGather:
      if (kind == Kind::kGather) o.root = root;
      fill(part.given_input, length(r), me);
      if (kind == Kind::kAllGather || me == root) {
        o.output_bytes = bytes;
        part.given_output = untouched;
        for (std::size_t p = 0; p < n; ++p)
          for (std::size_t i = 0; i < length(p); ++i) part.expected.push_back(value(static_cast<int>(p), i, turn));
      }
      break;
    case Kind::kReduceScatter:
      o.op = core::ReduceOp::kSum;
      o.input_bytes = bytes;
      fill(part.given_input, all, me);
      part.given_output.assign(length(r), -7);
      for (std::size_t i = 0; i < length(r); ++i) part.expected.push_back(total(from[r] + i));
      break;
    case Kind::kScatter:
      o.root = root;
      if (me == root) {
        o.input_bytes = bytes;
        fill(part.given_input, all, me);
      }
      part.given_output.assign(length(r), -7);
      for (std::size_t i = 0; i < length(r); ++i) part.expected.push_back(value(root, from[r] + i, turn));
      break;
    case Kind::kAllToAll:
      // To rank p: length(p) elements.
      o.input_bytes = bytes;
      fill(part.given_input, all, me);
      part.given_output.assign(length(r) * n, -7);
      for (std::size_t p = 0; p < n; ++p) {
        o.output_bytes.push_back(length(r) * sizeof(std::int32_t));
        for (std::size_t i = 0; i < length(r); ++i)
          part.expected.push_back(value(static_cast<int>(p), from[r] + i, turn));
      }
      break;
    default: break;
  }
  part.input->assign(part.given_input.size(), -1);
  part.output->assign(part.given_output.size(), -1);
  if (!part.given_input.empty()) o.input = {piece(*part.input)};
  // A piece per rank, as lists of tensors have, or one.
  const auto by_rank = [&](Values& values, const std::vector<std::uint64_t>& sizes) {
    if (sizes.empty() || turn % 2 == 0) return std::vector<worker::Piece>{piece(values)};
    std::vector<worker::Piece> pieces;
    std::size_t at = 0;
    for (const std::uint64_t size_of_part : sizes) {
      pieces.push_back(piece(values, at, size_of_part / sizeof(std::int32_t)));
      at += size_of_part / sizeof(std::int32_t);
    }
    return pieces;
  };
  // Two pieces, as coalesced calls have: of each rank's part, where ranks have parts.
  const auto halves = [](Values& values, std::size_t at, std::size_t whole) {
    return std::vector<worker::Piece>{piece(values, at, whole / 3), piece(values, at + whole / 3, whole - whole / 3)};
  };
  const bool pairwise = kind == Kind::kGather || kind == Kind::kScatter || kind == Kind::kAllToAll;
  if (pairwise && !part.given_input.empty()) o.input = by_rank(*part.input, o.input_bytes);
  if (!part.given_output.empty())
    o.output = pairwise ? by_rank(*part.output, o.output_bytes) : halves(*part.output, 0, part.output->size());
  if (kind == Kind::kReduce) o.input = halves(*part.input, 0, count);
  if (kind == Kind::kReduceScatter) {
    o.input.clear();
    for (std::size_t p = 0; p < n; ++p)
      for (const worker::Piece& half : halves(*part.input, from[p], length(p))) o.input.push_back(half);
  }
  return part;
}

inline constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                                  Kind::kBroadcast, Kind::kReduce,    Kind::kGather,
                                  Kind::kScatter,   Kind::kAllToAll,  Kind::kBarrier};

inline bool eventually(const std::function<bool()>& done) {
  const auto until = std::chrono::steady_clock::now() + kLong;
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(200us);
  }
  return true;
}

/// Gets the channels their memory, which is to wait for the device: before a test puts there what does not end.
inline void warm(std::vector<Rank>& all) {
  std::vector<Part> parts;
  for (Rank& rank : all) {
    parts.push_back(make(Kind::kAllReduce, rank.group->rank(), static_cast<int>(all.size()), 40000, 0));
    REQUIRE(rank.enqueue(parts.back().operation));
  }
  for (Rank& rank : all) {
    REQUIRE(eventually([&] { return rank.over->load() == 1; }));
    rank.over->store(0);
  }
}

/// Bytes that the rank's transport to other nodes has taken from its GPU's memory.
inline std::uint64_t sent_from_device(ClusterThread& cluster, int rank) {
  std::uint64_t bytes = 0;
  cluster.run([&](Cluster& c) {
    c.at(rank).update_counters();
    bytes = c.at(rank).counters()[observe::Counter::kNetTxDeviceBytes];
  });
  return bytes;
}

/// Ten turns of `kinds` on ranks 0 and 1 of three, which never wait; rank 2 dies in the middle. All streams come to
/// their end, with the memory still there; what failed says why, and so does the group.
inline void outlive_rank_2(ClusterThread& cluster, std::vector<Rank>& all, std::span<const Kind> kinds) {
  std::vector<Part> parts;
  std::vector<std::shared_ptr<Staged>> staged;
  // Each kind once by all, and to the end: to get memory is to wait for the device, which will wait for rank 2.
  for (std::uint32_t turn = 0; turn < kinds.size(); ++turn) {
    for (Rank& rank : all) {
      parts.push_back(make(kinds[turn], rank.group->rank(), 3, 30000, turn));
      staged.push_back(rank.enqueue(parts.back().operation));
      REQUIRE(staged.back());
    }
    for (const auto& s : staged) REQUIRE(eventually([&] { return s->is_over(); }));
  }
  staged.clear();
  for (std::uint32_t turn = 0; turn < 10; ++turn) {
    if (turn == 5) cluster.post([](Cluster& c) { c.kill(2); });
    for (std::size_t r = 0; r < 2; ++r) {
      parts.push_back(make(kinds[turn % kinds.size()], static_cast<int>(r), 3, 30000, turn));
      auto made = all[r].enqueue(parts.back().operation);
      if (!made) continue;  // the group has failed already
      REQUIRE(made->wait_on(all[r].caller).is_ok());
      staged.push_back(std::move(made));
    }
  }
  for (std::size_t r = 0; r < 2; ++r) all[r].gpu->synchronize(all[r].caller);
  for (const auto& s : staged) {
    REQUIRE(s->wait(core::Clock::now() + kLong));
    if (!s->status().is_ok()) CHECK(s->status().code() == core::Code::kPeerDead);
  }
  CHECK(eventually([&] { return all[0].group->status().code() == core::Code::kPeerDead; }));
}

/// A program on every rank that never waits: kernels that make the inputs and keep the outputs, operations between
/// them. `direct`: what is delivered goes from device memory where it can. Bytes that did are returned, of all ranks.
inline std::uint64_t run_program(const std::vector<int>& layout, int queues, std::uint64_t seed, int rounds,
                                 const Hub& hub = nullptr, bool direct = false) {
  INFO("ranks " << layout.size() << " queues " << queues << " seed " << seed);
  ClusterOptions cluster_options = nodes(layout, seed);
  if (direct) cluster_options.device_view = &FakeDevice::host_view;
  ClusterThread cluster(cluster_options);
  ChannelOptions channel_options = small();
  channel_options.direct = direct;
  auto all = ranks(cluster, seed, queues, channel_options, hub);
  std::mt19937_64 random(seed);
  struct Seen {
    Part part;
    std::shared_ptr<Values> output = std::make_shared<Values>();
    std::shared_ptr<Staged> staged;
  };
  std::vector<Seen> seen;
  int issued = 0;
  for (int round = 0; round < rounds; ++round) {
    const Kind kind = kKinds[random() % std::size(kKinds)];
    constexpr std::size_t kCounts[] = {0, 1, 700, 5000, 40000};
    const std::size_t count = kCounts[random() % std::size(kCounts)];
    ++issued;
    for (Rank& rank : all) {
      Seen s;
      s.part = make(kind, rank.group->rank(), cluster.size(), count, static_cast<std::uint32_t>(round));
      rank.gpu->launch(rank.caller, [part = s.part] {
        *part.input = part.given_input;
        std::copy(part.given_output.begin(), part.given_output.end(), part.output->begin());
      });
      s.staged = rank.enqueue(s.part.operation);
      REQUIRE(s.staged);
      REQUIRE(s.staged->wait_on(rank.caller).is_ok());
      rank.gpu->launch(rank.caller, [part = s.part, output = s.output] {
        *output = *part.output;
        std::fill(part.output->begin(), part.output->end(), -9);  // as if the memory were used again
        std::fill(part.input->begin(), part.input->end(), -9);
      });
      seen.push_back(std::move(s));
    }
  }
  for (Rank& rank : all) {
    rank.gpu->synchronize(rank.caller);
    CHECK(eventually([&] { return rank.over->load() == issued; }));
  }
  for (const Seen& s : seen) {
    INFO(schedule::name_of(s.part.operation.kind));
    REQUIRE(s.staged->status().to_string() == "ok");
    REQUIRE((*s.output == s.part.expected));
  }
  std::uint64_t bytes = 0;
  for (int rank = 0; rank < cluster.size(); ++rank) bytes += sent_from_device(cluster, rank);
  return bytes;
}

}  // namespace hybridps::test::program
