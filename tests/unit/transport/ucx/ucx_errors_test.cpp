// What UCX rarely does, scripted.
#include <array>
#include <chrono>
#include <cstring>

#include "hybridps/transport/envelope.h"
#include "tests/unit/transport/ucx/fake_ucp.h"
#include "tests/unit/transport/ucx/ucx_pair.h"

namespace hybridps::transport {
namespace {

using contract::numbered;

struct Fixture {
  FakeUcp ucp;
  contract::Side side;
  const core::EngineId peer_id = core::make_engine_id();

  explicit Fixture(UcxOptions options = test_options(), bool connect = true) {
    options.close_timeout = core::from_seconds(0.05);
    side.use_heap();
    auto made = UcxTransport::create(options, ucp);
    INFO(made.status().to_string());
    REQUIRE(made.is_ok());
    side.transport = std::move(made).value();
    REQUIRE(side.transport->attach(side.memory).is_ok());
    side.transport->set_receiver(&side.receiver);
    if (!connect) return;
    auto endpoint = side.transport->connect(peer_id, peer_address());
    REQUIRE(endpoint.is_ok());
    side.peer = endpoint.value();
  }
  ~Fixture() {
    side.ending = true;
    side.receiver.messages.clear();
    side.transport.reset();
    CHECK(ucp.configs == 0);
    CHECK(ucp.contexts == 0);
    CHECK(ucp.workers == 0);
    CHECK(ucp.maps == 0);
    CHECK(ucp.endpoints == 0);
    CHECK(ucp.requests == 0);
    CHECK(ucp.untyped == 0);
    CHECK(side.pool->slots_in_use() == 0);
  }
  static std::vector<std::byte> peer_address() {
    return wrap(kUcxEnvelope, std::vector<std::byte>(48, std::byte{0x5a}));
  }
  UcxCounters counters() { return ucx(side).counters(); }
  core::Status send(contract::Side::Done& done, std::size_t bytes = 100) {
    return side.peer->send(numbered(1), side.filled(bytes, 1), bytes, side.record(done));
  }
};

TEST_CASE("transport/ucx: an older library than the headers is refused by name", "[transport][fast]") {
  FakeUcp ucp;
  ucp.major = 1;
  ucp.minor = 12;
  const auto made = UcxTransport::create(test_options(), ucp);
  CHECK(made.status().code() == core::Code::kUnsupported);
  CHECK(made.status().to_string().find("1.12") != std::string::npos);
}

TEST_CASE("transport/ucx: a failed start leaves nothing behind", "[transport][fast]") {
  FakeUcp ucp;
  const int step = GENERATE(0, 1, 2);
  if (step == 0) ucp.init_status = UCS_ERR_NO_DEVICE;
  if (step == 1) ucp.worker_status = UCS_ERR_NO_MEMORY;
  if (step == 2) ucp.handler_status = UCS_ERR_INVALID_PARAM;
  const auto made = UcxTransport::create(test_options(), ucp);
  CHECK_FALSE(made.is_ok());
  if (step == 0) CHECK(made.status().message().find("'lo'") != std::string::npos);
  if (step == 1) CHECK(made.status().code() == core::Code::kOutOfResources);
  CHECK(ucp.configs == 0);
  CHECK(ucp.contexts == 0);
  CHECK(ucp.workers == 0);
}

TEST_CASE("transport/ucx: a device that does not exist is refused before UCX is asked", "[transport][fast]") {
  FakeUcp ucp;
  UcxOptions options = test_options();
  options.net_device = "typo0";
  const auto made = UcxTransport::create(options, ucp);
  CHECK(made.status().code() == core::Code::kInvalidArgument);
  CHECK(made.status().message().find("lo") != std::string::npos);
  CHECK(ucp.contexts == 0);
  CHECK(ucp.configs == 0);
}

TEST_CASE("transport/ucx: sends carry the memory handle and endpoints the peer error mode", "[transport][fast]") {
  Fixture f;
  CHECK(f.ucp.ep_params.err_mode == UCP_ERR_HANDLING_MODE_PEER);
  contract::Side::Done done;
  REQUIRE(f.send(done).is_ok());
  CHECK((f.ucp.last_send.op_attr_mask & UCP_OP_ATTR_FIELD_MEMH) != 0);
  CHECK(f.ucp.last_send.memh != nullptr);
  CHECK((f.ucp.last_send.op_attr_mask & UCP_OP_ATTR_FIELD_FLAGS) == 0);  // the protocol is UCX's choice
  f.ucp.complete_sends(UCS_OK);
  f.side.progress();
  CHECK(done.count == 1);
  CHECK(done.last.is_ok());
}

TEST_CASE("transport/ucx: a send that completes at once calls done in progress", "[transport][fast]") {
  Fixture f;
  f.ucp.send_mode = FakeUcp::Send::kAtOnce;
  contract::Side::Done done;
  REQUIRE(f.send(done).is_ok());
  CHECK(done.count == 0);
  CHECK_FALSE(f.side.transport->arm());
  CHECK(f.side.progress() > 0);
  CHECK(done.count == 1);
  CHECK(f.side.transport->arm());
}

struct Gpu {
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);
  FakeUcp& ucp;
  int entered = 0;
  explicit Gpu(FakeUcp& u) : ucp(u) {}
  DeviceMemory lent() {
    return {memory, [this](const std::function<void()>& call) {
              ++entered;
              const bool before = std::exchange(ucp.inside, true);
              call();
              ucp.inside = before;
            }};
  }
};

TEST_CASE("transport/ucx: a GPU's memory is registered and sent as such where UCX knows CUDA", "[transport][fast]") {
  Fixture f;
  Gpu gpu(f.ucp);
  f.ucp.memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
  REQUIRE(f.side.transport->attach_device(gpu.lent()).is_ok());
  CHECK(f.ucp.last_map.memory_type == UCS_MEMORY_TYPE_CUDA);
  CHECK(f.ucp.last_map.address == gpu.memory.data());
  CHECK(f.ucp.last_map.length == gpu.memory.size());
  CHECK(f.ucp.maps == 2);
  contract::Side::Done host;
  REQUIRE(f.send(host).is_ok());
  const ucp_mem_h of_pool = f.ucp.last_send.memh;
  CHECK(f.ucp.last_send.memory_type == UCS_MEMORY_TYPE_HOST);
  const auto kept = std::make_shared<int>(0);
  contract::Side::Done done;
  REQUIRE(f.side.peer->send(numbered(1), f.side.pool->lend(gpu.memory.data() + 8, 100, kept), 100, f.side.record(done))
              .is_ok());
  CHECK((f.ucp.last_send.op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE) != 0);
  CHECK(f.ucp.last_send.memory_type == UCS_MEMORY_TYPE_CUDA);
  CHECK(f.ucp.last_send.memh != of_pool);
  const ucp_mem_h of_gpu = f.ucp.last_send.memh;
  CHECK(f.side.transport->stats().tx_device_bytes == 100);
  CHECK(f.side.transport->stats().tx_payload_bytes == 200);
  CHECK(kept.use_count() == 2);  // until UCX lets go
  f.ucp.complete_sends(UCS_OK);
  f.side.progress();
  CHECK(done.count == 1);
  CHECK(kept.use_count() == 1);
  f.side.transport->arm();
  CHECK(f.ucp.armed_inside);  // UCX asks CUDA's events then
  f.side.transport->detach_device(gpu.memory);
  CHECK(f.ucp.maps == 1);
  REQUIRE(f.ucp.unmapped.size() == 1);
  CHECK(f.ucp.unmapped[0] == of_gpu);
  CHECK(f.side.peer->send(numbered(1), f.side.pool->lend(gpu.memory.data(), 8, kept), 8, {}).code() ==
        core::Code::kInvalidArgument);
  CHECK(f.ucp.outside == 0);
}

TEST_CASE("transport/ucx: with several GPUs each call enters the one whose memory it is about", "[transport][fast]") {
  Fixture f;
  Gpu one(f.ucp);
  Gpu two(f.ucp);
  f.ucp.memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
  REQUIRE(f.side.transport->attach_device(one.lent()).is_ok());
  CHECK(one.entered == 1);
  REQUIRE(f.side.transport->attach_device(two.lent()).is_ok());
  CHECK(one.entered == 1);
  CHECK(two.entered == 1);
  for (Gpu* gpu : {&one, &two, &one}) {
    const int before = gpu->entered;
    const int together = one.entered + two.entered;
    REQUIRE(f.side.peer->send(numbered(1), f.side.pool->lend(gpu->memory.data(), 8, {}), 8, {}).is_ok());
    CHECK(gpu->entered == before + 1);
    CHECK(one.entered + two.entered == together + 1);
  }
  f.ucp.complete_sends(UCS_OK);
  f.side.progress();
  for (Gpu* gpu : {&one, &two}) {
    const int before = gpu->entered;
    f.side.transport->detach_device(gpu->memory);
    CHECK(gpu->entered == before + 1);
    const int others = two.entered;
    f.side.progress();  // in whatever is left
    CHECK(two.entered == (gpu == &one ? others + 1 : others));
  }
  CHECK(f.ucp.outside == 0);
}

TEST_CASE("transport/ucx: a UCX without CUDA or that cannot register a GPU's memory says so", "[transport][fast]") {
  Fixture f;
  Gpu gpu(f.ucp);
  core::Status status = f.side.transport->attach_device(gpu.lent());
  CHECK(status.code() == core::Code::kUnsupported);
  CHECK(status.message().find("has no CUDA support") != std::string::npos);
  f.ucp.query_status = UCS_ERR_INVALID_PARAM;
  CHECK(f.side.transport->attach_device(gpu.lent()).code() == core::Code::kInternal);
  f.ucp.query_status = UCS_OK;
  f.ucp.memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
  f.ucp.map_status = UCS_ERR_IO_ERROR;
  status = f.side.transport->attach_device(gpu.lent());
  CHECK(status.code() == core::Code::kOutOfResources);
  CHECK(status.message().find("65536 bytes of GPU memory") != std::string::npos);
  CHECK(f.ucp.maps == 1);
  f.ucp.map_status = UCS_OK;
  CHECK(f.side.transport->attach_device({}).code() == core::Code::kInvalidArgument);
  REQUIRE(f.side.transport->attach_device(gpu.lent()).is_ok());  // unmapped with the transport
}

TEST_CASE("transport/ucx: a GPU's memory stays while UCX holds a send of a broken connection", "[transport][fast]") {
  Fixture f;
  Gpu gpu(f.ucp);
  f.ucp.memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
  REQUIRE(f.side.transport->attach_device(gpu.lent()).is_ok());
  f.ucp.send_mode = FakeUcp::Send::kNever;
  const auto kept = std::make_shared<int>(0);
  contract::Side::Done done;
  REQUIRE(f.side.peer->send(numbered(1), f.side.pool->lend(gpu.memory.data(), 100, kept), 100, f.side.record(done))
              .is_ok());
  f.ucp.break_connection(UCS_ERR_CONNECTION_RESET);
  for (int i = 0; i < 5; ++i) f.side.progress();
  CHECK(f.side.receiver.failures.size() == 1);
  CHECK(kept.use_count() == 2);
  f.ucp.sends.front().never = false;
  f.ucp.complete_sends(UCS_ERR_CANCELED);
  f.side.progress();
  CHECK(kept.use_count() == 1);
  CHECK(done.last.code() == core::Code::kPeerDead);
}

TEST_CASE("transport/ucx: an unreachable peer is an error of connect", "[transport][fast]") {
  Fixture f(test_options(), false);
  f.ucp.ep_status = UCS_ERR_UNREACHABLE;
  const auto endpoint = f.side.transport->connect(f.peer_id, Fixture::peer_address());
  CHECK(endpoint.status().code() == core::Code::kPeerDead);
  CHECK(endpoint.status().message().find(core::to_string(f.peer_id)) != std::string::npos);
  f.ucp.ep_status = UCS_OK;
  CHECK(f.side.transport->connect(f.peer_id, Fixture::peer_address()).is_ok());
}

TEST_CASE("transport/ucx: a send that UCX refuses fails the endpoint", "[transport][fast]") {
  Fixture f;
  f.ucp.send_status = UCS_ERR_CONNECTION_RESET;
  contract::Side::Done done;
  CHECK(f.send(done).code() == core::Code::kPeerDead);
  CHECK(f.side.receiver.failures.empty());  // never inside send()
  CHECK(f.side.pool->slots_in_use() == 0);
  f.side.progress();
  f.side.progress();
  CHECK(f.side.receiver.failures.size() == 1);
  CHECK(f.ucp.closes == 1);
  CHECK(f.ucp.forced);
  CHECK(done.count == 0);
  CHECK(f.side.transport->stats().tx_messages == 0);
}

TEST_CASE("transport/ucx: a send without memory leaves the endpoint open", "[transport][fast]") {
  Fixture f;
  f.ucp.send_status = UCS_ERR_NO_MEMORY;
  contract::Side::Done done;
  CHECK(f.send(done).code() == core::Code::kOutOfResources);
  f.ucp.send_status = UCS_OK;
  CHECK(f.send(done).is_ok());
  CHECK(f.ucp.closes == 0);
}

TEST_CASE("transport/ucx: a broken connection is reported once and pending sends wait for UCX", "[transport][fast]") {
  Fixture f;
  f.ucp.send_mode = FakeUcp::Send::kNever;  // UCX keeps the payload
  contract::Side::Done kept;
  REQUIRE(f.send(kept).is_ok());
  f.ucp.send_mode = FakeUcp::Send::kPending;
  contract::Side::Done done;
  REQUIRE(f.send(done).is_ok());
  f.ucp.break_connection(UCS_ERR_CONNECTION_RESET);
  f.ucp.break_connection(UCS_ERR_ENDPOINT_TIMEOUT);
  for (int i = 0; i < 5; ++i) f.side.progress();
  REQUIRE(f.side.receiver.failures.size() == 1);
  CHECK(f.side.receiver.failures[0].first == f.peer_id);
  CHECK(f.side.receiver.failures[0].second.message() == hybridps::transport::kEndedWithoutClosing);
  CHECK(f.ucp.closes == 1);
  CHECK(done.count == 1);
  CHECK(done.last.code() == core::Code::kPeerDead);
  CHECK(done.last.message() == f.side.receiver.failures[0].second.message());
  CHECK(kept.count == 0);
  CHECK(f.side.pool->slots_in_use() == 1);
  f.ucp.sends.front().never = false;
  f.ucp.complete_sends(UCS_ERR_CANCELED);
  f.side.progress();
  CHECK(kept.count == 1);
  CHECK(kept.last.code() == core::Code::kPeerDead);
  CHECK(f.side.pool->slots_in_use() == 0);
}

TEST_CASE("transport/ucx: an error of one send fails its endpoint without the handler", "[transport][fast]") {
  Fixture f;
  contract::Side::Done done;
  REQUIRE(f.send(done).is_ok());
  f.ucp.complete_sends(UCS_ERR_ENDPOINT_TIMEOUT);
  f.side.progress();
  CHECK(done.count == 1);
  CHECK(done.last.code() == core::Code::kPeerDead);
  CHECK(f.side.receiver.failures.size() == 1);
  CHECK(f.ucp.closes == 1);
}

TEST_CASE("transport/ucx: destruction is bounded though a send never completes", "[transport][fast]") {
  contract::Side::Done done;
  const auto started = std::chrono::steady_clock::now();
  {
    Fixture f;
    f.ucp.send_mode = FakeUcp::Send::kNever;
    REQUIRE(f.send(done).is_ok());
    f.side.transport.reset();
    CHECK(done.count == 1);
    CHECK(done.last.code() == core::Code::kClosed);
    f.ucp.sends.clear();
  }
  CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(3));
}

