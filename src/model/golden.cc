#include "model/golden.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "base/file_text.h"
#include "config/json_fields.h"
#include "weights/safetensors.h"

namespace sluice {
namespace {

struct Prompt {
  std::string tensor;  // name of its logits
  std::vector<int32_t> ids, greedy;
};

struct Golden {
  std::vector<Prompt> prompts;
  std::unique_ptr<SafetensorsFile> logits, topk, draft;
};

// `where` names the file and the prompt.
StatusOr<std::vector<int32_t>> TokenList(const Json& object, const char* key, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_array())
    return Invalid("{}.{}: not a list of token ids (export the goldens again)", where, key);
  std::vector<int32_t> ids;
  for (const Json& v : *it) {
    if (!v.is_number_integer() || v < 0 || v > 0x7fffffff)
      return Invalid("{}.{}[{}]: {} is not a token id (export the goldens again)", where, key, ids.size(),
                     v.dump());
    ids.push_back(v.get<int32_t>());
  }
  return ids;
}

StatusOr<Golden> Open(const std::string& folder) {
  Golden g;
  std::error_code ec;
  const bool trained = std::filesystem::exists(folder + "/prompts.json", ec);
  const std::string path = folder + (trained ? "/prompts.json" : "/golden.json");
  ASSIGN_OR_RETURN(const std::string text, ReadFileText(path));
  Json list;
  try {
    list = Json::parse(text);
    if (!trained) list = list.at("prompts");
  } catch (const nlohmann::json::exception& e) {
    return Invalid("{}: {} (export the goldens again)", path, JsonComplaint(e.what()));
  }
  if (!list.is_array() || list.empty())
    return Invalid("{}: holds no list of prompts (export the goldens again)", path);
  for (const Json& p : list) {
    const std::string where = fmt::format("{}: prompts[{}]", path, g.prompts.size());
    if (!p.is_object()) return Invalid("{}: not an object (export the goldens again)", where);
    Prompt prompt;
    prompt.tensor = fmt::format("logits{}", g.prompts.size());
    if (trained) {
      ASSIGN_OR_RETURN(prompt.tensor, JsonFields(p, where + ".").String("name", std::nullopt));
    }
    ASSIGN_OR_RETURN(prompt.ids, TokenList(p, "ids", where));
    ASSIGN_OR_RETURN(prompt.greedy, TokenList(p, "greedy", where));
    if (prompt.ids.empty()) return Invalid("{}.ids: empty (export the goldens again)", where);
    g.prompts.push_back(std::move(prompt));
  }
  ASSIGN_OR_RETURN(g.logits,
                   SafetensorsFile::Open(folder + (trained ? "/logits.safetensors" : "/golden.safetensors")));
  const std::string topk = folder + "/topk.safetensors";
  if (trained && std::filesystem::exists(topk, ec)) {
    ASSIGN_OR_RETURN(g.topk, SafetensorsFile::Open(topk));
  }
  const std::string draft = folder + "/mtp.safetensors";
  if (trained && std::filesystem::exists(draft, ec)) {
    ASSIGN_OR_RETURN(g.draft, SafetensorsFile::Open(draft));
  }
  return g;
}

template <typename T>
std::vector<T> Values(const StoredTensor& t) {
  std::vector<T> v(size_t(t.elements()));
  std::memcpy(v.data(), t.data, v.size() * sizeof(T));
  return v;
}

StatusOr<std::vector<float>> GoldenLogits(const SafetensorsFile& file, const std::string& folder,
                                          const std::string& name, int64_t vocab) {
  const StoredTensor* t = file.Find(name);
  if (t == nullptr)
    return Invalid("{}: tensor \"{}\" is missing from its safetensors files (export the goldens again)",
                   folder, name);
  if (t->dtype != DType::kF32 || t->shape.size() != 2 || t->shape[1] != vocab) {
    return Invalid("{}: tensor \"{}\" is {} {}, expected F32 [rows, {}]", t->file, name, t->dtype_name,
                   ShapeString(t->shape), vocab);
  }
  return Values<float>(*t);
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& want) {
  double diff = 0, scale = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = std::fabs(double(got[i]) - double(want[i]));
    diff = std::isnan(d) ? INFINITY : std::max(diff, d);
    scale = std::max(scale, std::fabs(double(want[i])));
  }
  return scale == 0 ? diff : diff / scale;
}

