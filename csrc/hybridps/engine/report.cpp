#include "hybridps/engine/report.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

namespace hybridps::engine {
namespace {

// The status gives the network's rate over the last kSamples samples.
constexpr auto kSampleEvery = std::chrono::milliseconds(200);
constexpr std::size_t kSamples = 6;

/// By peer: the worst of several connections counts.
std::unordered_map<core::EngineId, transport::PathInfo> worst_of(const std::vector<transport::PathInfo>& paths) {
  std::unordered_map<core::EngineId, transport::PathInfo> worst;
  for (const transport::PathInfo& path : paths) {
    const auto [found, is_new] = worst.emplace(path.peer, path);
    if (is_new) continue;
    transport::PathInfo& all = found->second;
    all.rtt_seconds = std::max(all.rtt_seconds, path.rtt_seconds);
    all.busy_seconds = std::max(all.busy_seconds, path.busy_seconds);
    all.retransmits = std::max(all.retransmits, path.retransmits);
    all.resumptions += path.resumptions;
  }
  return worst;
}

}  // namespace

void Report::take_sample(const Transports& transports, const std::vector<transport::PathInfo>& paths,
                         core::TimePoint now) {
  next_sample_ = now + kSampleEvery;
  const transport::TransportStats net = transports.data->stats();
  rate_samples_.push_back({now, net.tx_payload_bytes, net.rx_payload_bytes, {}});
  for (const auto& [peer, path] : worst_of(paths)) rate_samples_.back().busy_seconds.emplace(peer, path.busy_seconds);
  while (rate_samples_.size() > kSamples) rate_samples_.pop_front();
}

void Report::write_status(const Reported& of, observe::Json& json, std::size_t peers_max,
                          const StatusView& view) const {
  const core::TimePoint now = core::Clock::now();
  const transport::TransportStats net = of.transports.data->stats();
  double tx = 0;
  double rx = 0;
  if (!rate_samples_.empty() && now > rate_samples_.front().at) {
    const RateSample& first = rate_samples_.front();
    const double seconds = core::to_seconds(now - first.at);
    tx = static_cast<double>(net.tx_payload_bytes - first.tx) / seconds;
    rx = static_cast<double>(net.rx_payload_bytes - first.rx) / seconds;
  }
  if (view.totals) {
    json.key("net").object();
    json.field("tx_bytes_per_second", tx).field("rx_bytes_per_second", rx);
    json.field("tx_payload_bytes", net.tx_payload_bytes).field("rx_payload_bytes", net.rx_payload_bytes).end();
    json.key("memory").object();
    json.field("pool_bytes", of.pool.memory().size()).field("pool_slots_in_use", of.pool.slots_in_use()).end();
  }

  const auto paths = worst_of(of.transports.data->paths());
  // The part of the last second in which bytes were under way.
  const auto busy = [&](const transport::PathInfo& path) {
    const RateSample& first = rate_samples_.front();
    const auto before = first.busy_seconds.find(path.peer);
    double seconds = path.busy_seconds - (before == first.busy_seconds.end() ? 0 : before->second);
    if (seconds < 0) seconds = path.busy_seconds;  // over a new connection since then
    return std::min(1.0, seconds / core::to_seconds(now - first.at));
  };
  json.key("peers").array();
  for (const auto& [id, peer] : of.peers.all()) {
    if (peer.groups == 0 || (view.peers != nullptr && view.peers->count(id) == 0)) continue;
    if (peers_max-- == 0) break;
    json.object().field("engine", core::to_string(id)).field("where", peer.record.where);
    json.field("local", peer.record.local).field("dead", peer.dead);
    json.field("heard_seconds", of.peers.seconds_since_heard(id)).field("round_trip_us", 1e6 * peer.round_trip_seconds);
    if (const auto flow = of.outbox.flow_of(id))
      json.field("window_bytes", flow->window_bytes)
          .field("in_flight_bytes", flow->in_flight_bytes)
          .field("streams_waiting", flow->streams_waiting)
          .field("path_bytes_per_second", flow->path_rate)
          .field("packing", flow::text_of(flow->packing));
    if (const auto path = paths.find(id); path != paths.end()) {
      if (path->second.busy_seconds > 0 && !rate_samples_.empty() && now > rate_samples_.front().at)
        json.field("tcp_busy", busy(path->second));
      json.field("tcp_rtt_us", 1e6 * path->second.rtt_seconds)
          .field("tcp_min_rtt_us", 1e6 * path->second.min_rtt_seconds)
          .field("tcp_retransmits", path->second.retransmits)
          .field("tcp_resumptions", path->second.resumptions);
    }
    json.end();
  }
  json.end();
}

std::vector<observe::Sample> Report::samples(const Reported& of,
                                             const std::function<std::string(core::EngineId)>& name) const {
  const core::TimePoint now = core::Clock::now();
  std::vector<observe::Sample> all;
  const auto add = [&all](std::string_view metric, auto value, std::string label = {}) {
    all.push_back({metric, std::move(label), static_cast<double>(value)});
  };
  add("pending_operations", of.worker.operations_active());
  add("oldest_pending_seconds", core::to_seconds(now - of.worker.oldest_since(now)));
  const worker::OperationCounts& counts = of.worker.counts();
  for (std::size_t kind = 0; kind < counts.of_kind.size(); ++kind) {
    const auto& one = counts.of_kind[kind];
    if (one.operations == 0) continue;
    const std::string label(schedule::name_of(static_cast<schedule::Kind>(kind)));
    add("kind_operations", one.operations, label);
    add("kind_bytes", one.bytes, label);
    add("kind_bus_bytes", one.bus_bytes, label);
    add("kind_seconds", core::to_seconds(one.time), label);
  }
  std::map<std::string, double> waited;  // engines that are no longer known count together, as "gone"
  for (const auto& [engine, time] : counts.waited_for) {
    const std::string who = engine == core::EngineId{} ? "unknown" : name(engine);
    waited[who.empty() ? "gone" : who] += core::to_seconds(time);
  }
  for (const auto& [who, seconds] : waited) add("waited_seconds", seconds, who);
  for (const auto& [code, count] : counts.errors) add("errors", count, std::string(core::code_name(code)));
  std::uint64_t retransmits = 0;
  std::uint64_t resumptions = 0;
  for (const transport::PathInfo& path : of.transports.data->paths()) {
    retransmits += path.retransmits;
    resumptions += path.resumptions;
  }
  add("net_retransmits", retransmits);
  add("net_resumptions", resumptions);
  std::uint64_t dead = 0;
  for (const auto& [id, peer] : of.peers.all()) dead += peer.groups > 0 && peer.dead ? 1 : 0;
  add("peers_dead", dead);
  add("pool_slots_in_use", of.pool.slots_in_use());
  add("trace_dropped", of.outbox.trace() == nullptr ? 0 : of.outbox.trace()->dropped());
  return all;
}

void Report::update(const Reported& of, std::size_t groups) {
  using observe::Counter;
  transport::TransportStats net = of.transports.data->stats();
  std::uint64_t endpoints = net.endpoints_open;
  if (of.transports.control) {
    const transport::TransportStats control = of.transports.control->stats();
    net.tx_header_bytes += control.tx_header_bytes;
    net.rx_header_bytes += control.rx_header_bytes;
    net.tx_payload_bytes += control.tx_payload_bytes;
    net.rx_payload_bytes += control.rx_payload_bytes;
    endpoints += control.endpoints_open;
  }
  counters_.set(Counter::kNetTxPayloadBytes, net.tx_payload_bytes);
  counters_.set(Counter::kNetRxPayloadBytes, net.rx_payload_bytes);
  counters_.set(Counter::kNetTxDeviceBytes, net.tx_device_bytes);
  const worker::CodecCounts& codecs = of.worker.codec_counts();
  counters_.set(Counter::kTunerTrials, of.worker.tuner_trials());
  counters_.set(Counter::kTunerKept, of.worker.tuner_kept());
  counters_.set(Counter::kCompressOperations, codecs.operations);
  counters_.set(Counter::kCompressBytes, codecs.bytes);
  counters_.set(Counter::kCompressWireBytes, codecs.wire_bytes);
  counters_.set(Counter::kCompressNotFinite, codecs.blocks_not_finite);
  const auto nanoseconds = [](core::Duration time) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count());
  };
  counters_.set(Counter::kCompressEncodeNs, nanoseconds(codecs.encoding));
  counters_.set(Counter::kCompressDecodeNs, nanoseconds(codecs.decoding));
  const flow::PackingCounts& packing = of.outbox.packing().counts();
  counters_.set(Counter::kPackedBytes, packing.bytes);
  counters_.set(Counter::kPackedWireBytes, packing.wire_bytes);
  counters_.set(Counter::kPackRefused, packing.refused);
  counters_.set(Counter::kPackNs, nanoseconds(packing.packing));
  counters_.set(Counter::kUnpackNs, nanoseconds(packing.unpacking));
  counters_.set(Counter::kNetTxHeaderBytes, net.tx_header_bytes);
  counters_.set(Counter::kNetRxHeaderBytes, net.rx_header_bytes);
  if (of.transports.damaged) counters_.set(Counter::kNetRxDamaged, of.transports.damaged->load());
  if (of.transports.shm) {
    const transport::TransportStats shm = of.transports.shm->stats();
    counters_.set(Counter::kShmTxPayloadBytes, shm.tx_payload_bytes);
    counters_.set(Counter::kShmRxPayloadBytes, shm.rx_payload_bytes);
    endpoints += shm.endpoints_open;
  }
  counters_.set(Counter::kOperations, of.worker.operations_finished());
  counters_.set(Counter::kGroups, groups);
  counters_.set(Counter::kEndpoints, endpoints);
}

}  // namespace hybridps::engine
