// hybridps/bindings/module.cpp: hybridps._C, what python/hybridps needs of the process group. No logic of its own.
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hybridps/build_info.h"
#include "hybridps/core/config.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/descriptors.h"
#include "hybridps/engine/engine.h"
#include "hybridps/engine/round_trips.h"
#include "hybridps/engine/settings.h"
#include "hybridps/observe/metrics.h"
#include "hybridps/pg/accelerator.h"
#include "hybridps/pg/errors.h"
#include "hybridps/pg/gil.h"
#include "hybridps/pg/process.h"
#include "hybridps/pg/process_group_hybrid.h"
#include "hybridps/pg/store_adapter.h"

namespace py = pybind11;

namespace hybridps::bindings {
namespace {

using pg::ProcessGroupHybrid;
using Options = ProcessGroupHybrid::Options;
using OptionsPtr = c10::intrusive_ptr<Options>;
using GroupPtr = c10::intrusive_ptr<ProcessGroupHybrid>;

/// Throws after Ctrl-C, while a thread waits for other ranks.
void poll_signals() {
  const py::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void install_interpreter_lock() {
  pg::install_interpreter_lock({
      .held = [] { return Py_IsInitialized() != 0 && PyGILState_Check() == 1; },
      .release = []() -> void* { return PyEval_SaveThread(); },
      .acquire = [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); },
      .check_signals = &poll_signals,
  });
}

/// A text for Python, which takes nothing but UTF-8.
py::str text_of(std::string_view text) { return core::printable(text); }

/// A text from Python. Parts that are not UTF-8 (from os.environ and os.fsdecode()) are escaped.
std::string text_of(const py::handle& what) {
  const auto bytes =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(py::str(what).ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

std::string describe(const Options& options) {
  return "hybridps.Options(timeout=" + core::format_seconds(static_cast<double>(options.timeout.count()) / 1000) +
         ", dedicated_servers=" + (options.dedicated_servers ? "True" : "False") + ", compress='" + options.compress +
         "', priority='" + options.priority + "'" +
         (options.incarnation.empty() ? "" : ", incarnation='" + options.incarnation + "'") + ")";
}

void set_priority(Options& options, const py::object& given) {
  if (!py::isinstance<py::str>(given) && !py::isinstance<py::int_>(given))
    throw py::type_error("hybridps.Options: priority is an int or a str, not " +
                         py::type::of(given).attr("__qualname__").cast<std::string>());
  options.set_priority(py::str(given).cast<std::string>());
}

OptionsPtr copy_of(const Options& options) { return c10::make_intrusive<Options>(options); }

/// The options that a group is made with: a copy of our Options, or the timeout (and enable_reconfigure) of torch's own
/// options for any backend. None: the defaults. TypeError: anything else.
OptionsPtr options_of(const py::object& pg_options) {
  if (pg_options.is_none()) return c10::make_intrusive<Options>();
  if (py::isinstance<Options>(pg_options)) return copy_of(*pg_options.cast<OptionsPtr>());
  if (py::type::of(pg_options).is(py::type::of<c10d::Backend::Options>())) {
    const auto of_torch = pg_options.cast<c10::intrusive_ptr<c10d::Backend::Options>>();
    auto options = c10::make_intrusive<Options>(of_torch->timeout);
#if HYBRIDPS_TORCH_AT_LEAST(15)
    options->enable_reconfigure = of_torch->enable_reconfigure;
#endif
    return options;
  }
  const auto type = py::type::of(pg_options);
  throw py::type_error("hybridps: pg_options must be hybridps.Options or None, not " +
                       type.attr("__module__").cast<std::string>() + "." +
                       type.attr("__qualname__").cast<std::string>());
}

/// The creator that python/hybridps registers. `dist_options`: c10d's _DistributedBackendOptions. `pg_options`: as in
/// options_of(). `called_at`: the time of the call in seconds on time.monotonic(), which is core::Clock; the timeout
/// counts from there. The timeout is the call's, or the options' if the call has torch's default.
GroupPtr create_backend(const py::object& dist_options, const py::object& pg_options, double called_at) {
  const auto store = dist_options.attr("store").cast<c10::intrusive_ptr<c10d::Store>>();
  const int rank = dist_options.attr("group_rank").cast<int>();
  const int size = dist_options.attr("group_size").cast<int>();
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      dist_options.attr("timeout").cast<std::chrono::duration<float>>());
  const auto name = dist_options.attr("group_id").cast<std::string>();
  OptionsPtr options;
  try {
    options = options_of(pg_options);
  } catch (const py::type_error& error) {
    const py::gil_scoped_release released;  // the other ranks would wait for this rank
    pg::tell_of_failed_start(pg::adapt_store(store, pg::StoreUse::kBorrowed), name,
                             pg::Process::instance().incarnations().next(name), rank, size, error.what());
    throw;
  }
  if (timeout != kBackendDefaultTimeout) options->timeout = timeout;
  options->group_name = name;
  bool waits = true;
#if HYBRIDPS_TORCH_AT_LEAST(15)
  if (dist_options.attr("enable_reconfigure").cast<bool>()) options->enable_reconfigure = true;
  waits = !options->enable_reconfigure;  // the group has no members yet
#endif
  const auto global_ranks = dist_options.attr("global_ranks_in_group").cast<std::vector<std::int64_t>>();
  options->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());

  const py::gil_scoped_release released;
  // The world waits for all members. A sub-group does not: members may make groups in any order; operations queue.
  waits = waits && global_ranks.empty();
  auto group = c10::make_intrusive<ProcessGroupHybrid>(store, rank, size, std::move(options),
                                                       core::TimePoint(core::from_seconds(called_at)),
                                                       waits ? pg::StoreUse::kBorrowed : pg::StoreUse::kOwn);
  if (waits) group->wait_ready();
  return group;
}

/// `loader` loads UCX into the process when UCX is needed, and returns the path of UCX's file.
void load_ucx_by(py::function loader) {
  auto* const kept = new py::function(std::move(loader));  // kept as long as the process lives
  engine::Engine::load_ucx_by([kept]() -> core::Result<std::string> {
    const py::gil_scoped_acquire lock;
    try {
      return (*kept)().cast<std::string>();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {  // Ctrl-C: raised again in the main thread after this call
        PyErr_SetInterrupt();
        return core::Status(core::Code::kAborted, "interrupted while UCX was looked for");
      }
      return core::Status(core::Code::kUnsupported, text_of(error.value()));
    } catch (const std::exception& error) {
      return core::Status(core::Code::kUnsupported, error.what());
    }
  });
}

py::list entries_of(const std::vector<core::SettingRow>& rows) {
  py::list entries;
  for (const core::SettingRow& row : rows) {
    py::dict entry;
    entry["name"] = row.name;
    entry["value"] = row.value;
    entry["default"] = row.default_value;
    entry["source"] = row.source;
    entry["unit"] = row.unit;
    entry["doc"] = row.doc;
    entry["problem"] = row.problem;
    entries.append(std::move(entry));
  }
  return entries;
}

/// Returns (a row for each setting, complaints about names that are not settings, a row for each part of
/// HYBRIDPS_LIMITS).
py::tuple config_table() {
  std::vector<std::string> warnings;
  std::vector<core::SettingRow> parts;
  const std::vector<core::SettingRow> rows = core::Config::table_of_environment(warnings, parts);
  return py::make_tuple(entries_of(rows), warnings, entries_of(parts));
}

/// Checks a rank's settings on this machine as a job checks them. Returns `problems`, `warnings`, the network cards
/// that the rank would use, and the reason for these cards. `ask`: without problems the dedicated servers are asked,
/// too.
py::dict check_settings(int local_rank, int local_size, bool ask) {
  py::dict found;
  auto config = core::Config::from_environment();
  py::list problems;
  engine::CheckedSettings checked;
  if (config.is_ok()) {
    const py::gil_scoped_release released;
    checked = engine::check_settings(config.value(), {local_rank, local_size});
    if (ask && checked.problems.empty())
      for (core::Status& status : engine::ask_servers(checked)) checked.problems.push_back(std::move(status));
  } else {
    checked.problems.push_back(config.status());
  }
  for (const core::Status& status : checked.problems) problems.append(text_of(status.message()));
  found["problems"] = problems;
  py::list warnings;
  for (const std::string& warning : checked.warnings) warnings.append(text_of(warning));
  found["warnings"] = warnings;
  const engine::Interfaces& interfaces = checked.interfaces;
  py::list nics;
  for (const auto& nic : interfaces.nics) {
    py::dict entry;
    entry["name"] = text_of(nic.name);
    entry["address"] = text_of(nic.address);
    entry["network"] = text_of(nic.network);
    entry["gbps"] = nic.gbps;
    nics.append(std::move(entry));
  }
  const auto& authority = checked.secret.authority;
  found["encryption"] = authority ? text_of(authority->text()) : py::object(py::str());
  found["control"] = text_of(interfaces.control);
  found["control_why"] = text_of(interfaces.control_why);
  found["loopback"] = text_of(interfaces.loopback);
  found["rdma"] = interfaces.rdma;
  found["why"] = text_of(interfaces.why);
  found["node_gbps"] = interfaces.node_gbps;
  found["nics"] = std::move(nics);
  found["data_ways"] = config.is_ok() ? engine::data_ways(config.value(), interfaces, 1) : 1;
  return found;
}

py::dict build_info() {
  py::dict info;
  info["version"] = build_info::kVersion;
  info["ucx_version"] = build_info::kUcxVersion;
  info["ucx_origin"] = build_info::kUcxOrigin;
  info["torch_version"] = build_info::kTorchVersion;
  info["compiler"] = build_info::kCompiler;
  info["build_type"] = build_info::kBuildType;
  info["cuda"] = build_info::kCuda;
  return info;
}

/// Counters and metrics (observe/metrics.h) of this process's engine. A metric with a label is a dictionary by the
/// label's value. Empty: the process has no engine.
py::dict stats() {
  py::dict all;
  std::vector<observe::Sample> now;
  std::uint64_t pinned = 0;
  {
    const py::gil_scoped_release released;
    const auto engine = engine::Engine::current();
    if (!engine) return all;
    now = engine->stats();
    pinned = pg::pinned_bytes();
  }
  const auto number = [](double value) -> py::object {
    if (value == static_cast<double>(static_cast<std::int64_t>(value)))
      return py::int_(static_cast<std::int64_t>(value));
    return py::float_(value);
  };
  for (const observe::Metric& metric : observe::metrics()) {
    const py::str name{std::string(metric.name)};
    for (const observe::Sample& sample : now) {
      if (sample.name != metric.name) continue;
      if (metric.label.empty()) {
        all[name] = number(sample.value);
        continue;
      }
      if (!all.contains(name)) all[name] = py::dict();
      all[name].cast<py::dict>()[text_of(sample.label)] = number(sample.value);
    }
  }
  all["pinned_bytes"] = pinned;
  return all;
}

/// (name, type, label, help) of each metric.
py::list metric_table() {
  py::list table;
  for (const observe::Metric& metric : observe::metrics())
    table.append(py::make_tuple(std::string(metric.name),
                                metric.type == observe::MetricType::kCounter ? "counter" : "gauge",
                                std::string(metric.label), std::string(metric.help)));
  return table;
}

py::dict summary_of(const ProcessGroupHybrid& group) {
  engine::GroupSummary summary;
  {
    const py::gil_scoped_release released;
    summary = group.summary();
  }
  py::list nodes;
  for (const auto& node : summary.nodes) {
    py::dict entry;
    entry["host"] = text_of(node.host);
    entry["ranks"] = node.ranks;
    entry["share"] = node.share;
    entry["data"] = text_of(node.data);
    entry["control"] = text_of(node.control);
    nodes.append(std::move(entry));
  }
  py::dict found;
  found["text"] = text_of(summary.text);
  found["nodes"] = std::move(nodes);
  found["transport"] = text_of(summary.transport);
  found["servers"] = summary.servers;
  found["servers_share"] = summary.servers_share;
  found["servers_why"] = text_of(summary.servers_why);
  return found;
}

py::tuple options_state(const Options& options) {
  return py::make_tuple(options.timeout.count(), options.group_name, options.group_desc, options.global_ranks_in_group,
                        options.dedicated_servers, options.compress, options.incarnation, options.priority);
}

OptionsPtr options_from(const py::tuple& state) {
  auto options = c10::make_intrusive<Options>(std::chrono::milliseconds(state[0].cast<std::int64_t>()));
  options->group_name = state[1].cast<std::string>();
  options->group_desc = state[2].cast<std::string>();
  options->global_ranks_in_group = state[3].cast<std::vector<std::uint64_t>>();
  options->dedicated_servers = state[4].cast<bool>();
  options->compress = state[5].cast<std::string>();
  if (state.size() > 6) options->incarnation = state[6].cast<std::string>();
  if (state.size() > 7) options->priority = state[7].cast<std::string>();
  return options;
}

/// Wraps a Work: torch's class of a Work has a holder of torch's own, which we cannot make.
struct OuterWork {
  c10::intrusive_ptr<c10d::Work> work;
};

/// Returns [(ordinal, bytes, dtype, residual, owed, momentum)], the last three as bytes of float32.
py::list compression_state(ProcessGroupHybrid& group) {
  std::vector<pg::Compression::Saved> saved;
  {
    const py::gil_scoped_release released;
    saved = group.compression_state();
  }
  const auto bytes = [](const std::vector<float>& values) {
    return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  };
  py::list all;
  for (const auto& s : saved)
    all.append(py::make_tuple(s.place.ordinal, s.place.bytes, static_cast<int>(s.place.dtype), bytes(s.residual),
                              bytes(s.owed), bytes(s.momentum)));
  return all;
}

double compression_ratio(const std::string& codec, const std::string& dtype) {
  const auto ratio = pg::ratio_of(codec, dtype);
  if (!ratio.is_ok()) throw py::value_error(core::printable(ratio.status().message()));
  return ratio.value();
}

py::dict compression_summary(ProcessGroupHybrid& group) {
  engine::Group::RememberedSummary summary;
  std::vector<pg::Compression::SizeDecision> decided;
  std::size_t unclaimed = 0;
  {
    const py::gil_scoped_release released;
    summary = group.remembered_summary();
    decided = group.compression_classes();
    unclaimed = group.compression_unclaimed();
  }
  py::list classes;
  for (const pg::Compression::SizeDecision& c : decided) {
    py::dict one;
    one["sizes"] = c.sizes;
    one["bytes_min"] = c.bytes_min;
    one["compressed"] = c.decision.coded;
    one["by"] = c.why;
    one["codec_share"] = c.decision.codec_share;
    one["compressed_seconds"] = c.decision.coded_seconds;
    one["plain_seconds"] = c.decision.plain_seconds;
    classes.append(one);
  }
  py::dict found;
  found["classes"] = classes;
  found["residual_norm"] = summary.norm;
  found["tensors"] = summary.tensors;
  found["memory_bytes"] = summary.bytes;
  found["dropped"] = summary.dropped;
  found["refused"] = summary.refused;
  found["refused_by_servers"] = summary.refused_by_servers;
  found["unclaimed"] = unclaimed;
  return found;
}

void load_compression_state(ProcessGroupHybrid& group, const py::list& all, std::uint64_t steps) {
  const auto floats = [](const py::handle& text) {
    const auto bytes = text.cast<std::string>();
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    return values;
  };
  std::vector<pg::Compression::Saved> saved;
  for (const py::handle& item : all) {
    const auto entry = item.cast<py::tuple>();
    saved.push_back({{entry[0].cast<std::uint32_t>(), entry[1].cast<std::uint64_t>(),
                      static_cast<core::DType>(entry[2].cast<std::uint8_t>())},
                     floats(entry[3]),
                     floats(entry[4]),
                     floats(entry[5])});
  }
  const py::gil_scoped_release released;
  group.load_compression_state(std::move(saved), steps);
}

/// Keeps this process's engine between two process groups, as pg::Stay does for reconfigure().
class EngineHold : core::Pinned {
 public:
  EngineHold() {
    const pg::InterpreterReleased released;
    pg::Process& process = pg::Process::instance();
    const pg::Process::Arrival arrival(process);
    auto engine = engine::Engine::acquire();
    pg::check_status(engine.status(), "starting the engine");
    stay_ = process.stay(std::move(engine).value());
  }
  ~EngineHold() { end(); }
  void end() {
    const pg::InterpreterReleased released;
    pg::Process::instance().end(*stay_);
  }

