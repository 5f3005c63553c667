#include "hybridps/engine/data_transport.h"

#include <sys/wait.h>
#include <unistd.h>

#include "hybridps/transport/loopback/loopback_transport.h"
#include "hybridps/transport/cards.h"
#include "tests/support/catch.h"
#include "tests/support/no_threads.h"

namespace {

using namespace hybridps;
using engine::DataThreads;

/// Of one card with two sockets. In a child: a process that has used UCX has no children that may.
int transports_of(bool rdma, bool users, bool ucx = false) {
  const pid_t child = fork();
  if (child == 0) {
    engine::Interfaces interfaces;
    interfaces.nics.resize(1);
    interfaces.nics[0].name = "lo";
    interfaces.rdma = rdma;
    interfaces.users = users;
    interfaces.ucx = rdma || users || ucx;
    interfaces.nics[0].address = "127.0.0.1";
    DataThreads none(engine::DataThreadsPlan{}, core::Spinning::always({}));
    const auto made = engine::make_data_transport(interfaces, {}, 2, none);
    _exit(made.is_ok() ? static_cast<int>(transport::decode_cards(made.value()->address()).value().size()) : 0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

}  // namespace

TEST_CASE("engine/data_transport: a card has a transport for each socket, but for RDMA and what the user named for UCX",
          "[engine][fast]") {
  CHECK(transports_of(/*rdma=*/false, /*users=*/false) == 2);
  CHECK(transports_of(/*rdma=*/false, /*users=*/false, /*ucx=*/true) == 2);
  CHECK(transports_of(/*rdma=*/false, /*users=*/true) == 1);
  CHECK(transports_of(/*rdma=*/true, /*users=*/false) == 1);
}

TEST_CASE("engine/data_transport: no message is larger than the slots here, or a text", "[engine][fast]") {
  core::Config config;
  const auto limit = [&] { return engine::data_options(config, core::from_seconds(1), nullptr).payload_bytes_max; };
  CHECK(limit() == engine::kTextBytesMax);
  config.chunk_bytes = std::size_t{2} << 20;
  CHECK(limit() == config.chunk_bytes);
}

TEST_CASE("engine/data_transport: a thread that cannot be started is said", "[engine][fast]") {
  CHECK(test::holds_without_threads([] {
    transport::LoopbackHub hub;
    DataThreads threads(engine::DataThreadsPlan{1}, core::Spinning::always({}));
    const core::Status status = threads.drive(hub.make_transport(core::EngineId{1})).status();
    return status.code() == core::Code::kOutOfResources &&
           status.message().find("hybridps-data0") != std::string_view::npos;
  }));
}
