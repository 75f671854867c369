// The one table of flag combinations that cannot be right. Checked before anything is loaded, and once more
// with the model's own configuration; docs/flags.md shows it and the tests walk it row by row.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "config/model_config.h"
#include "config/server_config.h"

namespace sluice {

struct LegalityRow {
  std::string id;           // stable, for tests and documents
  std::string combination;  // what may not be
  std::string reason;
  std::string remedy;  // what works instead
  bool needs_model = false;
  // The values in question, for the message; empty text: the row is not violated. `model` is null unless
  // needs_model.
  std::function<std::string(const ServerConfig& config, const ModelConfig* model)> violation;
  // Two command lines for the test: one that violates this row and no other, one nearby that violates none.
  std::string illegal_example, legal_example;
};

const std::vector<LegalityRow>& LegalityTable();

// One line per violated row: values, reason, remedy. Without a model the rows that need one are left out;
// with a model only those are checked.
std::vector<std::string> IllegalCombinations(const ServerConfig& config, const ModelConfig* model);

// The second check, after the model's configuration was read. Invalid with one line per violated row.
Status CheckWithModel(const ServerConfig& config, const ModelConfig& model);

}  // namespace sluice
