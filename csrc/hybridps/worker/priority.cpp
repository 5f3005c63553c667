#include "hybridps/worker/priority.h"

#include <charconv>
#include <optional>

namespace hybridps::worker {
namespace {

constexpr std::string_view kGather = ",all_gather=";

std::optional<std::int8_t> number_in(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < -128 || value > 127) return {};
  return static_cast<std::int8_t>(value);
}

}  // namespace

core::Result<Priorities> parse_priorities(std::string_view text) {
  if (text.empty() || text == "data") return Priorities{};
  if (text == "tensor" || text == "pipeline") return Priorities{3, 3};
  if (text == "sharded") return Priorities{1, 2};
  const std::size_t at = text.find(kGather);
  const auto any = number_in(text.substr(0, at));
  const auto all_gather = at == std::string_view::npos ? any : number_in(text.substr(at + kGather.size()));
  if (any && all_gather) return Priorities{*any, *all_gather};
  return core::Status(
      core::Code::kInvalidArgument,
      "priority '" + std::string(text) +
          "': it is a number from -128 to 127, \"NUMBER,all_gather=NUMBER\", or one of tensor, pipeline, "
          "sharded, data");
}

std::string text_of(const Priorities& priorities) {
  if (priorities == Priorities{}) return {};
  std::string text = std::to_string(priorities.any);
  if (priorities.all_gather != priorities.any) text += std::string(kGather) + std::to_string(priorities.all_gather);
  return text;
}

}  // namespace hybridps::worker
