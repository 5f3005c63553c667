// scale_model: times of allreduces on more nodes than a machine can hold, by flows over cards, uplinks and ranks.
//
//   benchmarks/scale/run model [options]
//
// The plans are the real ones (schedule/plan.h), and every rank of them is counted (flows.h). A time is the busiest
// card, uplink or rank, and the latency of the steps. It is a least time: queues, sums and the cost of a byte are left
// out.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/scale/flows.h"
#include "benchmarks/scale/report.h"
#include "hybridps/schedule/shares.h"

namespace {

using namespace hybridps;
using scale::number;

struct Options {
  std::vector<int> nodes = {8, 64, 256, 1024, 10000};
  std::vector<std::uint64_t> bytes = {64, 64 << 10, 16 << 20, 64 << 20, 1 << 30};
  int each = 8;
  int rack = 32;
  int servers = 0;
  double spine = 4;
  double gbps = 10;
  double latency_us = 30;
  double message_us = 3;
  std::string output;
};

struct Case {
  scale::Loads loads;
  scale::Estimate estimate;
  std::uint64_t messages_most = 0;  // of any rank or server, both ways
  int busiest = 0;                  // who has them
  std::size_t peers = 0;            // that it exchanges them with
};

/// The nodes, and the servers, in racks of Options::rack.
struct Place {
  Place(const Options& options, int nodes) : topology(node_of(nodes, options.each), 0) {
    for (int node = 0; node < nodes; ++node) rack_of.push_back(node / options.rack);
    const int racks = 1 + rack_of.back();
    std::vector<int> rack_of_server;
    if (options.servers > 0) {
      const auto of = [](int count) { return std::vector<double>(static_cast<std::size_t>(count), 1.0); };
      const schedule::Shares shares = schedule::optimal_shares(of(nodes), of(options.servers));
      topology = schedule::Topology(node_of(nodes, options.each), 0, shares.worker, shares.dedicated);
      for (int server = 0; server < options.servers; ++server) rack_of_server.push_back(server % racks);
    }
    with_levels = racks > 1 ? topology.with_regions(rack_of) : topology;
    if (racks > 1 && options.servers > 0) with_levels = with_levels.with_server_regions(rack_of_server);
    rack_of.insert(rack_of.end(), rack_of_server.begin(), rack_of_server.end());
  }
  static std::vector<int> node_of(int nodes, int each) {
    std::vector<int> result;
    for (int rank = 0; rank < nodes * each; ++rank) result.push_back(rank / each);
    return result;
  }