// Compares the sets of the rows that the golden file holds, while the prompt that it names is running.
class TopkCheck final : public LayerHooks {
 public:
  TopkCheck(const SafetensorsFile& file, const SequenceRunner& runner, int64_t topk, LogicalLayer draft_layer,
            GoldenReport& report)
      : file_(file), runner_(runner), topk_(topk), draft_layer_(draft_layer), report_(report) {
    for (const auto& [key, value] : file.metadata()) {
      if (key == "first_query") first_query_ = std::strtoll(value.c_str(), nullptr, 10);
      if (key == "prompt") prompt_ = value;
    }
  }
  const std::string& prompt() const { return prompt_; }
  void set_rows(int64_t rows) { rows_ = rows; }
  const Status& status() const { return status_; }

  bool WantsSelection() const override { return true; }
  void IndexSelected(LogicalLayer layer, const int32_t* selected, const int32_t* count) override {
    if (layer == draft_layer_) return;
    const StoredTensor* sets = file_.Find(fmt::format("layer{}", layer.value));
    const StoredTensor* gaps = file_.Find(fmt::format("layer{}.gap", layer.value));
    if (sets == nullptr || gaps == nullptr || sets->dtype != DType::kI32 || sets->shape.size() != 2 ||
        sets->shape[1] != topk_ || gaps->elements() != sets->shape[0]) {
      status_ =
          Invalid("topk.safetensors: layer{} is missing or has another shape (export the goldens again)",
                  layer.value);
      return;
    }
    const std::vector<int32_t> want = Values<int32_t>(*sets);
    const std::vector<float> gap = Values<float>(*gaps);
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t q = runner_.length() + r - first_query_;
      if (q < 0 || q >= sets->shape[0]) continue;
      const int32_t* row = want.data() + q * topk_;
      const int32_t* got = selected + r * topk_;
      ++report_.topk_rows;
      std::vector<int32_t> missing;
      std::set_difference(row, row + topk_, got, got + count[r], std::back_inserter(missing));
      if (missing.empty() && count[r] == topk_) continue;
      if (gap[size_t(q)] >= kTopkGap) {
        ++report_.topk_rows_differing;
      } else {
        ++report_.topk_rows_near;
        report_.topk_near_entries = std::max(report_.topk_near_entries, int64_t(missing.size()));
      }
    }
  }

 private:
  const SafetensorsFile& file_;
  const SequenceRunner& runner_;
  const int64_t topk_;
  const LogicalLayer draft_layer_;
  int64_t first_query_ = 0, rows_ = 0;
  std::string prompt_;
  GoldenReport& report_;
  Status status_;
};

void CountMargins(const std::vector<float>& got, const std::vector<float>& want, int64_t vocab,
                  GoldenReport& report) {
  for (size_t at = 0; at < want.size(); at += size_t(vocab)) {
    std::vector<float> sorted(want.begin() + int64_t(at), want.begin() + int64_t(at) + vocab);
    std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
    if (double(sorted[0]) - double(sorted[1]) < kMargin) continue;
    ++report.margin_positions;
    report.margin_equal += GreedyToken(std::span(got).subspan(at, size_t(vocab))) ==
                           GreedyToken(std::span(want).subspan(at, size_t(vocab)));
  }
}

}  // namespace

StatusOr<std::vector<std::vector<int32_t>>> GoldenPrompts(const std::string& folder) {
  ASSIGN_OR_RETURN(const Golden g, Open(folder));
  std::vector<std::vector<int32_t>> prompts;
  for (const Prompt& p : g.prompts) prompts.push_back(p.ids);
  return prompts;
}

