#include "eval/dataset.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>

#include "base/random.h"

namespace sluice::eval {
namespace {

Status AddSession(const Json& line, int64_t number, Dataset* out) {
  const auto wrong = [number](std::string_view what) { return Invalid("line {}: {}", number, what); };
  Session session;
  const Json& messages = line["messages"];
  if (!messages.is_array()) return wrong("messages is not a list");
  session.messages = messages;
  if (const auto id = line.find("id"); id != line.end()) {
    session.id = id->is_string() ? id->get<std::string>() : id->dump();
  } else {
    session.id = std::to_string(number);
  }
  if (const auto bucket = line.find("bucket"); bucket != line.end()) {
    session.bucket = bucket->is_string() ? bucket->get<std::string>() : bucket->dump();
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& m = messages[i];
    if (!m.is_object() || !m.contains("role") || !m["role"].is_string() || !m.contains("content")) {
      return wrong(fmt::format("messages[{}] has no role or content", i));
    }
    if (m["role"] != "assistant") continue;
    if (!m["content"].is_string()) return wrong(fmt::format("messages[{}]: an answer must be a string", i));
    if (i == 0) return wrong("the first message is an answer");
    Turn turn;
    turn.messages = i;
    turn.expected = m["content"].get<std::string>();
    session.turns.push_back(std::move(turn));
  }
  const auto fill = [&](const char* key, auto set) -> Status {
    const auto it = line.find(key);
    if (it == line.end()) return OkStatus();
    if (!it->is_array() || it->size() != session.turns.size()) {
      return wrong(
          fmt::format("{} must have one entry for each of the {} answers", key, session.turns.size()));
    }
    for (size_t t = 0; t < session.turns.size(); ++t) {
      if (!set(session.turns[t], (*it)[t])) return wrong(fmt::format("{}[{}] has the wrong type", key, t));
    }
    return OkStatus();
  };
  RETURN_IF_ERROR(fill("kinds", [](Turn& t, const Json& v) {
    if (v.is_string()) t.kind = v.get<std::string>();
    return v.is_string();
  }));
  RETURN_IF_ERROR(fill("sure", [](Turn& t, const Json& v) {
    if (v.is_boolean()) t.sure = v.get<bool>();
    return v.is_boolean();
  }));
  RETURN_IF_ERROR(fill("reference_ok", [](Turn& t, const Json& v) {
    if (v.is_boolean()) t.reference_ok = v.get<bool>();
    return v.is_boolean();
  }));
  out->has_sure |= line.contains("sure");
  out->has_reference |= line.contains("reference_ok");
  out->sessions.push_back(std::move(session));
  return OkStatus();
}

Status AddProblem(const Json& line, int64_t number, Dataset* out) {
  if (!line["question"].is_string() || !line["answer"].is_string()) {
    return Invalid("line {}: question and answer must be strings", number);
  }
  Problem p{line["question"].get<std::string>(), line["answer"].get<std::string>()};
  if (!FinalNumber(p.answer)) return Invalid("line {}: the answer does not end in '#### number'", number);
  out->problems.push_back(std::move(p));
  return OkStatus();
}

Status AddLine(std::string_view text, int64_t number, Dataset* out) {
  const Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (line.is_discarded() || !line.is_object()) return Invalid("line {}: not a JSON object", number);
  const bool problem = line.contains("question") && line.contains("answer") && !line.contains("messages");
  if (!problem && !line.contains("messages")) {
    return Invalid(
        "line {}: neither messages nor question and answer; see the documentation of eval for both formats",
        number);
  }
  const DatasetKind kind = problem ? DatasetKind::kProblems : DatasetKind::kSessions;
  const bool first = out->sessions.empty() && out->problems.empty();
  if (!first && kind != out->kind)
    return Invalid("line {}: sessions and question-answer pairs are mixed", number);
  out->kind = kind;
  return problem ? AddProblem(line, number, out) : AddSession(line, number, out);
}

bool Full(const Dataset& d, int64_t limit, int64_t shots = 0) {
  return limit >= 0 &&
         int64_t(d.sessions.size() + d.problems.size()) >= limit + (d.problems.empty() ? 0 : shots);
}

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

std::string_view Strip(std::string_view s) {
  while (!s.empty() && IsSpace(s.front())) s.remove_prefix(1);
  while (!s.empty() && IsSpace(s.back())) s.remove_suffix(1);
  return s;
}

}  // namespace

StatusOr<Dataset> ParseDataset(std::string_view text, int64_t limit) {
  Dataset out;
  int64_t number = 0;
  while (!text.empty() && !Full(out, limit)) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = Strip(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (!line.empty()) RETURN_IF_ERROR(AddLine(line, number, &out));
  }
  if (out.sessions.empty() && out.problems.empty()) return Invalid("the dataset holds no line");
  return out;
}

StatusOr<Dataset> ReadDataset(const std::string& path, int64_t limit, int64_t shots) {
  // gzopen reads plain files too.
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (file == nullptr) return NotFound("--dataset {}: cannot open it; give a .jsonl or .jsonl.gz file", path);
  Dataset out;
  std::string line;
  std::array<char, 1 << 16> buffer;
  int64_t number = 0;
  bool end = false;
  while (!end && !Full(out, limit, shots)) {
    line.clear();
    for (;;) {
      if (gzgets(file.get(), buffer.data(), int(buffer.size())) == nullptr) {
        end = true;
        break;
      }
      line += buffer.data();
      if (line.back() == '\n') break;
    }
    int error = Z_OK;
    gzerror(file.get(), &error);
    if (error != Z_OK && error != Z_STREAM_END)
      return Invalid("--dataset {}: damaged after line {}", path, number);
    if (line.empty()) continue;
    ++number;
    const std::string_view content = Strip(line);
    if (content.empty()) continue;
    if (const Status s = AddLine(content, number, &out); !s.ok())
      return Invalid("--dataset {}: {}", path, Message(s));
  }
  if (out.sessions.empty() && out.problems.empty())
    return Invalid("--dataset {}: holds no session and no problem; give a file with one JSON object a line",
                   path);
  return out;
}

void SampleSessions(Dataset* dataset, int64_t per_bucket, uint64_t seed) {
  std::map<std::string, std::vector<size_t>> buckets;
  for (size_t i = 0; i < dataset->sessions.size(); ++i) buckets[dataset->sessions[i].bucket].push_back(i);
  std::set<size_t> kept;
  SeededStream random(seed);
  for (auto& [name, sessions] : buckets) {
    for (size_t i = sessions.size(); i > 1; --i) std::swap(sessions[i - 1], sessions[random.Below(i)]);
    sessions.resize(std::min(sessions.size(), size_t(std::max<int64_t>(0, per_bucket))));
    kept.insert(sessions.begin(), sessions.end());
  }
  std::vector<Session> sample;
  for (const size_t i : kept) sample.push_back(std::move(dataset->sessions[i]));
  dataset->sessions = std::move(sample);
}

std::optional<std::string> LastNumber(std::string_view text) {
  for (size_t end = text.size(); end > 0;) {
    while (end > 0 && !IsDigit(text[end - 1])) --end;
    if (end == 0) return std::nullopt;
    size_t begin = end;
    const auto inside = [&](size_t i) {  // a comma or point counts between digits only
      return IsDigit(text[i]) || ((text[i] == ',' || text[i] == '.') && i > 0 && IsDigit(text[i - 1]));
    };
    while (begin > 0 && inside(begin - 1)) --begin;
    if (begin > 0 && text[begin - 1] == '-' && (begin == 1 || !IsDigit(text[begin - 2]))) --begin;
    std::string number(text.substr(begin, end - begin));
    std::erase(number, ',');
    return number;
  }
  return std::nullopt;
}

std::optional<std::string> FinalNumber(std::string_view answer) {
  const size_t mark = answer.rfind("####");
  if (mark == std::string_view::npos) return std::nullopt;
  return LastNumber(answer.substr(mark + 4));
}

bool SameNumber(std::string_view a, std::string_view b) {
  const double x = std::strtod(std::string(a).c_str(), nullptr),
               y = std::strtod(std::string(b).c_str(), nullptr);
  return std::fabs(x - y) <= 1e-9 * std::max(1.0, std::fabs(y));
}

}  // namespace sluice::eval