TEST_CASE("transport/ucx: a friendly close drains then flushes then closes", "[transport][fast]") {
  Fixture f;
  contract::Side::Done done;
  REQUIRE(f.send(done).is_ok());
  f.ucp.flush_pending = true;
  f.side.peer->close(core::Status(core::Code::kClosed, "goodbye"));
  f.side.progress();
  CHECK(f.ucp.flushes == 0);
  CHECK(f.ucp.closes == 0);
  f.ucp.complete_sends(UCS_OK);
  f.side.progress();
  CHECK(done.last.message() == "goodbye");
  CHECK(f.ucp.flushes == 1);
  CHECK(f.ucp.closes == 0);
  const auto flush = f.ucp.pending_flushes.front();
  f.ucp.pending_flushes.clear();
  f.ucp.queue.emplace_back([&] {
    ++f.ucp.requests;
    flush.cb.send(::operator new(1), UCS_OK, const_cast<void*>(flush.user_data));
  });
  f.side.progress();
  CHECK(f.ucp.closes == 1);
  CHECK(f.side.receiver.failures.empty());
}

TEST_CASE("transport/ucx: a friendly close that hangs is forced in time", "[transport][fast]") {
  Fixture f;
  contract::Side::Done done;
  REQUIRE(f.send(done).is_ok());
  f.ucp.flush_pending = true;
  const bool drained = GENERATE(false, true);
  if (drained) f.ucp.complete_sends(UCS_OK);
  f.side.peer->close(core::Status(core::Code::kClosed, "goodbye"));
  const auto started = std::chrono::steady_clock::now();
  while (f.ucp.closes == 0 && std::chrono::steady_clock::now() - started < std::chrono::seconds(5)) f.side.progress();
  CHECK(f.ucp.closes == 1);
  for (int i = 0; i < 3; ++i) f.side.progress();
  CHECK(done.count == 1);
  CHECK(f.ucp.closes == 1);
}

