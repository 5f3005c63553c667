// hybridps/observe/metrics.h: the metrics of a process by name, and their text in Prometheus' format (0.0.4).
//
// Names    One table (metrics.cpp). Prometheus has `hybridps_` in front of a name and `_total` behind counters; stats()
//          in Python has the name as it is. docs/metrics.md lists the metrics, and a test compares.
// Threads  plain values and pure functions.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/observe/counters.h"

namespace hybridps::observe {

enum class MetricType { kCounter, kGauge };

struct Metric {
  std::string_view name;  // "net_tx_payload_bytes"
  MetricType type = MetricType::kCounter;
  std::string_view label;  // what splits the metric: "kind"; empty: the metric is one number
  std::string_view help;
  std::optional<Counter> counter{};  // the counter with the value; empty: a Sample has it
};

/// All metrics of ranks and servers, in the order of the text.
std::span<const Metric> metrics();

struct Sample {
  std::string_view name;  // a name in the table
  std::string label;      // value of the label; empty: the metric has no label
  double value = 0.0;
};

/// `labels` go to every sample: {"rank", "3"}, {"job", ...}. Samples with a name that is not in the table are left out,
/// and so are metrics without a sample.
std::string prometheus_text(std::span<const Sample> samples,
                            const std::vector<std::pair<std::string, std::string>>& labels);

}  // namespace hybridps::observe
