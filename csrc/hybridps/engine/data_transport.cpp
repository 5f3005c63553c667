#include "hybridps/engine/data_transport.h"

#include <algorithm>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/runtime_options.h"
#include "hybridps/transport/cards.h"
#include "hybridps/transport/tcp/tcp_transport.h"
#include "hybridps/transport/ucx/locality.h"
#include "hybridps/transport/ucx/ucx_transport.h"

namespace hybridps::engine {
namespace {

using MadeTransport = core::Result<std::unique_ptr<transport::Transport>>;

template <typename Made>
MadeTransport as_transport(core::Result<std::unique_ptr<Made>> made) {
  if (!made.is_ok()) return made.status();
  return std::unique_ptr<transport::Transport>(std::move(made).value());
}

MadeTransport make_ucx(const std::string& device, std::string label, const DataOptions& from) {
  transport::UcxOptions options;
  options.net_device = device;
  options.label = std::move(label);
  options.close_timeout = from.close_timeout;
  options.tcp_user_timeout = from.user_timeout;
  options.device_memory = from.device_memory;
  options.payload_bytes_max = from.payload_bytes_max;
  return as_transport(transport::UcxTransport::create(options));
}

MadeTransport make_tcp(const std::string& address, std::string label, const DataOptions& from) {
  transport::TcpOptions options;
  options.address = address;
  options.label = std::move(label);
  options.close_timeout = from.close_timeout;
  options.redial_for = from.patience;
  options.port_first = from.ports.first;
  options.port_last = from.ports.last;
  options.congestion = from.tcp_congestion;
  options.bytes_per_second_max = from.tcp_gbps * 1e9 / 8;
  options.dscp = from.dscp;
  options.authority = from.authority;
  options.kernel_tls = from.kernel_tls;
  options.checksums = from.damaged != nullptr;
  options.damaged = from.damaged;
  options.payload_bytes_max = from.payload_bytes_max;
  return as_transport(transport::TcpTransport::create(options));
}

}  // namespace

DataOptions data_options(const core::Config& config, core::Duration close_timeout,
                         std::shared_ptr<const tls::Authority> authority) {
  DataOptions options;
  options.authority = std::move(authority);
  options.kernel_tls = config.kernel_tls;
  if (config.checksum && !config.tls) options.damaged = std::make_shared<std::atomic<std::uint64_t>>(0);
  options.close_timeout = close_timeout;
  options.user_timeout = std::max(options.user_timeout, core::from_seconds(2 * config.dead_seconds));
  options.patience = core::from_seconds(config.dead_seconds);
  options.ports = config.ports;
  options.tcp_congestion = config.tcp_congestion;
  options.tcp_gbps = config.tcp_gbps;
  options.dscp = static_cast<int>(config.dscp);
  options.payload_bytes_max = std::max(kTextBytesMax, RuntimeOptions::of(config, {}).chunk_bytes);
  return options;
}

std::size_t listeners_of(const Interfaces& interfaces, const DataOptions& options, std::int64_t sockets) {
  const auto cards = std::max<std::size_t>(interfaces.nics.size(), 1);
  const std::size_t of_data =
      interfaces.ucx ? 0 : cards * static_cast<std::size_t>(sockets_of(interfaces, options, sockets));
  return of_data + (interfaces.control_ucx ? 0 : 1);
}

core::Status check_ports(const core::PortRange& ports, std::size_t ranks, std::size_t of_each) {
  const std::size_t needed = ranks * of_each;
  if (ports.first == 0 || ports.size() >= needed) return core::Status::ok();
  return {core::Code::kInvalidArgument,
          "HYBRIDPS_PORTS has " + std::to_string(ports.size()) + " ports, and " + std::to_string(needed) +
              " are needed on this machine: " + std::to_string(of_each) + " for each of " + std::to_string(ranks) +
              " ranks (one for control, the others for data)"};
}

core::Result<std::unique_ptr<transport::Transport>> DataThreads::drive(
    std::unique_ptr<transport::Transport> transport, const std::shared_ptr<transport::Handover>& handover,
    const std::filesystem::path& card) {
  if (plan_.most == 0) return transport;
  if (static_cast<std::int64_t>(threads_.size()) < plan_.most) {
    transport::TransportThreadOptions options;
    options.name = "hybridps-data" + std::to_string(threads_.size());
    options.spinning = spinning_;
    if (!card.empty()) options.cpus = transport::cpus_near(card);
    options.cpus_needed = plan_.on_machine;
    options.when_needed = plan_.when_busy;
    auto thread = transport::start_transport_thread(std::move(options));
    if (!thread.is_ok()) return thread.status();
    threads_.push_back(std::move(thread).value());
  }
  return transport::make_threaded(std::move(transport), threads_[next_++ % threads_.size()], handover);
}

std::shared_ptr<transport::Handover> DataThreads::make_handover() const {
  return plan_.when_busy ? std::make_shared<transport::Handover>() : nullptr;
}

void DataThreads::warn_of_idle() const {
  if (!plan_.when_busy && static_cast<std::int64_t>(threads_.size()) < plan_.most)
    core::log_warn(
        "HYBRIDPS_LIMITS=data_threads=", plan_.most, ": there is work for ", threads_.size(),
        " only, one for each connection and network card; lower it, or raise HYBRIDPS_DATA_SOCKETS (TCP only)");
}

std::int64_t sockets_of(const Interfaces& interfaces, const DataOptions& options, std::int64_t sockets) {
  if (interfaces.rdma || interfaces.users) return 1;
  const auto nics = std::max<std::int64_t>(static_cast<std::int64_t>(interfaces.nics.size()), 1);
  const std::int64_t wanted = interfaces.ucx ? sockets : std::max(sockets, options.sockets_to_choose);
  return std::max<std::int64_t>(1, std::min(wanted, static_cast<std::int64_t>(transport::kCardsMax) / nics));
}

core::Result<std::unique_ptr<transport::Transport>> make_data_transport(const Interfaces& interfaces,
                                                                        const DataOptions& options,
                                                                        std::int64_t sockets, DataThreads& threads) {
  std::vector<transport::Card> cards;
  const std::shared_ptr<transport::Handover> handover = threads.make_handover();
  const auto add = [&](transport::CardInfo info, const std::string& device, std::string label) {
    core::Result<std::unique_ptr<transport::Transport>> made = interfaces.ucx
                                                                   ? make_ucx(device, std::move(label), options)
                                                                   : make_tcp(info.address, std::move(label), options);
    if (!made.is_ok()) return made.status();
    std::filesystem::path at;
    if (!interfaces.ucx) at = std::filesystem::path("/sys/class/net") / device / "device";
    core::Result<std::unique_ptr<transport::Transport>> driven = threads.drive(std::move(made).value(), handover, at);
    if (!driven.is_ok()) return driven.status();
    cards.push_back({std::move(info), std::move(driven).value()});
    return core::Status::ok();
  };
  core::Status status;
  const bool together = interfaces.rdma || interfaces.users;
  const auto nics = static_cast<std::int64_t>(interfaces.nics.size());
  const std::int64_t used = sockets;
  sockets = sockets_of(interfaces, options, sockets);
  if (together || (nics == 1 && sockets == 1)) {
    transport::CardInfo info;
    info.name = interfaces.data();
    if (nics == 1) {
      info.address = interfaces.nics[0].address;
      info.network = interfaces.nics[0].network;
    }
    status = add(std::move(info), interfaces.data(), "data");
  } else {
    // All cards in order, once for each socket: so pairing by place finds the same card for every socket.
    for (std::int64_t socket = 0; socket < sockets; ++socket)
      for (const transport::LocalNic& nic : interfaces.nics)
        if (status.is_ok())
          status = add({nic.name, nic.address, nic.network, nic.gbps / static_cast<double>(sockets), {}}, nic.name,
                       "data " + nic.name);
  }
  if (!status.is_ok()) return status;
  return transport::join_cards(std::move(cards), static_cast<std::size_t>(sockets), static_cast<std::size_t>(used));
}

core::Result<std::unique_ptr<transport::Transport>> make_control_transport(const Interfaces& interfaces,
                                                                           const DataOptions& options) {
  if (!interfaces.control_ucx) return make_tcp(interfaces.control_nic.address, "control", options);
  transport::UcxOptions control;
  control.net_device = interfaces.control;
  control.tcp_only = true;
  control.label = "control";
  control.close_timeout = options.close_timeout;
  control.payload_bytes_max = options.payload_bytes_max;
  return as_transport(transport::UcxTransport::create(control));
}

std::vector<bootstrap::Nic> to_record(const std::vector<transport::LocalNic>& nics) {
  std::vector<bootstrap::Nic> records;
  for (const transport::LocalNic& nic : nics) records.push_back({nic.name, nic.network, nic.gbps});
  return records;
}

std::string text_of_transport(const Interfaces& interfaces, const core::Config& config) {
  if (interfaces.rdma) return "RDMA";
  if (interfaces.ucx) return "TCP through UCX";
  if (config.tls && config.certificate_paths.any()) return "TCP with TLS by certificates";
  return config.tls ? "TCP with TLS" : config.checksum ? "TCP with checksums" : "TCP";
}

std::string text_of(const Interfaces& interfaces) {
  std::string text = "data=" + interfaces.data() + (interfaces.rdma ? "(rdma)" : interfaces.ucx ? "(ucx)" : "");
  text += " control=" + interfaces.control;
  const bool all =
      std::all_of(interfaces.nics.begin(), interfaces.nics.end(), [](const auto& n) { return n.gbps > 0; });
  if (interfaces.node_gbps > 0)
    return text + " rate=" + core::format_double(interfaces.node_gbps) + "Gbit/s(HYBRIDPS_NIC_GBPS)";
  if (!all) return text;
  std::string rates;
  for (const transport::LocalNic& nic : interfaces.nics)
    rates += (rates.empty() ? "" : "+") + core::format_double(nic.gbps);
  return text + " rate=" + rates + "Gbit/s";
}

}  // namespace hybridps::engine
