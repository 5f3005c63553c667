// Settings, sizes and addresses as people write them. What is accepted must be printed so that it is read as the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "hybridps/core/config.h"
#include "hybridps/core/text.h"
#include "hybridps/admission/admission_server.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto bytes = core::parse_bytes(text))
    if (core::parse_bytes(core::format_byte_setting(*bytes)) != bytes) std::abort();
  if (core::quoted(text).size() > 1000) std::abort();
  if (const auto addresses = admission::parse_addresses(std::string(text)); addresses.is_ok())
    for (const admission::Address& address : addresses.value()) {
      const auto again = admission::parse_address(address.text());
      if (!again.is_ok() || again.value().host != address.host || again.value().port != address.port) std::abort();
    }

  // Lines of NAME=VALUE as an environment; for each that is unknown the nearest known one is looked for.
  core::Config::Environment environment;
  for (std::size_t begin = 0; begin < text.size() && environment.size() < 4;) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (const std::size_t equals = line.find('='); equals != std::string_view::npos)
      environment["HYBRIDPS_" + std::string(line.substr(0, equals))] = std::string(line.substr(equals + 1));
    begin = end + 1;
  }
  const auto config = core::Config::from(environment);
  if (!config.is_ok()) {
    if (config.status().message().find("HYBRIDPS_") == std::string_view::npos) std::abort();  // it names the setting
    return 0;
  }
  core::Config::Environment printed;
  for (const core::SettingRow& row : config.value().table()) {
    if (row.source == "env") printed[row.name] = row.value;
    if (row.name == "HYBRIDPS_TOKEN" && !config.value().token.empty() && row.value == config.value().token)
      std::abort();  // a secret is never shown
  }
  (void)config.value().metrics_path();
  return 0;
}
