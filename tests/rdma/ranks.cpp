// rdma_ranks: one rank of a job on the real engine, without torch. tests/rdma/guest.py starts them.
//
//   rdma_ranks collectives RANK SIZE FOLDER     every operation of the list, a line with its result's digest each
//   rdma_ranks sums RANK SIZE FOLDER            only what dedicated servers sum
//   rdma_ranks until-failure RANK SIZE FOLDER   all-reduces without end, and then what went wrong
//
// FOLDER holds the job's store, empty at the start. Inputs depend on rank and position alone, so runs over different
// networks must give equal lines. Sums of integers are also compared with what they must be.
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/core/dtype.h"
#include "hybridps/engine/engine.h"
#include "tests/support/directory_store.h"

namespace {

using namespace hybridps;
using core::DType;
using schedule::Kind;
using Bytes = std::vector<std::byte>;

constexpr auto kPatience = std::chrono::seconds(300);  // the machine is emulated

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

std::uint64_t digest(const Bytes& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::byte b : bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3U;
  return hash;
}

std::int32_t integer_at(int rank, std::size_t i) {
  return static_cast<std::int32_t>(mix(static_cast<std::uint64_t>(rank) << 40 | i) % 100'000) - 50'000;
}

/// Floats whose sums round, so that another order of the additions would show.
template <class T>
void put(Bytes& bytes, std::size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

Bytes input_of(DType dtype, int rank, std::size_t count) {
  Bytes bytes(count * core::size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t whole = integer_at(rank, i);
    switch (dtype) {
      case DType::kInt32: put(bytes, i, whole); break;
      case DType::kInt64: put(bytes, i, std::int64_t{whole} << 20); break;
      case DType::kFloat32: put(bytes, i, static_cast<float>(whole) * 1.1e-3F); break;
      case DType::kFloat64: put(bytes, i, static_cast<double>(whole) * 1.1e-3); break;
      case DType::kBfloat16: {
        const float value = static_cast<float>(whole) * 1.1e-3F;
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, 4);
        put(bytes, i, static_cast<std::uint16_t>(bits >> 16));
        break;
      }
      case DType::kFloat16:  // exponents that neither vanish nor overflow in a sum of a few
        put(bytes, i, static_cast<std::uint16_t>((mix(static_cast<std::uint64_t>(whole)) & 0x83FF) | 0x3800));
        break;
      default: put(bytes, i, static_cast<std::uint8_t>(whole)); break;
    }
  }
  return bytes;
}

class Rank {
 public:
  Rank(int rank, int size, const std::string& folder) : rank_(rank), size_(size) {
    auto engine = engine::Engine::acquire();
    if (!engine.is_ok()) throw std::runtime_error(engine.status().to_string());
    engine_ = engine.value();
    engine::GroupOptions options;
    options.name = "world";
    options.incarnation = "rdma.0.0";
    options.rank = rank;
    options.size = size;
    options.store = std::make_shared<test::DirectoryStore>(folder);
    options.timeout = kPatience;
    auto group = engine_->open_group(options);
    if (!group.is_ok()) throw std::runtime_error(group.status().to_string());
    group_ = group.value();
    if (core::Status status = group_->wait_ready(); !status.is_ok()) throw std::runtime_error(status.to_string());
    std::printf("READY %.3f %s\n", now(), engine_->describe().c_str());
    std::fflush(stdout);
  }
  ~Rank() {
    group_->leave();
    engine_->linger();
  }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  std::uint64_t counted(std::string_view metric) const {
    for (const observe::Sample& sample : engine_->stats())
      if (sample.name == metric) return static_cast<std::uint64_t>(sample.value);
    return 0;
  }

  core::Status try_run(worker::Operation operation) {
    operation.timeout = kPatience;
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    core::Status status;
    group_->submit(std::move(operation), [&](const worker::Outcome& outcome) {
      const std::lock_guard lock(mutex);
      done = true;
      status = outcome.status;
      changed.notify_all();
    });
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
    return status;
  }

  void run(worker::Operation operation) {
    if (core::Status status = try_run(std::move(operation)); !status.is_ok())
      throw std::runtime_error(status.to_string());
  }

 private:
  const int rank_;
  const int size_;
  std::shared_ptr<engine::Engine> engine_;
  std::shared_ptr<engine::Group> group_;
};

std::vector<worker::Piece> all_of(Bytes& bytes) { return {{bytes.data(), bytes.size()}}; }

worker::Operation aggregate(Kind kind, DType dtype) {
  worker::Operation o;
  o.kind = kind;
  o.dtype = dtype;
  o.op = core::ReduceOp::kSum;
  return o;
}

void say(Kind kind, DType dtype, std::size_t count, const Bytes& result) {
  std::printf("OP %s %s %zu %016" PRIx64 "\n", schedule::name_of(kind).data(), core::name_of(dtype).data(), count,
              digest(result));
  std::fflush(stdout);
}

void check_sum(const Bytes& result, int size, std::size_t first, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::int32_t expected = 0;
    std::int32_t found = 0;
    for (int r = 0; r < size; ++r) expected += integer_at(r, first + i);
    std::memcpy(&found, result.data() + i * 4, 4);
    if (found != expected) throw std::runtime_error("wrong sum at element " + std::to_string(first + i));
  }
}

void allreduce(Rank& me, DType dtype, std::size_t count) {
  Bytes data = input_of(dtype, me.rank(), count);
  worker::Operation o = aggregate(Kind::kAllReduce, dtype);
  o.output = all_of(data);
  me.run(std::move(o));
  if (dtype == DType::kInt32) check_sum(data, me.size(), 0, count);
  say(Kind::kAllReduce, dtype, count, data);
}

void reduce(Rank& me, DType dtype, std::size_t count) {
  Bytes data = input_of(dtype, me.rank(), count);
  worker::Operation o = aggregate(Kind::kReduce, dtype);
  o.root = me.size() - 1;
  o.input = all_of(data);
  if (me.rank() == o.root) o.output = all_of(data);
  const bool root = me.rank() == o.root;
  me.run(std::move(o));
  if (root && dtype == DType::kInt32) check_sum(data, me.size(), 0, count);
  say(Kind::kReduce, dtype, count, root ? data : Bytes());
}

void reduce_scatter(Rank& me, DType dtype, std::size_t count) {
  const auto ranks = static_cast<std::size_t>(me.size());
  Bytes data = input_of(dtype, me.rank(), count * ranks);
  Bytes own(count * core::size_of(dtype));
  worker::Operation o = aggregate(Kind::kReduceScatter, dtype);
  o.input = all_of(data);
  o.output = all_of(own);
  o.input_bytes.assign(ranks, own.size());
  me.run(std::move(o));
  if (dtype == DType::kInt32) check_sum(own, me.size(), count * static_cast<std::size_t>(me.rank()), count);
  say(Kind::kReduceScatter, dtype, count, own);
}

void all_gather(Rank& me, DType dtype, std::size_t count) {
  const auto ranks = static_cast<std::size_t>(me.size());
  Bytes own = input_of(dtype, me.rank(), count);
  Bytes all(own.size() * ranks);
  worker::Operation o;
  o.kind = Kind::kAllGather;
  o.dtype = dtype;
  o.input = all_of(own);
  o.output = all_of(all);
  o.output_bytes.assign(ranks, own.size());
  me.run(std::move(o));
  Bytes expected;
  for (int r = 0; r < me.size(); ++r) {
    const Bytes part = input_of(dtype, r, count);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  if (all != expected) throw std::runtime_error("all_gather brought other bytes than were sent");
  say(Kind::kAllGather, dtype, count, all);
}

void broadcast(Rank& me, DType dtype, std::size_t count) {
  Bytes data = input_of(dtype, me.rank(), count);
  worker::Operation o;
  o.kind = Kind::kBroadcast;
  o.dtype = dtype;
  o.root = me.size() - 1;
  o.output = all_of(data);
  me.run(std::move(o));
  if (data != input_of(dtype, me.size() - 1, count))
    throw std::runtime_error("broadcast brought other bytes than were sent");
  say(Kind::kBroadcast, dtype, count, data);
}

/// To the next rank and from the previous one; even ranks send first.
void point_to_point(Rank& me, DType dtype, std::size_t count) {
  Bytes mine = input_of(dtype, me.rank(), count);
  Bytes theirs(mine.size());
  const int next = (me.rank() + 1) % me.size();
  const int previous = (me.rank() + me.size() - 1) % me.size();
  for (int step = 0; step < 2; ++step) {
    worker::Operation o;
    o.kind = Kind::kPointToPoint;
    o.sending = (me.rank() + step) % 2 == 0;
    o.peer = o.sending ? next : previous;
    o.tag = 7;
    (o.sending ? o.input : o.output) = all_of(o.sending ? mine : theirs);
    me.run(std::move(o));
  }
  if (theirs != input_of(dtype, previous, count))
    throw std::runtime_error("a message arrived with other bytes than were sent");
  say(Kind::kPointToPoint, dtype, count, theirs);
}

void collectives(Rank& me) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{70'001}, std::size_t{600'000}})
    for (const DType dtype : {DType::kFloat32, DType::kInt32}) {
      allreduce(me, dtype, count);
      reduce_scatter(me, dtype, count);
      all_gather(me, dtype, count);
      broadcast(me, dtype, count);
      point_to_point(me, dtype, count);
    }
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16, DType::kFloat64, DType::kInt64, DType::kUint8}) {
    allreduce(me, dtype, 33'333);
    reduce_scatter(me, dtype, 33'333);
    all_gather(me, dtype, 33'333);
    broadcast(me, dtype, 33'333);
    point_to_point(me, dtype, 33'333);
  }
}

void sums(Rank& me) {
  for (const std::size_t count : {std::size_t{3}, std::size_t{70'001}, std::size_t{600'000}})
    for (const DType dtype : {DType::kFloat32, DType::kInt32, DType::kBfloat16}) {
      allreduce(me, dtype, count);
      reduce(me, dtype, count);
    }
}

int until_failure(Rank& me) {
  Bytes data;
  for (int round = 0;; ++round) {
    data = input_of(DType::kFloat32, me.rank(), 1 << 18);
    worker::Operation o = aggregate(Kind::kAllReduce, DType::kFloat32);
    o.output = all_of(data);
    const core::Status status = me.try_run(std::move(o));
    if (!status.is_ok()) {
      std::printf("FAILED %.3f %s\n", now(), status.to_string().c_str());
      std::fflush(stdout);
      return 0;
    }
    std::printf("ROUND %d %.3f\n", round, now());
    std::fflush(stdout);
  }
}

int run(const std::string& what, int rank, int size, const std::string& folder) {
  Rank me(rank, size, folder);
  if (what == "until-failure") return until_failure(me);
  if (what == "collectives")
    collectives(me);
  else
    sums(me);
  std::printf("SENT %" PRIu64 " %" PRIu64 "\nDONE %.3f\n", me.counted("net_tx_payload_bytes"),
              me.counted("shm_tx_payload_bytes"), now());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const bool known =
      words.size() == 4 && (words[0] == "collectives" || words[0] == "sums" || words[0] == "until-failure");
  const int rank = known ? std::atoi(words[1].c_str()) : -1;
  const int size = known ? std::atoi(words[2].c_str()) : 0;
  if (!known || rank < 0 || rank >= size || size > 64) {
    std::fprintf(stderr, "usage: rdma_ranks collectives|sums|until-failure RANK SIZE FOLDER\n");
    return 2;
  }
  try {
    return run(words[0], rank, size, words[3]);
  } catch (const std::exception& error) {
    std::printf("ERROR %.3f %s\n", now(), error.what());
    return 1;
  }
}
