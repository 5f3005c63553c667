#include "hybridps/observe/metrics.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "hybridps/core/text.h"

namespace hybridps::observe {
namespace {

using enum MetricType;

constexpr std::array kMetrics = {
    Metric{"operations", kCounter, "", "Operations that have ended: collectives and messages.", Counter::kOperations},
    Metric{"groups", kGauge, "", "Open process groups.", Counter::kGroups},
    Metric{"endpoints", kGauge, "", "Open connections, and peers in shared memory.", Counter::kEndpoints},
    Metric{"pending_operations", kGauge, "", "Operations under way."},
    Metric{"oldest_pending_seconds", kGauge, "", "Age of the oldest operation under way."},
    Metric{"kind_operations", kCounter, "kind", "Operations that succeeded, by kind."},
    Metric{"kind_bytes", kCounter, "kind", "Bytes of the tensors of operations that succeeded, by kind."},
    Metric{"kind_bus_bytes", kCounter, "kind",
           "kind_bytes times the collective's bus factor. Bus bandwidth: its rate by that of kind_seconds."},
    Metric{"kind_seconds", kCounter, "kind", "Seconds from call to end of operations that succeeded, by kind."},
    Metric{"waited_seconds", kCounter, "culprit",
           "Seconds that operations of this rank waited for the last rank, by that rank."},
    Metric{"errors", kCounter, "code", "Operations that failed, by reason."},
    Metric{"net_tx_payload_bytes", kCounter, "", "Data sent to other nodes.", Counter::kNetTxPayloadBytes},
    Metric{"net_rx_payload_bytes", kCounter, "", "Data received from other nodes.", Counter::kNetRxPayloadBytes},
    Metric{"net_tx_device_bytes", kCounter, "", "Data that UCX sent from a GPU's memory.", Counter::kNetTxDeviceBytes},
    Metric{"net_tx_header_bytes", kCounter, "", "Headers and control messages sent to other nodes.",
           Counter::kNetTxHeaderBytes},
    Metric{"net_rx_header_bytes", kCounter, "", "Headers and control messages received from other nodes.",
           Counter::kNetRxHeaderBytes},
    Metric{"net_rx_damaged", kCounter, "", "Frames and messages with a wrong checksum (HYBRIDPS_CHECKSUM=1).",
           Counter::kNetRxDamaged},
    Metric{"net_limit_bytes_per_second", kGauge, "", "What this process's network cards can carry; 0: unknown."},
    Metric{"net_retransmits", kCounter, "", "TCP segments sent again on data connections that are open now."},
    Metric{"net_resumptions", kCounter, "", "Breaks of data connections that are open now and went on."},
    Metric{"shm_tx_payload_bytes", kCounter, "", "Data sent through shared memory.", Counter::kShmTxPayloadBytes},
    Metric{"shm_rx_payload_bytes", kCounter, "", "Data received through shared memory.", Counter::kShmRxPayloadBytes},
    Metric{"bad_messages", kCounter, "", "Messages that did not decode, had no group, or came in another's name.",
           Counter::kBadMessages},
    Metric{"peers_dead", kGauge, "", "Dead peers of open groups."},
    Metric{"pool_slots_in_use", kGauge, "", "Network buffers in use."},
    Metric{"tuner_trials", kCounter, "", "Settings tried out, in groups whose first rank this is.",
           Counter::kTunerTrials},
    Metric{"tuner_kept", kCounter, "", "Tried settings that were kept, since operations took less time.",
           Counter::kTunerKept},
    Metric{"compress_operations", kCounter, "", "Operations with a codec.", Counter::kCompressOperations},
    Metric{"compress_bytes", kCounter, "", "Bytes of elements before a codec.", Counter::kCompressBytes},
    Metric{"compress_wire_bytes", kCounter, "", "Bytes of elements after a codec.", Counter::kCompressWireBytes},
    Metric{"compress_not_finite", kCounter, "", "Blocks with infinities or NaN.", Counter::kCompressNotFinite},
    Metric{"compress_encode_ns", kCounter, "", "Nanoseconds of encoding.", Counter::kCompressEncodeNs},
    Metric{"compress_decode_ns", kCounter, "", "Nanoseconds of decoding.", Counter::kCompressDecodeNs},
    Metric{"packed_bytes", kCounter, "", "Bytes of elements before lossless packing.", Counter::kPackedBytes},
    Metric{"packed_wire_bytes", kCounter, "", "Bytes of elements after lossless packing.", Counter::kPackedWireBytes},
    Metric{"pack_refused", kCounter, "", "Chunks sent unpacked, since they would not have shrunk.",
           Counter::kPackRefused},
    Metric{"pack_ns", kCounter, "", "Nanoseconds of packing.", Counter::kPackNs},
    Metric{"unpack_ns", kCounter, "", "Nanoseconds of unpacking, with the sums in the same pass.", Counter::kUnpackNs},
    Metric{"trace_dropped", kCounter, "", "Events of a trace that were dropped, since the file was slower."},
    // Only of dedicated servers.
    Metric{"server_groups", kGauge, "", "Open process groups."},
    Metric{"server_groups_total", kCounter, "", "Process groups opened since the start."},
    Metric{"server_engines", kGauge, "", "Processes in open groups."},
    Metric{"server_chunks", kCounter, "", "Chunks summed."},
    Metric{"server_summed_bytes", kCounter, "", "Bytes of sums."},
    Metric{"server_received_bytes", kCounter, "", "Payload received."},
    Metric{"server_sent_bytes", kCounter, "", "Payload sent."},
    Metric{"server_refused_messages", kCounter, "", "Messages that fit no open group."},
    Metric{"server_admission_accepted", kCounter, "", "Connections to the listening port."},
    Metric{"server_admission_refused", kCounter, "", "Connections refused: strangers and wrong tokens."},
};

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : core::printable(text)) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

std::string number(double value) {
  char text[40];
  if (value == std::floor(value) && std::fabs(value) < 9e15)
    std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value));
  else
    std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

}  // namespace

std::span<const Metric> metrics() { return kMetrics; }

std::string prometheus_text(std::span<const Sample> samples,
                            const std::vector<std::pair<std::string, std::string>>& labels) {
  std::string common;
  for (const auto& [name, value] : labels) common += (common.empty() ? "" : ",") + name + "=\"" + escaped(value) + '"';
  std::string text;
  for (const Metric& metric : kMetrics) {
    std::string name = "hybridps_" + std::string(metric.name);
    if (metric.type == kCounter && !name.ends_with("_total")) name += "_total";
    bool first = true;
    for (const Sample& sample : samples) {
      if (sample.name != metric.name) continue;
      if (first)
        text += "# HELP " + name + ' ' + std::string(metric.help) + "\n# TYPE " + name +
                (metric.type == kCounter ? " counter\n" : " gauge\n");
      first = false;
      std::string all = common;
      if (!metric.label.empty())
        all += (all.empty() ? "" : ",") + std::string(metric.label) + "=\"" + escaped(sample.label) + '"';
      text += name + (all.empty() ? "" : '{' + all + '}') + ' ' + number(sample.value) + '\n';
    }
  }
  return text;
}

}  // namespace hybridps::observe
