#include <string>
#include <vector>

#include "hybridps/observe/json.h"
#include "hybridps/observe/metrics.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps;

}  // namespace

TEST_CASE("observe/json: what is nested is separated and closed, and texts are escaped", "[observe][fast]") {
  observe::Json json;
  json.object().field("a", 1).key("b").array().value(2).value("x\"\\\n\xff").value(true).end();
  json.key("c").object().end().field("d", 0.5).field("e", 1.0 / 0.0).end();
  CHECK(json.text() == R"({"a":1,"b":[2,"x\"\\\u000a\\xff",true],"c":{},"d":0.5,"e":null})");
}

TEST_CASE("observe/metrics: samples stand under their metric with type and help", "[observe][fast]") {
  const std::vector<observe::Sample> samples = {{"groups", {}, 3},
                                                {"kind_operations", "allreduce", 5},
                                                {"kind_operations", "a\"b\\c\nd\xff", 7},
                                                {"kind_seconds", "allreduce", 0.25},
                                                {"no such metric", {}, 1}};
  const std::string text = observe::prometheus_text(samples, {{"rank", "2"}});
  CHECK(text ==
        "# HELP hybridps_groups Open process groups.\n"
        "# TYPE hybridps_groups gauge\n"
        "hybridps_groups{rank=\"2\"} 3\n"
        "# HELP hybridps_kind_operations_total Operations that succeeded, by kind.\n"
        "# TYPE hybridps_kind_operations_total counter\n"
        "hybridps_kind_operations_total{rank=\"2\",kind=\"allreduce\"} 5\n"
        "hybridps_kind_operations_total{rank=\"2\",kind=\"a\\\"b\\\\c\\nd\\\\xff\"} 7\n"
        "# HELP hybridps_kind_seconds_total Seconds from call to end of operations that succeeded, by kind.\n"
        "# TYPE hybridps_kind_seconds_total counter\n"
        "hybridps_kind_seconds_total{rank=\"2\",kind=\"allreduce\"} 0.25\n");
  const std::string bare =
      observe::prometheus_text(std::vector<observe::Sample>{{"server_groups_total", {}, 4e15}}, {});
  CHECK(bare.ends_with("\nhybridps_server_groups_total 4000000000000000\n"));
}

TEST_CASE("observe/metrics: names are unique and fit Prometheus", "[observe][fast]") {
  std::vector<std::string_view> names;
  for (const observe::Metric& metric : observe::metrics()) {
    CHECK(metric.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_0123456789") == std::string_view::npos);
    CHECK(metric.help.ends_with("."));
    for (const std::string_view name : names) CHECK(name != metric.name);
    names.push_back(metric.name);
  }
  CHECK(names.size() > 30);
}
