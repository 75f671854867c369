#include "config/server_config.h"

#include <nlohmann/json.hpp>

#include "config/flags.h"

namespace sluice {

int32_t ServerConfig::DraftTokens() const {
  constexpr int32_t kDefault = 3;
  if (speculative_algorithm.empty()) return 0;
  if (speculative_num_steps > 0) return int32_t(speculative_num_steps);
  return speculative_num_draft_tokens > 1 ? int32_t(speculative_num_draft_tokens - 1) : kDefault;
}

namespace {

// An object given on the command line keeps everything but its password; a file's name is no secret.
std::string WithoutPassword(const std::string& extra_config) {
  auto json = nlohmann::ordered_json::parse(extra_config, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("password")) return extra_config;
  json["password"] = "***";
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

std::string ServerConfig::ResolvedJson() const {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const FlagSpec& flag : FlagTable()) {
    if (std::holds_alternative<std::monostate>(flag.target) || flag.switch_sets) continue;
    std::string key(flag.name().substr(2));
    for (char& c : key) c = c == '-' ? '_' : c;
    auto& value = json[key];
    if (auto* text = std::get_if<std::string ServerConfig::*>(&flag.target)) value = this->**text;
    if (auto* number = std::get_if<int64_t ServerConfig::*>(&flag.target)) value = this->**number;
    if (auto* real = std::get_if<double ServerConfig::*>(&flag.target)) value = this->**real;
    if (auto* on = std::get_if<bool ServerConfig::*>(&flag.target)) value = this->**on;
    if (auto* text = std::get_if<std::string ModelOverrides::*>(&flag.target)) value = overrides.**text;
    if (auto* number = std::get_if<int64_t ModelOverrides::*>(&flag.target)) value = overrides.**number;
    if (key.ends_with("api_key") && !value.get_ref<const std::string&>().empty()) value = "***";
    if (auto* text = value.get_ptr<const std::string*>(); text && key.ends_with("extra_config"))
      value = WithoutPassword(*text);
  }
  json["notices"] = notices;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace sluice
