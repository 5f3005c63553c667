// hybridps/bindings/module.cpp: hybridps._C, what python/hybridps needs of the process group. No logic of its own.
#include <chrono>
#include <cstring>
#include <map>
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
#include "hybridps/engine/engine.h"
#include "hybridps/engine/interface.h"
#include "hybridps/pg/accelerator.h"
#include "hybridps/pg/errors.h"
#include "hybridps/pg/gil.h"
#include "hybridps/pg/process.h"
#include "hybridps/pg/process_group_hybrid.h"

namespace py = pybind11;

namespace hybridps::bindings {
namespace {

using pg::ProcessGroupHybrid;
using Options = ProcessGroupHybrid::Options;
using OptionsPtr = c10::intrusive_ptr<Options>;
using GroupPtr = c10::intrusive_ptr<ProcessGroupHybrid>;

/// Ctrl-C while waiting for other ranks.
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

OptionsPtr copy_of(const Options& options) { return c10::make_intrusive<Options>(options); }

/// The creator that python/hybridps registers: c10d's _DistributedBackendOptions, and None or any backend's options.
/// `called_at`: when, on time.monotonic(), which is core::Clock; the timeout counts from there.
GroupPtr create_backend(const py::object& dist_options, const py::object& pg_options, double called_at) {
  const auto store = dist_options.attr("store").cast<c10::intrusive_ptr<c10d::Store>>();
  const int rank = dist_options.attr("group_rank").cast<int>();
  const int size = dist_options.attr("group_size").cast<int>();
  const auto timeout = dist_options.attr("timeout").cast<std::chrono::duration<float>>();
  OptionsPtr options =
      py::isinstance<Options>(pg_options) ? copy_of(*pg_options.cast<OptionsPtr>()) : c10::make_intrusive<Options>();
  options->timeout = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
  options->group_name = dist_options.attr("group_id").cast<std::string>();
  const auto global_ranks = dist_options.attr("global_ranks_in_group").cast<std::vector<std::int64_t>>();
  options->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());