 private:
  std::shared_ptr<pg::Stay> stay_;
};

using GroupClass = py::class_<ProcessGroupHybrid, GroupPtr, c10d::Backend>;

void bind_options(GroupClass& group) {
  py::class_<Options, OptionsPtr, c10d::Backend::Options>(
      group, "Options",
      "Options of one group, for `pg_options` of init_process_group(), new_group() and split_group(). A group copies "
      "them\n"
      "when it is made; changing them later has no effect on it. Attributes, and keyword arguments of the "
      "constructor:\n\n"
      "timeout            datetime.timedelta, of the group's operations and of its making. Counts where the call's "
      "own\n"
      "                   timeout is torch's default of 30 minutes\n"
      "dedicated_servers  bool, whether the group may use the servers of HYBRIDPS_SERVERS (True). Group rank 0's "
      "counts\n"
      "compress           str, what gradients become between nodes: 'int8', 'int4:ef=1', 'none', ...; '' as "
      "HYBRIDPS_COMPRESS\n"
      "                   says. The same on all ranks\n"
      "incarnation        str, a name for this life of the group, the same on all members and used for no other ('' "
      "takes the\n"
      "                   launcher's run id, and how often the process has made the group). For "
      "members\n"
      "                   that were not started together\n"
      "priority           int or str, whose chunks go first where several wait (0): -128 to 127, higher goes first, "
      "or\n"
      "                   'tensor', 'pipeline', 'sharded', 'data' by the mesh's dimension (docs/overlap.md). The same "
      "on\n"
      "                   all ranks; groups split off without options take it over")
      .def(py::init([](std::chrono::milliseconds timeout, bool dedicated_servers, std::string compress,
                       std::string incarnation, const py::object& priority) {
             if (timeout.count() <= 0) throw py::value_error("hybridps.Options: the timeout must be more than 0");
             auto options = c10::make_intrusive<Options>(timeout);
             options->dedicated_servers = dedicated_servers;
             options->compress = std::move(compress);
             options->incarnation = std::move(incarnation);
             set_priority(*options, priority);
             return options;
           }),
           py::kw_only(), py::arg("timeout") = kBackendDefaultTimeout, py::arg("dedicated_servers").noconvert() = true,
           py::arg("compress") = "", py::arg("incarnation") = "", py::arg("priority") = 0)
      .def_property(
          "timeout", [](const Options& self) { return self.timeout; },
          [](Options& self, std::chrono::milliseconds timeout) {
            if (timeout.count() <= 0) throw py::value_error("hybridps.Options: the timeout must be more than 0");
            self.timeout = timeout;
          })
      .def_property(
          "dedicated_servers", [](const Options& self) { return self.dedicated_servers; },
          [](Options& self, const py::bool_& wanted) { self.dedicated_servers = wanted; })
      .def_readwrite("compress", &Options::compress)
      .def_readwrite("incarnation", &Options::incarnation)
      .def_property(
          "priority", [](const Options& self) { return self.priority.empty() ? std::string("0") : self.priority; },
          &set_priority)
      .def("__repr__", &describe)
      .def("__copy__", [](const Options& self) { return copy_of(self); })
      .def("__deepcopy__", [](const Options& self, const py::object&) { return copy_of(self); })
      .def(py::pickle(&options_state, &options_from));
}

void bind_group(py::module_& module, GroupClass& group) {
  py::class_<OuterWork>(module, "OuterWork", "An outer step under way.")
      .def(
          "wait", [](OuterWork& self) { self.work->wait(); }, py::call_guard<py::gil_scoped_release>(),
          "Until the tensor has the result; raises what has gone wrong.")
      .def(
          "is_completed", [](OuterWork& self) { return self.work->isCompleted(); },
          py::call_guard<py::gil_scoped_release>());
  group
      // torch 2.11 binds `options` for its own backends only, and copies `options` in split_group().
      .def_property_readonly("options", [](const ProcessGroupHybrid& self) { return self.options(); })
      .def("node_of", &ProcessGroupHybrid::node_of, py::call_guard<py::gil_scoped_release>(),
           "The node of each group rank; empty until all members have come.")
      .def("compression", &ProcessGroupHybrid::compression, "What gradients of this group become between nodes.")
      .def("compression_steps", &ProcessGroupHybrid::compression_steps, py::call_guard<py::gil_scoped_release>())
      .def("compression_summary", &compression_summary)
      .def("compression_state", &compression_state)
      .def("load_compression_state", &load_compression_state, py::arg("tensors"), py::arg("steps"))
      .def(
          "outer_step",
          [](ProcessGroupHybrid& self, at::Tensor tensor, const std::string& what, std::int64_t slot, double rate,
             double momentum) {
            const py::gil_scoped_release released;
            return OuterWork{self.outer_step(std::move(tensor), what, slot, rate, momentum)};
          },
          py::arg("tensor"), py::arg("what"), py::arg("slot"), py::arg("rate") = 1.0, py::arg("momentum") = 0.0,
          "An allreduce after which the owners of the tensor's parts step; see hybridps.LocalSteps.")
      .def("incarnation", &ProcessGroupHybrid::incarnation, "The name of this life of the group; see Options.")
      .def("summary", &summary_of, "What the group's members, networks and shares are; no nodes until all have come.")
      .def("leave_for_next", &ProcessGroupHybrid::leave_for_next, py::arg("reason"),
           "Leaves the group for one that is made next; who says no goodbye in time is told the reason.")
      .def("wait_ready", &ProcessGroupHybrid::wait_ready, py::call_guard<py::gil_scoped_release>(),
           "Waits until all members have come.")
      // Called on ranks that are not in a new group of split_group(): on such ranks our split has nothing to do.
      .def("perform_nocolor_split", [](ProcessGroupHybrid&, const py::object&) {}, py::arg("device") = py::none());

  py::class_<EngineHold>(module, "EngineHold",
                         "Keeps the engine of this process between two process groups, until end().")
      .def(py::init<>())
      .def("end", &EngineHold::end);
}

void bind_functions(py::module_& module) {
  module.def("create_backend", &create_backend, py::arg("dist_backend_opts"), py::arg("pg_options"),
             py::arg("called_at"));
  module.def("compression_ratio", &compression_ratio, py::arg("codec"), py::arg("dtype"));
  module.def("config_table", &config_table);
  module.def("load_ucx_by", &load_ucx_by, py::arg("loader"));
  module.def("check_settings", &check_settings, py::arg("local_rank"), py::arg("local_size"), py::arg("ask"));
  module.def(
      "descriptors_needed",
      [](std::uint64_t remote, std::uint64_t local, std::uint64_t ways) {
        return engine::descriptors_needed({.remote = remote, .local = local, .ways = ways});
      },
      py::arg("remote"), py::arg("local"), py::arg("ways"),
      "Of a rank with so many others on other nodes and on its own, and connections for data to each.");
  module.def("find_regions", &engine::regions_by, py::arg("round_trips"),
             "The region of each node, from the microseconds that each has measured to each; empty: none.");
  module.def("round_trip", &engine::round_trip_to, py::arg("address"), py::arg("port"),
             py::call_guard<py::gil_scoped_release>(),
             "Microseconds to a port, as a job measures them that looks for regions; 0: could not be measured.");
  module.def("build_info", &build_info);
  module.def(
      "cuda", [] { return text_of(pg::describe_cuda_support()); }, "The GPUs of this process, or why it has none.");
  module.def(
      "cuda_trouble", [] { return text_of(pg::find_cuda_trouble()); },
      "Why a GPU of this process cannot carry tensors; makes a context on each.");
  module.def(
      "exchange_thread_priority",
      [](std::optional<int> priority) -> std::optional<int> {
        if (priority && (*priority < -128 || *priority > 127))
          throw py::value_error("hybridps.priority: " + std::to_string(*priority) + " is not from -128 to 127");
        const auto before = ProcessGroupHybrid::exchange_thread_priority(
            priority ? std::optional(static_cast<std::int8_t>(*priority)) : std::nullopt);
        return before ? std::optional<int>(*before) : std::nullopt;
      },
      py::arg("priority"), "Of what this thread issues from now on; None: as its groups say. Returns what was before.");
  module.def("stats", &stats);
  module.def("metric_table", &metric_table);
  module.def(
      "_accelerator_seam", [] { return py::capsule(&pg::accelerator_seam(), pg::AcceleratorSeam::kName); },
      "For modules that add a kind of accelerator: pg/accelerator.h.");
  module.def(
      "lane_threads", [] { return pg::Process::instance().lanes()->thread_count(); },
      "Threads on which futures complete.");
  module.def(
      "at_exit", [] { pg::Process::instance().at_exit(); }, py::call_guard<py::gil_scoped_release>(),
      "Leaves all groups that are still open; for atexit.");
}

}  // namespace
}  // namespace hybridps::bindings

PYBIND11_MODULE(_C, module) {
  using namespace hybridps::bindings;
  install_interpreter_lock();
  py::module_::import("torch.distributed");  // the base classes of our classes are bound there
  GroupClass group(module, "ProcessGroupHybrid");
  bind_options(group);
  bind_group(module, group);
  bind_functions(module);
}