TEST_CASE("transport/ucx: a connection that breaks during a friendly close is closed at once", "[transport][fast]") {
  Fixture f;
  contract::Side::Done done;
  REQUIRE(f.send(done).is_ok());
  f.side.peer->close(core::Status(core::Code::kClosed, "goodbye"));
  f.side.progress();
  f.ucp.break_connection(UCS_ERR_CONNECTION_RESET);
  for (int i = 0; i < 3; ++i) f.side.progress();
  CHECK(f.ucp.closes == 1);
  CHECK(done.count == 1);
  CHECK(f.side.receiver.failures.empty());
}

TEST_CASE("transport/ucx: malformed messages are dropped and counted", "[transport][fast]") {
  UcxOptions options = test_options();
  options.payload_bytes_max = 1000;
  Fixture f(options);
  std::array<std::byte, 300> header{};
  std::array<std::byte, 2000> data{};
  for (const std::uint64_t attributes :
       {std::uint64_t{0}, std::uint64_t{UCP_AM_RECV_ATTR_FLAG_DATA}, std::uint64_t{UCP_AM_RECV_ATTR_FLAG_RNDV}}) {
    CHECK(f.ucp.arrive(nullptr, 0, data.data(), 10, attributes) == UCS_OK);
    CHECK(f.ucp.arrive(header.data(), kHeaderBytesMax + 1, data.data(), 10, attributes) == UCS_OK);
    CHECK(f.ucp.arrive(header.data(), 8, data.data(), 1001, attributes) == UCS_OK);
  }
  CHECK(f.counters().dropped_malformed == 9);
  CHECK(f.side.receiver.messages.empty());
  CHECK(f.ucp.receives.empty());
  CHECK(f.ucp.released_data.empty());
  CHECK(f.side.transport->stats().rx_messages == 0);
}