  const py::gil_scoped_release released;
  auto group = c10::make_intrusive<ProcessGroupHybrid>(store, rank, size, std::move(options),
                                                       core::TimePoint(core::from_seconds(called_at)));
  // The world waits for all; a sub-group's operations queue, since its members may make their groups in any order.
  if (global_ranks.empty()) group->wait_ready();
  return group;
}

std::vector<py::dict> config_table() {
  auto config = core::Config::from_environment();
  pg::check_status(config.status(), "reading the environment");
  std::vector<py::dict> rows;
  for (const core::SettingRow& row : config.value().table()) {
    py::dict entry;
    entry["name"] = row.name;
    entry["value"] = row.value;
    entry["default"] = row.default_value;
    entry["source"] = row.source;
    entry["unit"] = row.unit;
    entry["doc"] = row.doc;
    rows.push_back(std::move(entry));
  }
  return rows;
}

/// The network cards that a rank's data goes through on this machine, and why those.
py::dict data_nics(int local_rank, int local_size) {
  auto config = core::Config::from_environment();
  pg::check_status(config.status(), "reading the environment");
  auto interfaces = engine::choose_interfaces(config.value(), {}, {local_rank, local_size});
  pg::check_status(interfaces.status(), "choosing network interfaces");
  py::list nics;
  for (const auto& nic : interfaces.value().nics) {
    py::dict entry;
    entry["name"] = nic.name;
    entry["address"] = nic.address;
    entry["network"] = nic.network;
    entry["gbps"] = nic.gbps;
    nics.append(std::move(entry));
  }
  py::dict found;
  found["control"] = interfaces.value().control;
  found["rdma"] = interfaces.value().rdma;
  found["why"] = interfaces.value().why;
  found["node_gbps"] = interfaces.value().node_gbps;
  found["nics"] = std::move(nics);
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

/// Counters of this process's engine; empty when it has none.
std::map<std::string, std::uint64_t> stats() {
  const auto engine = engine::Engine::current();
  if (!engine) return {};
  const engine::EngineStats now = engine->stats();
  return {
      {"net_tx_payload_bytes", now.net_tx_payload_bytes},
      {"net_tx_device_bytes", now.net_tx_device_bytes},
      {"net_rx_payload_bytes", now.net_rx_payload_bytes},
      {"net_tx_header_bytes", now.net_tx_header_bytes},
      {"net_rx_header_bytes", now.net_rx_header_bytes},
      {"shm_tx_payload_bytes", now.shm_tx_payload_bytes},
      {"shm_rx_payload_bytes", now.shm_rx_payload_bytes},
      {"operations", now.operations},
      {"groups", now.groups},
      {"endpoints", now.endpoints},
      {"pinned_bytes", pg::pinned_bytes()},
      {"compress_operations", now.compress_operations},
      {"compress_bytes", now.compress_bytes},
      {"compress_wire_bytes", now.compress_wire_bytes},
      {"compress_not_finite", now.compress_not_finite},
      {"compress_encode_ns", now.compress_encode_ns},
      {"compress_decode_ns", now.compress_decode_ns},
  };
}

py::tuple options_state(const Options& options) {
  return py::make_tuple(options.timeout.count(), options.group_name, options.group_desc, options.global_ranks_in_group,
                        options.compress);
}

OptionsPtr options_from(const py::tuple& state) {
  auto options = c10::make_intrusive<Options>(std::chrono::milliseconds(state[0].cast<std::int64_t>()));
  options->group_name = state[1].cast<std::string>();
  options->group_desc = state[2].cast<std::string>();
  options->global_ranks_in_group = state[3].cast<std::vector<std::uint64_t>>();
  options->compress = state[4].cast<std::string>();
  return options;
}

/// [(ordinal, bytes, dtype, residual, owed, momentum)], the last three as bytes of float32.
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

void bind(py::module_& module) {
  // Their base classes are bound there.
  py::module_::import("torch.distributed");

  py::class_<ProcessGroupHybrid, GroupPtr, c10d::Backend> group(module, "ProcessGroupHybrid");
  py::class_<Options, OptionsPtr, c10d::Backend::Options>(group, "Options")
      .def(py::init([](std::chrono::milliseconds timeout, std::string compress) {
             auto options = c10::make_intrusive<Options>(timeout);
             options->compress = std::move(compress);
             return options;
           }),
           py::arg("timeout") = kBackendDefaultTimeout, py::arg("compress") = "")
      .def_readwrite("compress", &Options::compress,
                     "What gradients become between nodes: 'int8', 'int4:ef=1', 'none', ...; '': as HYBRIDPS_COMPRESS says.")
      .def("__copy__", [](const Options& self) { return copy_of(self); })
      .def("__deepcopy__", [](const Options& self, const py::object&) { return copy_of(self); })
      .def(py::pickle(&options_state, &options_from));
  group
      // torch 2.11 binds it for its own backends only, and copies it in split_group().
      .def_property_readonly("options", [](const ProcessGroupHybrid& self) { return self.options(); })
      .def("node_of", &ProcessGroupHybrid::node_of, py::call_guard<py::gil_scoped_release>(),
           "Group ranks by node; empty until all members have come.")
      .def("compression", &ProcessGroupHybrid::compression, "What gradients of this group become between nodes.")
      .def("compression_steps", &ProcessGroupHybrid::compression_steps, py::call_guard<py::gil_scoped_release>())
      .def("residual_norm", &ProcessGroupHybrid::residual_norm, py::call_guard<py::gil_scoped_release>())
      .def("compression_state", &compression_state)
      .def("load_compression_state", &load_compression_state, py::arg("tensors"), py::arg("steps"))
      .def("wait_ready", &ProcessGroupHybrid::wait_ready, py::call_guard<py::gil_scoped_release>(),
           "Waits until all members have come.")
      // Called on ranks that are not in a group split from this one: nothing of ours is collective there.
      .def(
          "perform_nocolor_split", [](ProcessGroupHybrid&, const py::object&) {}, py::arg("device") = py::none());

  module.def("create_backend", &create_backend, py::arg("dist_backend_opts"), py::arg("pg_options"),
             py::arg("called_at"));
  module.def("config_table", &config_table);
  module.def("data_nics", &data_nics, py::arg("local_rank"), py::arg("local_size"));
  module.def("build_info", &build_info);
  module.def("cuda", &pg::describe_cuda_support, "The GPUs of this process, or why it has none.");
  module.def("stats", &stats, py::call_guard<py::gil_scoped_release>());
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
  hybridps::bindings::install_interpreter_lock();
  hybridps::bindings::bind(module);
}
