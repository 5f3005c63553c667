#include "hybridps/engine/interface.h"

#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/transport/interfaces.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {
namespace {

std::string interface_with(const transport::IpBytes& address) {
  for (const transport::InterfaceAddress& at : transport::interface_addresses())
    if (!address.empty() && at.address == address) return at.interface;
  return {};
}

std::string text_of(const char* name, std::string otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? std::string(value) : otherwise;
}

std::string joined(const std::vector<transport::LocalNic>& nics) {
  std::string names;
  for (const transport::LocalNic& nic : nics) names += (names.empty() ? "" : ",") + nic.name;
  return names;
}

/// Whether the user's UCX_TLS allows a transport that uses verbs.
bool allows_rdma(const std::string& tls) {
  if (tls.empty() || tls.front() == '^') return true;
  for (const char* name : {"all", "ib", "rc", "dc", "ud"})
    if (("," + tls).find(std::string(",") + name) != std::string::npos) return true;
  return false;
}

bool is_tcp(core::DataTransport wanted) noexcept {
  return wanted == core::DataTransport::kTcp || wanted == core::DataTransport::kUcx;
}

}  // namespace

std::string interface_to(const std::string& host, std::string* address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return {};
  std::string name;
  if (address != nullptr) {
    std::array<char, NI_MAXHOST> text{};
    if (getnameinfo(found->ai_addr, found->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0)
      *address = text.data();
  }
  for (const addrinfo* at = found; at != nullptr && name.empty(); at = at->ai_next) {
    // Connecting a datagram socket sends nothing: it only asks the routing table.
    const int fd = socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    if (connect(fd, at->ai_addr, at->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0)
      name = interface_with(transport::ip_bytes(reinterpret_cast<const sockaddr*>(&own)));
    close(fd);
  }
  freeaddrinfo(found);
  return name;
}

ControlChoice choose_control(const ControlNetwork& network) {
  const auto is_loopback = [&](const std::string& name) {
    return std::find(network.loopbacks.begin(), network.loopbacks.end(), name) != network.loopbacks.end();
  };
  if (!network.named.empty()) return {network.named, "HYBRIDPS_INTERFACE"};
  if (!network.hint.empty()) return {network.hint, "it has the address to listen on"};
  const bool local_master = !network.to_master.empty() && is_loopback(network.to_master);
  if (!network.to_master.empty() && !local_master)
    return {network.to_master, "it routes to MASTER_ADDR=" + network.master};
  const std::string master = "MASTER_ADDR=" + network.master;
  // A user who writes one of these means this machine only.
  for (const char* here : {"localhost", "127.0.0.1", "::1"})
    if (local_master && network.master == here) return {network.to_master, master};
  if (local_master && network.one_machine) return {network.to_master, "all ranks are on this machine"};
  const std::string since = local_master             ? master + " resolves to " + network.master_address
                            : network.master.empty() ? std::string("MASTER_ADDR is not set")
                                                     : master + " has no address, or no route to it";
  if (!network.to_default.empty() && !is_loopback(network.to_default))
    return {network.to_default, "the default route's, since " + since};
  if (network.others.size() == 1) return {network.others[0], "the only one, since " + since};
  std::string several;
  for (const std::string& name : network.others) several += (several.empty() ? "" : ", ") + name;
  return {local_master                ? network.to_master
          : network.loopbacks.empty() ? "lo"
                                      : network.loopbacks[0],
          since + (several.empty() ? ", and there is no other interface"
                                   : ", and which of the other interfaces is meant cannot be told (" + several + ")")};
}

namespace {

ControlNetwork control_network(const core::Config& config, const std::string& hint) {
  ControlNetwork network;
  network.named = config.interface;
  network.hint = hint;
  network.master = text_of("MASTER_ADDR", "");
  const std::string world = text_of("WORLD_SIZE", "");
  network.one_machine = !world.empty() && world == text_of("LOCAL_WORLD_SIZE", "");
  if (!network.named.empty() || !hint.empty()) return network;
  if (!network.master.empty()) network.to_master = interface_to(network.master, &network.master_address);
  network.to_default = interface_to("192.0.2.1");  // TEST-NET: stands for any address on another network
  network.loopbacks.clear();
  const auto add = [](std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const transport::InterfaceAddress& at : transport::interface_addresses()) {
    const bool up = (at.flags & IFF_UP) != 0 && (at.flags & IFF_RUNNING) != 0;
    if ((at.flags & IFF_LOOPBACK) != 0) {
      add(network.loopbacks, at.interface);
    } else if (up && !at.address.empty()) {
      // Link-local addresses (169.254, fe80 to febf) are valid on their own link only.
      const unsigned start = static_cast<unsigned>(at.address[0] << 8 | at.address[1]);
      if (at.address.size() == 4 ? start != 0xa9fe : (start & 0xffc0) != 0xfe80) add(network.others, at.interface);
    }
  }
  return network;
}

/// Finds out whether UCX has verbs. Loads UCX only if the answer matters.
void ask_for_verbs(DataNetwork& network) {
  if (is_tcp(network.wanted) || (network.ports.empty() && !transport::names_rdma(network.named))) return;
  if (const core::Status status = transport::need_ucx(); !status.is_ok()) {
    network.ucx = "UCX (" + std::string(status.message()) + ")";
    return;
  }
  network.ucx_has_verbs = transport::ucx_has_verbs(transport::ucx_library_path());
  network.ucx = "UCX " + transport::ucx_version() + " (" + transport::ucx_library_path() + ")";
}

}  // namespace

LocalRank local_rank() {
  return {std::atoi(text_of("LOCAL_RANK", "0").c_str()), std::atoi(text_of("LOCAL_WORLD_SIZE", "1").c_str())};
}

std::string Interfaces::data() const { return joined(nics); }
std::string DataChoice::devices() const { return joined(nics); }

core::Result<DataChoice> choose_data(const DataNetwork& network) {
  DataChoice choice;
  const auto known = [&](const std::string& name) {
    for (const transport::LocalNic& nic : network.nics)
      if (nic.name == name) return nic;
    transport::LocalNic nic;
    nic.name = name;
    return nic;
  };
  choice.nics = {known(network.control)};
  choice.why = "the control interface";
  std::string seen;
  for (const transport::RdmaPort& port : network.ports) seen += (seen.empty() ? "" : ", ") + port.describe();
  const std::string no_verbs = network.ucx +
                               " has no verbs; install one that has (Debian, Ubuntu: libucx0 with ibverbs-providers, "
                               "docs/rdma.md)";
  const auto refuse = [](std::string why) { return core::Status(core::Code::kUnsupported, std::move(why)); };

  if (!network.named.empty()) {
    choice.nics.clear();
    for (const std::string& name : transport::device_names(network.named)) choice.nics.push_back(known(name));
    choice.why = network.users ? "UCX_NET_DEVICES" : "HYBRIDPS_DATA_INTERFACES";
    choice.rdma = transport::names_rdma(network.named);
    for (const transport::RdmaPort& port : network.ports)
      if (network.named == port.name.substr(0, port.name.rfind(':'))) choice.rdma = true;
    if (choice.rdma && is_tcp(network.wanted))
      return refuse("HYBRIDPS_DATA_TRANSPORT=tcp or ucx, but the data interfaces name RDMA ports (" + network.named +
                    ")");
    if (!choice.rdma && network.wanted == core::DataTransport::kRdma)
      return refuse("HYBRIDPS_DATA_TRANSPORT=rdma, but the data interfaces name none of the RDMA ports (" +
                    network.named + "); here are: " + (seen.empty() ? "none" : seen));
    if (choice.rdma && !network.ucx_has_verbs)
      return refuse("data is to go over RDMA (" + network.named + "), but " + no_verbs + ", or name an IP interface");
    if (network.users || choice.nics.size() < 2) return choice;
    std::vector<int> distances;
    std::string each;
    for (const transport::LocalNic& nic : choice.nics) {
      distances.push_back(nic.distance);
      each += (each.empty() ? "" : ", ") + nic.name + (nic.distance < 0 ? "" : " " + std::to_string(nic.distance));
    }
    std::vector<transport::LocalNic> nearest;
    for (const std::size_t at : transport::nearest_of(distances, network.place.rank, network.place.size, true))
      nearest.push_back(choice.nics[at]);
    const bool alike = std::all_of(distances.begin(), distances.end(), [&](int d) { return d == distances[0]; });
    if (nearest.size() < choice.nics.size())
      choice.why = (alike ? "local rank " + std::to_string(network.place.rank) + "'s of " + each + ", all as near"
                          : "nearest to " + network.nearest_to + " (distances: " + each + ")");
    choice.nics = std::move(nearest);
    return choice;
  }
  if (is_tcp(network.wanted)) return choice;
  const std::string nearest = transport::nearest_ports(network.ports, network.place.rank, network.place.size);
  if (nearest.empty()) {
    if (network.wanted == core::DataTransport::kRdma)
      return refuse(
          "HYBRIDPS_DATA_TRANSPORT=rdma, but this machine has no RDMA port that is active and has an address; "
          "here are: " +
          (seen.empty() ? "none" : seen));
    return choice;
  }
  if (!network.ucx_has_verbs) {
    if (network.wanted == core::DataTransport::kRdma)
      return refuse("HYBRIDPS_DATA_TRANSPORT=rdma and RDMA is here (" + seen + "), but " + no_verbs);
    choice.warning = "this machine has RDMA (" + seen + "), but data goes over TCP on " + network.control + ": " +
                     no_verbs + ", or set HYBRIDPS_DATA_TRANSPORT=tcp";
    return choice;
  }
  if (network.wanted == core::DataTransport::kAuto && !allows_rdma(network.ucx_tls)) return choice;
  choice.nics.clear();
  for (const std::string& name : transport::device_names(nearest)) choice.nics.push_back(known(name));
  choice.why = "nearest RDMA to " + network.nearest_to;
  choice.rdma = true;
  return choice;
}

core::Result<Interfaces> choose_interfaces(const core::Config& config, const std::string& hint, LocalRank place) {
  Interfaces chosen;
  std::string missing;
  transport::interface_addresses(&missing);
  if (!missing.empty())
    return core::Status(core::Code::kUnsupported,
                        (config.interface.empty() ? "" : "HYBRIDPS_INTERFACE=" + config.interface + ": ") + missing);
  const ControlChoice control = choose_control(control_network(config, hint));
  chosen.control = control.name;
  chosen.control_why = control.why;

  const transport::Locality here = transport::own_locality(place.rank, place.size);
  DataNetwork network;
  network.wanted = config.data_transport;
  const bool needs_tcp = config.tls || config.checksum;
  const auto needs_our_tcp = [&](const std::string& why) {
    return core::Status(core::Code::kInvalidArgument,
                        std::string(config.tls ? "HYBRIDPS_SECURITY=tls encrypts" : "HYBRIDPS_CHECKSUM=1 checks") +
                            " hybridps's own TCP only, and " + why);
  };
  if (needs_tcp && (network.wanted == core::DataTransport::kRdma || network.wanted == core::DataTransport::kUcx))
    return needs_our_tcp("HYBRIDPS_DATA_TRANSPORT asks for another transport; set it to tcp, or unset it");
  if (needs_tcp) network.wanted = core::DataTransport::kTcp;
  network.control = chosen.control;
  const std::string users = text_of("HYBRIDPS_UCX_NET_DEVICES", text_of("UCX_NET_DEVICES", ""));
  network.users = !users.empty();
  network.named = network.users ? users : config.data_interfaces;
  if (network.named == "all") network.named.clear();
  network.ucx_tls = text_of("HYBRIDPS_UCX_TLS", text_of("UCX_TLS", ""));
  network.ports = transport::list_rdma_ports(transport::own_gids(), here);
  ask_for_verbs(network);
  network.place = place;
  network.nearest_to = here.text;
  std::vector<std::string> names = transport::device_names(network.named);
  if (!config.data_interfaces.empty()) {
    core::Status status = transport::validate_device(config.data_interfaces);
    if (status.is_ok() && !network.users) status = transport::check_together(transport::describe_nics(names, here));
    if (!status.is_ok())
      return core::Status(status.code(), "HYBRIDPS_DATA_INTERFACES: " + std::string(status.message()));
  }
  const std::size_t named = names.size();
  names.push_back(network.control);
  network.nics = transport::describe_nics(names, here);
  chosen.control_nic = network.nics.back();

  const std::vector<double>& rates = config.nic_gbps;
  if (rates.size() == 1) chosen.node_gbps = rates[0];
  if (rates.size() > 1 && rates.size() != named)
    return core::Status(core::Code::kInvalidArgument,
                        "HYBRIDPS_NIC_GBPS has " + std::to_string(rates.size()) + " rates for " +
                            std::to_string(named) +
                            " data interfaces; give one for the whole machine, or one for each of "
                            "HYBRIDPS_DATA_INTERFACES");
  if (rates.size() > 1)
    for (std::size_t i = 0; i < named; ++i) network.nics[i].gbps = rates[i];

  core::Result<DataChoice> data = choose_data(network);
  if (!data.is_ok()) return data.status();
  chosen.nics = data.value().nics;
  chosen.rdma = data.value().rdma;
  chosen.users = network.users;
  // Our own TCP finds a card by its address, so every card needs an address that is valid on other hosts. Otherwise
  // data goes through UCX. A user who tunes UCX's TCP wants UCX's TCP.
  const auto has_address = [](const transport::LocalNic& nic) { return !nic.address.empty() && !nic.network.empty(); };
  chosen.ucx = chosen.rdma || chosen.users || network.wanted == core::DataTransport::kUcx ||
               (network.wanted == core::DataTransport::kAuto && transport::tcp_is_tuned_by_user()) ||
               !std::all_of(chosen.nics.begin(), chosen.nics.end(), has_address);
  chosen.control_ucx = chosen.ucx || !has_address(chosen.control_nic);
  if (needs_tcp && chosen.control_ucx) {
    if (!config.interface.empty() && !chosen.users)
      if (const core::Status status = transport::validate_device(config.interface); !status.is_ok())
        return core::Status(status.code(), "HYBRIDPS_INTERFACE: " + std::string(status.message()));
    return needs_our_tcp(chosen.users ? "UCX_NET_DEVICES or HYBRIDPS_UCX_NET_DEVICES asks for UCX; unset it"
                                      : "a card without an IP address that other hosts can reach needs UCX; choose "
                                        "cards by HYBRIDPS_INTERFACE and HYBRIDPS_DATA_INTERFACES");
  }
  chosen.why = data.value().why;
  chosen.with_control = network.named.empty()
                            ? !chosen.rdma
                            : std::find(names.begin(), names.end() - 1, chosen.control) != names.end() - 1;
  const auto data_on_loopback =
      std::find_if(chosen.nics.begin(), chosen.nics.end(), [](const transport::LocalNic& nic) { return nic.loopback; });
  if (chosen.control_nic.loopback)
    chosen.loopback = "its control uses " + chosen.control + ": " + chosen.control_why;
  else if (data_on_loopback != chosen.nics.end())
    chosen.loopback = "its data uses " + data_on_loopback->name + ": " + chosen.why;
  static std::atomic<bool> warned{false};
  if (!data.value().warning.empty() && network.place.rank == 0 && !warned.exchange(true))
    core::log_warn(data.value().warning);
  if (named > 1) core::log_debug("data through ", chosen.data(), ": ", chosen.why);
  if (chosen.rdma) {
    std::string ports;
    for (const transport::RdmaPort& port : network.ports)
      if (("," + chosen.data() + ",").find("," + port.name + ",") != std::string::npos) ports += " " + port.describe();
    core::log_info("data over RDMA:", ports, ", ", network.ucx);
  }
  return chosen;
}

}  // namespace hybridps::engine