TEST_CASE("transport/ucx: eager data is kept until its holder lets go", "[transport][fast]") {
  Fixture f;
  std::array<std::byte, 8> header{};
  std::array<std::byte, 64> data{};
  f.side.receiver.in_progress = true;
  CHECK(f.ucp.arrive(header.data(), 8, data.data(), 64, UCP_AM_RECV_ATTR_FLAG_DATA) == UCS_INPROGRESS);
  REQUIRE(f.side.receiver.messages.size() == 1);
  CHECK(f.side.receiver.messages[0].payload.data() == data.data());
  CHECK(f.ucp.released_data.empty());
  f.side.receiver.messages.clear();
  CHECK(f.ucp.released_data == std::vector<void*>{data.data()});
  f.ucp.released_data.clear();
  // Dropped at once: the callback's result says so, ucp_am_data_release would free it twice.
  f.side.receiver.hook = [](contract::Recorder::Message& message) { message.payload.reset(); };
  CHECK(f.ucp.arrive(header.data(), 8, data.data(), 64, UCP_AM_RECV_ATTR_FLAG_DATA) == UCS_OK);
  CHECK(f.ucp.released_data.empty());
  CHECK(f.counters().receives_kept == 2);
}

TEST_CASE("transport/ucx: eager data that UCX takes back is copied", "[transport][fast]") {
  Fixture f;
  std::array<std::byte, 8> header{};
  std::vector<std::byte> data(5000);
  contract::fill(data.data(), data.size(), 3);
  CHECK(f.ucp.arrive(header.data(), 8, data.data(), data.size(), 0) == UCS_OK);
  contract::fill(data.data(), data.size(), 4);
  REQUIRE(f.side.receiver.messages.size() == 1);
  CHECK(contract::matches(f.side.receiver.messages[0].payload.data(), data.size(), 3));
  CHECK(f.counters().receive_slots_in_use == 1);
  f.side.receiver.messages.clear();
  CHECK(f.counters().receive_slots_in_use == 0);
  CHECK(f.ucp.released_data.empty());
}

