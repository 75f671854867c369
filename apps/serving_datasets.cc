#include "serving_datasets.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "base/random.h"
#include "replay.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

// The text of a turn; null when the turn is none.
const std::string* TurnText(const Json& turn) {
  if (!turn.is_object()) return nullptr;
  for (const char* key : {"value", "content"}) {
    const auto it = turn.find(key);
    if (it != turn.end() && it->is_string()) return it->get_ptr<const std::string*>();
  }
  return nullptr;
}

}  // namespace

StatusOr<std::vector<LoadRequest>> ConversationWorkload(const std::string& path, const ConversationOptions& o,
                                                        const TokenizeTexts& tokenize) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return NotFound("--dataset-path {}: cannot open it", path);
  Json json = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!json.is_array()) {
    return Invalid("--dataset-path {}: not a JSON list of conversations (sharegpt)", path);
  }
  std::vector<std::pair<std::string, std::string>> turns;  // prompt, answer
  for (const Json& entry : json) {
    if (!entry.is_object()) continue;
    for (const char* key : {"conversations", "conversation"}) {
      const auto it = entry.find(key);
      if (it == entry.end() || !it->is_array() || it->size() < 2) continue;
      const std::string *prompt = TurnText((*it)[0]), *answer = TurnText((*it)[1]);
      if (prompt != nullptr && answer != nullptr) turns.emplace_back(*prompt, *answer);
      break;
    }
  }
  if (turns.empty()) {
    return Invalid("--dataset-path {}: no entry has \"conversations\" of two turns with a \"value\" each",
                   path);
  }
  SeededStream random(o.seed);
  for (size_t i = turns.size(); i > 1; --i) std::swap(turns[i - 1], turns[random.Below(i)]);

  std::vector<LoadRequest> requests;
  constexpr size_t kBatch = 32;
  for (size_t begin = 0; begin < turns.size() && int64_t(requests.size()) < o.num_prompts; begin += kBatch) {
    const size_t end = std::min(begin + kBatch, turns.size());
    std::vector<std::string> texts;
    for (size_t i = begin; i < end; ++i) {
      texts.push_back(std::move(turns[i].first));
      texts.push_back(std::move(turns[i].second));
    }
    ASSIGN_OR_RETURN(std::vector<std::vector<int32_t>> ids, tokenize(texts));
    if (ids.size() != texts.size()) return Internal("{} texts, {} token lists", texts.size(), ids.size());
    for (size_t i = 0; i < ids.size() && int64_t(requests.size()) < o.num_prompts; i += 2) {
      if (ids[i].size() < 2 || ids[i + 1].size() < 2) continue;
      const int64_t out = o.output_len > 0 ? o.output_len : int64_t(ids[i + 1].size());
      if (o.context_len > 0 && int64_t(ids[i].size()) + out > o.context_len) continue;
      requests.push_back({std::move(ids[i]), int32_t(out)});
    }
  }
  if (requests.empty()) {
    return Invalid("--dataset-path {}: none of its {} conversations fits into {} tokens", path, turns.size(),
                   o.context_len);
  }
  return requests;
}

StatusOr<std::vector<LoadRequest>> TraceWorkload(const std::string& path, const TraceOptions& o) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return NotFound("--dataset-path {}: cannot open it", path);
  const StatusOr<std::vector<TraceRequest>> trace = ParseTrace(in);
  if (!trace.ok()) return Invalid("--dataset-path {}: {}", path, Message(trace.status()));
  std::vector<LoadRequest> requests;
  int64_t first_ms = 0;
  for (const TraceRequest& r : *trace) {
    if (o.num_prompts > 0 && int64_t(requests.size()) >= o.num_prompts) break;
    if (o.context_len > 0 && r.input_length + r.output_length > o.context_len) continue;
    LoadRequest request{ExpandPrompt(r), int32_t(std::min<int64_t>(r.output_length, 1 << 24))};
    for (int32_t& id : request.prompt) id %= o.vocab_size;
    if (requests.empty()) first_ms = r.timestamp_ms;
    request.arrival_s = double(r.timestamp_ms - first_ms) * 1e-3 * o.slowdown;
    requests.push_back(std::move(request));
  }
  if (requests.empty()) {
    return Invalid("--dataset-path {}: none of its {} requests fits into a context of {} tokens", path,
                   trace->size(), o.context_len);
  }
  return requests;
}

}  // namespace sluice
