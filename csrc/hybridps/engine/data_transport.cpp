#include "hybridps/engine/data_transport.h"

#include <algorithm>
#include <utility>

#include "hybridps/core/text.h"
#include "hybridps/transport/rails.h"
#include "hybridps/transport/ucx/ucx_transport.h"

namespace hybridps::engine {

core::Result<std::unique_ptr<transport::Transport>> make_data_transport(const Interfaces& interfaces,
                                                                        transport::UcxOptions options,
                                                                        std::int64_t sockets) {
  std::vector<transport::Rail> rails;
  const auto add = [&](transport::RailInfo info, const std::string& device, std::string label) {
    options.net_device = device;
    options.label = std::move(label);
    core::Result<std::unique_ptr<transport::UcxTransport>> made = transport::UcxTransport::create(options);
    if (!made.is_ok()) return made.status();
    rails.push_back({std::move(info), std::move(made).value()});
    return core::Status::ok();
  };
  core::Status status;
  const bool together = interfaces.rdma || interfaces.users;
  const auto nics = static_cast<std::int64_t>(interfaces.nics.size());
  if (!together)
    sockets = std::min(sockets, static_cast<std::int64_t>(transport::kRailsMax) / std::max<std::int64_t>(nics, 1));
  if (together || (nics == 1 && sockets == 1)) {
    transport::RailInfo info;
    info.name = interfaces.data();
    if (nics == 1) {
      info.address = interfaces.nics[0].address;
      info.network = interfaces.nics[0].network;
    }
    status = add(std::move(info), interfaces.data(), "data");
  } else {
    // In the order of cards, several times: what joins lanes by place finds the same card each time.
    for (std::int64_t socket = 0; socket < sockets; ++socket)
      for (const transport::Nic& nic : interfaces.nics)
        if (status.is_ok())
          status = add({nic.name, nic.address, nic.network, nic.gbps / static_cast<double>(sockets), {}}, nic.name,
                       "data " + nic.name);
  }
  if (!status.is_ok()) return status;
  return transport::make_rails(std::move(rails));
}

std::vector<bootstrap::Nic> to_record(const std::vector<transport::Nic>& nics) {
  std::vector<bootstrap::Nic> records;
  for (const transport::Nic& nic : nics) records.push_back({nic.name, nic.network, nic.gbps});
  return records;
}

std::string text_of(const Interfaces& interfaces) {
  std::string text = "data=" + interfaces.data() + (interfaces.rdma ? "(rdma)" : "");
  text += " control=" + interfaces.control;
  const bool all =
      std::all_of(interfaces.nics.begin(), interfaces.nics.end(), [](const auto& n) { return n.gbps > 0; });
  if (interfaces.node_gbps > 0)
    return text + " rate=" + core::format_double(interfaces.node_gbps) + "Gbit/s(HYBRIDPS_NIC_GBPS)";
  if (!all) return text;
  std::string rates;
  for (const transport::Nic& nic : interfaces.nics) rates += (rates.empty() ? "" : "+") + core::format_double(nic.gbps);
  return text + " rate=" + rates + "Gbit/s";
}

}  // namespace hybridps::engine