TEST_CASE("transport/ucx: large messages wait for receive memory in turn", "[transport][fast]") {
  UcxOptions options = test_options();
  options.receive_bytes_max = 4 << 20;  // one block: four slots of 1 MiB
  Fixture f(options);
  std::array<std::array<std::byte, 8>, 6> descriptors{};
  constexpr std::size_t kBytes = 1 << 20;
  for (std::uint64_t i = 0; i < 6; ++i) {
    const auto header = numbered(i);
    CHECK(f.ucp.arrive(header.data(), header.size(), descriptors[i].data(), kBytes, UCP_AM_RECV_ATTR_FLAG_RNDV) ==
          UCS_INPROGRESS);
  }
  CHECK(f.ucp.receives.size() == 4);
  CHECK((f.ucp.last_receive.op_attr_mask & UCP_OP_ATTR_FIELD_MEMH) != 0);
  CHECK(f.counters().receives_waited == 2);
  f.ucp.complete_receive(UCS_OK, kBytes);
  f.side.progress();
  REQUIRE(f.side.receiver.messages.size() == 1);
  CHECK(contract::number_of(f.side.receiver.messages[0].header) == 0);
  CHECK(f.side.receiver.messages[0].payload.bytes() == kBytes);
  CHECK(f.ucp.receives.size() == 3);
  f.side.receiver.messages.clear();
  CHECK(f.side.progress() > 0);
  CHECK(f.ucp.receives.size() == 4);
  // A sender that dies meanwhile gives its memory to the next.
  f.ucp.complete_receive(UCS_ERR_CONNECTION_RESET, 0);
  f.side.progress();
  CHECK(f.counters().receives_failed == 1);
  CHECK(f.ucp.receives.size() == 4);
  CHECK(f.side.receiver.messages.empty());
  while (!f.ucp.receives.empty()) f.ucp.complete_receive(UCS_OK, kBytes);
  f.side.progress();
  CHECK(f.side.receiver.messages.size() == 4);
  f.side.receiver.messages.clear();
  CHECK(f.counters().receive_slots_in_use == 0);
}

