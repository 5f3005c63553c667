// How other code and processes look into this process: counters, traces, and the outlet for status and metrics.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/build_info.h"
#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/admission/admission_server.h"
#include "hybridps/engine/cores.h"
#include "hybridps/engine/engine_impl.h"

namespace hybridps::engine {

using core::Code;
using core::Status;

std::string job_name() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text == nullptr ? "" : text);
  };
  if (const std::string run = value("TORCHELASTIC_RUN_ID"); !run.empty() && run != "none") return run;
  if (const std::string slurm = value("SLURM_JOB_ID"); !slurm.empty()) return slurm;
  const std::string address = value("MASTER_ADDR");
  return address.empty() ? address : address + ':' + value("MASTER_PORT");
}

Status EngineImpl::trace_into(const std::string& folder, int rank) {
  const core::MutexLock lock(trace_mutex_);
  std::unique_ptr<observe::Trace> next;
  if (!folder.empty()) {
    if (trace_ != nullptr) return Status(Code::kInvalidArgument, "a trace is being written already: " + trace_->path());
    observe::Json about;
    about.object().field("engine", core::to_string(id_)).field("role", "rank").field("rank", rank);
    about.field("host", bootstrap::host_name()).field("pid", static_cast<std::int64_t>(getpid()));
    about.field("job", job_name())
        .field("limit_bytes_per_second", limit_bytes_per_second_)
        .field("version", build_info::kVersion);
    about.end();
    char name[300];
    std::snprintf(name, sizeof name, "rank%d-%.200s-%d", rank, bootstrap::host_name().c_str(),
                  static_cast<int>(getpid()));
    auto opened =
        observe::Trace::open(core::expand_home(folder), name, about.text().substr(1, about.text().size() - 2));
    if (!opened.is_ok()) return opened.status();
    next = std::move(opened).value();
  }
  const Status status =
      loop_->call([this, raw = next.get()](Status&) { runtime_->set_trace(raw); }, std::chrono::seconds(2));
  if (status.code() == Code::kTimeout) {  // the loop may still run the command: no trace may end before that
    if (next) trace_ = std::move(next);
    return status;
  }
  trace_ = std::move(next);
  return status;
}

void EngineImpl::open_outlet(const GroupOptions& first) {
  if (!config_.trace.empty())
    if (Status status = trace_into(config_.trace, first.rank); !status.is_ok()) core::log_warn(status.message());
  observe::OutletOptions o;
  if (config_.status != "off" && config_.status != "0")
    o.folder = config_.status.empty() ? observe::default_folder() : core::expand_home(config_.status);
  o.tag = std::to_string(first.rank) + '-' + std::to_string(first.size);
  o.file = config_.metrics_path();
  if (!config_.metrics_listen.empty()) {
    core::Result<admission::Address> address = admission::parse_address(config_.metrics_listen);
    if (address.is_ok()) {
      o.listen_host = address.value().host;
      o.listen_port = address.value().port + (address.value().port > 0 ? local_rank().rank : 0);
    } else {
      core::log_warn("no metrics at HYBRIDPS_METRICS_LISTEN=", config_.metrics_listen, ": ",
                     address.status().message());
    }
  }
  if (o.folder.empty() && o.file.empty() && o.listen_host.empty()) return;
  std::vector<std::pair<std::string, std::string>> labels = {{"rank", std::to_string(first.rank)},
                                                             {"host", bootstrap::host_name()}};
  if (const std::string job = job_name(); !job.empty()) labels.emplace_back("job", job);
  o.answer = [this, rank = first.rank](const std::string& line) {
    if (line == "job") return desk_->job();
    if (line == "alone") return desk_->alone();
    if (line == "trace stop" || line.starts_with("trace start ")) {
      const Status status = trace_into(line == "trace stop" ? "" : line.substr(12), rank);
      return observe::Json().object().field("error", status.message()).end().text();
    }
    return std::string(R"({"error": "unknown question"})");
  };
  o.metrics = [this, labels] { return desk_->metrics(labels); };
  for (;;) {
    core::Result<std::unique_ptr<observe::Outlet>> outlet = observe::Outlet::open(o);
    if (outlet.is_ok()) {
      outlet_ = std::move(outlet).value();
      if (outlet_->port() > 0) core::log_info("metrics at http://", o.listen_host, ":", outlet_->port(), "/metrics");
      return;
    }
    // No warning if the user has asked for neither an address nor a status folder.
    if (!o.listen_host.empty() || !config_.status.empty())
      core::log_warn(outlet.status().message());
    else
      core::log_info("hybridps status cannot ask this process: ", outlet.status().message());
    if (o.listen_host.empty() && o.folder.empty()) return;  // no other option is left to drop
    if (!o.listen_host.empty() && !outlet.status().message().starts_with(observe::kNoSocket))
      o.listen_host.clear();
    else
      o.folder.clear();
    if (o.folder.empty() && o.file.empty() && o.listen_host.empty()) return;
  }
}

std::vector<observe::Sample> EngineImpl::stats() const {
  return desk_ && !in_forked_child() ? desk_->samples() : std::vector<observe::Sample>();
}

}  // namespace hybridps::engine
