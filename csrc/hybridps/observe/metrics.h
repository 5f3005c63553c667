// hybridps/observe/metrics.h: the metrics of a process by name, and their text in Prometheus' format (0.0.4).
//
// Names    One table (metrics.cpp): Prometheus has `hybridps_` in front of a name and `_total` behind counters, stats() in
//          Python the name as it is. docs/metrics.md lists them, and a test compares.
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
  std::string_view label;  // by what it is split: "kind"; empty: it is one number
  std::string_view help;
  std::optional<Counter> counter{};  // it is that one; else a Sample
};

/// Of ranks and servers, in the order of the text.
std::span<const Metric> metrics();

struct Sample {
  std::string_view name;  // of the table
  std::string label;      // its value; empty where the metric has none
  double value = 0.0;
};

/// `labels` go to every sample: {"rank", "3"}, {"job", ...}. Samples of no metric of the table are left out, metrics without
/// a sample as well.
std::string prometheus_text(std::span<const Sample> samples,
                            const std::vector<std::pair<std::string, std::string>>& labels);

}  // namespace hybridps::observe