TEST_CASE("transport/ucx: what still waits at destruction is handed back to UCX", "[transport][fast]") {
  Fixture f;
  f.ucp.map_status = UCS_ERR_NO_MEMORY;
  std::array<std::byte, 8> descriptor{};
  const auto header = numbered(1);
  CHECK(f.ucp.arrive(header.data(), header.size(), descriptor.data(), 100000, UCP_AM_RECV_ATTR_FLAG_RNDV) ==
        UCS_INPROGRESS);
  f.side.transport.reset();
  CHECK(f.ucp.released_data == std::vector<void*>{descriptor.data()});
}

TEST_CASE("transport/ucx: a receive that cannot start is counted", "[transport][fast]") {
  Fixture f;
  f.ucp.receive_status = UCS_ERR_CANCELED;
  std::array<std::byte, 8> descriptor{};
  const auto header = numbered(1);
  CHECK(f.ucp.arrive(header.data(), header.size(), descriptor.data(), 100000, UCP_AM_RECV_ATTR_FLAG_RNDV) ==
        UCS_INPROGRESS);
  CHECK(f.counters().receives_failed == 1);
  CHECK(f.counters().receive_slots_in_use == 0);
}

TEST_CASE("transport/ucx: memory that cannot be registered is out of resources", "[transport][fast]") {
  Fixture f;
  f.ucp.map_status = UCS_ERR_IO_ERROR;
  alignas(64) std::array<std::byte, 64> memory{};
  CHECK(f.side.transport->attach(memory).code() == core::Code::kOutOfResources);
  CHECK(f.side.transport->attach({}).code() == core::Code::kInvalidArgument);
}

TEST_CASE("transport/ucx: arm follows UCX", "[transport][fast]") {
  Fixture f;
  CHECK(f.side.transport->arm());
  f.ucp.arm_status = UCS_ERR_BUSY;
  CHECK_FALSE(f.side.transport->arm());
  f.ucp.arm_status = UCS_ERR_IO_ERROR;
  CHECK_FALSE(f.side.transport->arm());
}

}  // namespace
}  // namespace hybridps::transport