  schedule::Topology topology;
  schedule::Topology with_levels = topology;
  std::vector<int> rack_of;
};

schedule::Request request_of(std::uint64_t bytes, const schedule::Topology& topology) {
  schedule::Request request;
  request.kind = schedule::Kind::kAllReduce;
  request.dtype = core::DType::kFloat32;
  request.sequence = 1;
  request.total_bytes = bytes;
  request.may_have_levels = topology.regions() > 1;
  return request;
}

schedule::Limits limits_of(const schedule::Topology& topology) {
  schedule::Limits limits;
  limits.chunk_bytes = schedule::chunk_bytes_for(topology, limits.chunk_bytes);
  return limits;
}

Case solve(std::uint64_t bytes, const schedule::Topology& topology, const Place& place, const scale::Links& links) {
  Case result;
  result.loads = scale::count_loads(request_of(bytes, topology), topology, limits_of(topology), place.rack_of);
  result.estimate = scale::estimate(result.loads, place.rack_of, links);
  for (std::size_t member = 0; member < result.loads.members.size(); ++member) {
    if (result.loads.members[member].network() <= result.messages_most) continue;
    result.messages_most = result.loads.members[member].network();
    result.busiest = static_cast<int>(member);
  }
  result.peers = scale::count_peers(request_of(bytes, topology), topology, limits_of(topology), result.busiest);
  return result;
}

/// What cards and uplinks allow any algorithm, with two steps.
double limit(std::uint64_t bytes, const Options& options, int nodes, const Place& place, const scale::Links& links) {
  if (nodes < 2) return 0;
  const std::vector<double> cards(static_cast<std::size_t>(nodes), 1.0);
  const std::vector<double> servers(static_cast<std::size_t>(options.servers), 1.0);
  const double size = static_cast<double>(bytes) / links.card_bytes_per_second;
  double seconds = schedule::optimal_shares(cards, servers).time * size;
  const int racks = place.with_levels.regions();
  if (racks > 1 && options.servers == 0) {
    std::vector<double> uplinks;
    for (int rack = 0; rack < racks; ++rack)
      uplinks.push_back(static_cast<double>(place.with_levels.nodes_in(rack).size()) / links.oversubscribed);
    seconds = std::max(seconds, schedule::optimal_shares(uplinks).time * size);
  }
  return seconds + 2 * links.latency_seconds;
}

std::string short_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

std::string text_of(const scale::Estimate& estimate) {
  return number(estimate.seconds * 1e3) + " " + std::string(estimate.bound);
}

std::uint64_t most(const std::vector<std::uint64_t>& values) { return *std::max_element(values.begin(), values.end()); }

void run(const Options& options) {
  const scale::Links links{options.gbps * 1e9 / 8, options.latency_us * 1e-6, options.spine, options.message_us * 1e-6};
  scale::Report report("scale-model", "Times by the model of flows");
  scale::Table times{"ms of an allreduce and what it waits for; " + std::to_string(options.each) + " ranks a node, " +
                         short_text(options.gbps) + " Gbit/s, " + short_text(options.latency_us) + " us a step, " +
                         short_text(options.message_us) + " us a message, racks of " + std::to_string(options.rack) +
                         " nodes, uplinks " + short_text(options.spine) + ":1, " + std::to_string(options.servers) +
                         " servers",
                     {"nodes", "size", "limit", "direct", "with racks as regions", "same, uplinks 1:1"}};
  scale::Table counts{
      "Counts of the same",
      {"nodes", "size", "spans", "messages of the busiest rank: direct, regions", "its peers: direct, regions",
       "MiB on the busiest uplink: direct, "
       "regions"}};
  for (const int nodes : options.nodes) {
    const Place place(options, nodes);
    for (const std::uint64_t bytes : options.bytes) {
      const auto began = std::chrono::steady_clock::now();
      const Case direct = solve(bytes, place.topology, place, links);
      const Case levels = solve(bytes, place.with_levels, place, links);
      scale::Links full = links;
      full.oversubscribed = 1;
      times.rows.push_back({std::to_string(nodes), scale::bytes_text(bytes),
                            number(limit(bytes, options, nodes, place, links) * 1e3), text_of(direct.estimate),
                            text_of(levels.estimate), text_of(scale::estimate(direct.loads, place.rack_of, full))});
      const auto mib = [](const Case& of) {
        return number(static_cast<double>(std::max(most(of.loads.rack_sent), most(of.loads.rack_received))) / 1048576);
      };
      counts.rows.push_back({std::to_string(nodes), scale::bytes_text(bytes), std::to_string(direct.loads.spans),
                             std::to_string(direct.messages_most) + ", " + std::to_string(levels.messages_most),
                             std::to_string(direct.peers) + ", " + std::to_string(levels.peers),
                             mib(direct) + ", " + mib(levels)});
      std::fprintf(stderr, "%d nodes, %s: %.1f s\n", nodes, scale::bytes_text(bytes).c_str(),
                   std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }
  }
  report.add(std::move(times));
  report.add(std::move(counts));
  if (!options.output.empty()) report.write(options.output);
}

std::vector<std::string> parts_of(const std::string& list) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    parts.push_back(list.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

double positive(const std::string& text, const std::string& what) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !(value > 0) || value > 1e12)
    throw std::invalid_argument(what + ": not a number above 0: " + text);
  return value;
}

int whole(const std::string& text, const std::string& what, int most) {
  const double value = positive(text, what);
  if (value < 1 || value > most || value != static_cast<int>(value))
    throw std::invalid_argument(what + ": not a whole number from 1 to " + std::to_string(most) + ": " + text);
  return static_cast<int>(value);
}

/// "64K", "16M", "1G", "64".
std::uint64_t size_in(std::string text, const std::string& what) {
  std::uint64_t unit = 1;
  if (const std::size_t at = std::string("KMG").find(text.empty() ? '?' : text.back()); at != std::string::npos) {
    unit = std::uint64_t{1} << (10 * (at + 1));
    text.pop_back();
  }
  return static_cast<std::uint64_t>(positive(text, what)) * unit;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Options options;
    for (int i = 1; i < argc; ++i) {
      const std::string name = argv[i];
      if (i + 1 == argc) throw std::invalid_argument(name + ": an unknown option, or its value is missing");
      const std::string value = argv[++i];
      if (name == "--nodes") {
        options.nodes.clear();
        for (const std::string& part : parts_of(value)) options.nodes.push_back(whole(part, name, 100'000));
      } else if (name == "--sizes") {
        options.bytes.clear();
        for (const std::string& part : parts_of(value)) options.bytes.push_back(size_in(part, name));
      } else if (name == "--ranks") {
        options.each = whole(value, name, 128);
      } else if (name == "--rack") {
        options.rack = whole(value, name, 100'000);
      } else if (name == "--servers") {
        options.servers = whole(value, name, 1024);
      } else if (name == "--spine") {
        options.spine = positive(value, name);
      } else if (name == "--gbps") {
        options.gbps = positive(value, name);
      } else if (name == "--latency-us") {
        options.latency_us = positive(value, name);
      } else if (name == "--message-us") {
        options.message_us = positive(value, name);
      } else if (name == "--output") {
        options.output = value;
      } else {
        throw std::invalid_argument(name + ": there is no such option");
      }
    }
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "scale_model: %s\n", error.what());
    return 2;
  }
  return 0;
}