StatusOr<int64_t> GoldenContext(const std::string& folder) {
  ASSIGN_OR_RETURN(const Golden g, Open(folder));
  int64_t n = 0;
  for (const Prompt& p : g.prompts) n = std::max(n, int64_t(p.ids.size() + p.greedy.size()));
  return n;
}

StatusOr<GoldenReport> CompareWithGolden(const Model& model, SequenceRunner& runner,
                                         const std::string& folder) {
  ASSIGN_OR_RETURN(const Golden golden, Open(folder));
  const int64_t vocab = model.config().vocab_size;
  GoldenReport report;
  std::unique_ptr<TopkCheck> check;
  if (golden.topk != nullptr && model.config().sparse()) {
    report.has_topk = true;
    check = std::make_unique<TopkCheck>(*golden.topk, runner, model.config().index.topk,
                                        model.config().draft_layer(), report);
  }
  for (const Prompt& p : golden.prompts) {
    ASSIGN_OR_RETURN(const std::vector<float> want, GoldenLogits(*golden.logits, folder, p.tensor, vocab));
    const int64_t keep = int64_t(want.size()) / vocab;
    if (keep > int64_t(p.ids.size()))
      return Invalid("{}: tensor \"{}\" has more rows than its prompt has tokens (export the goldens again)",
                     folder, p.tensor);
    const bool checked = check != nullptr && check->prompt() == p.tensor;
    runner.Reset();
    // The last rows are a chunk of their own size anyway; the sets are compared chunk by chunk.
    std::vector<float> got, drafted;
    const int64_t chunk = std::max<int64_t>(runner.buffers().limits().max_rows, 1);
    for (int64_t at = 0; at < int64_t(p.ids.size()); at += chunk) {
      const int64_t n = std::min(chunk, int64_t(p.ids.size()) - at);
      const int64_t wanted = std::clamp<int64_t>(at + n - (int64_t(p.ids.size()) - keep), 0, n);
      if (checked) {
        check->set_rows(n);
        runner.forward_options().hooks = check.get();
      }
      auto logits = runner.Extend(std::span(p.ids).subspan(size_t(at), size_t(n)), wanted, &drafted);
      runner.forward_options().hooks = nullptr;
      RETURN_IF_ERROR(logits.status());
      got.insert(got.end(), logits->begin(), logits->end());
    }
    if (checked) RETURN_IF_ERROR(check->status());
    ++report.prompts;
    report.max_rel_err = std::max(report.max_rel_err, RelativeError(got, want));
    CountMargins(got, want, vocab, report);
    if (model.has_draft() && golden.draft != nullptr) {
      // Four rows: the last four slots of the prompt.
      ASSIGN_OR_RETURN(const std::vector<float> draft, GoldenLogits(*golden.draft, folder, p.tensor, vocab));
      if (draft.size() != drafted.size()) {
        return Invalid(
            "{}/mtp.safetensors: tensor \"{}\" has {} values, expected {} (export the goldens again)", folder,
            p.tensor, draft.size(), drafted.size());
      }
      ++report.draft_prompts;
      report.draft_max_rel_err = std::max(report.draft_max_rel_err, RelativeError(drafted, draft));
    }
    std::vector<float> z(got.end() - vocab, got.end());
    for (size_t i = 0; i < p.greedy.size(); ++i) {
      const int32_t token = GreedyToken(z);
      if (token != p.greedy[i]) {
        report.greedy_equal = false;
        break;
      }
      ++report.greedy_tokens;
      if (i + 1 == p.greedy.size()) break;
      ASSIGN_OR_RETURN(z, runner.Extend(std::span(&token, 1), 1));
    }
  }
  if (report.has_topk && report.topk_rows == 0) {
    return Invalid(
        "{}/topk.safetensors: no set was compared: its prompt \"{}\" is none of the folder's (export it "
        "again)",
        folder, check->prompt());
  }
  return report;
}

}  // namespace sluice
