#include "eval/verdict.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

namespace sluice::eval {
namespace {

constexpr double kNormal95 = 1.96, kSureShare = 0.995, kAgreementShare = 0.95;

struct Count {
  int64_t right = 0, all = 0;
  void Add(bool ok) {
    right += ok;
    ++all;
  }
};

Verdict AtLeast(std::string name, const Count& c, double want) {
  Verdict v{std::move(name), c.all, double(c.right) / double(c.all), want, 0, false};
  v.holds = v.got >= want;
  return v;
}

}  // namespace

StatusOr<Expected> ParseExpected(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const Json::json_pointer shares("/bf16/index/buckets");
  if (json.is_discarded() || !json.is_object() || !json.contains(shares) || !json[shares].is_object() ||
      !json.contains("core_kinds") || !json["core_kinds"].is_array()) {
    return Invalid("it is not a JSON object with core_kinds and bf16.index.buckets");
  }
  Expected out;
  for (const auto& [bucket, share] : json[shares].items()) {
    if (!share.is_number() || !(share >= 0.0 && share <= 1.0))
      return Invalid("bf16.index.buckets.{}: {} is not a share from 0 to 1", bucket, share.dump());
    out.buckets[bucket] = share.get<double>();
  }
  for (const Json& kind : json["core_kinds"]) {
    if (!kind.is_string()) return Invalid("core_kinds: {} is not a string", kind.dump());
    out.core_kinds.push_back(kind.get<std::string>());
  }
  return out;
}

StatusOr<Expected> ReadExpected(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return NotFound("--expected {}: cannot open it", path);
  std::stringstream text;
  text << in.rdbuf();
  StatusOr<Expected> out = ParseExpected(text.str());
  if (!out.ok())
    return Status(out.status().code(), fmt::format("--expected {}: {}", path, Message(out.status())));
  return out;
}

std::vector<Verdict> Judge(const PassResult& pass, const Dataset& dataset, const Expected& expected) {
  std::map<std::string, Count> buckets;
  Count core, sure, agree;
  for (const TurnResult& t : pass.turns) {
    if (!t.session->bucket.empty()) buckets[t.session->bucket].Add(t.right);
    if (std::find(expected.core_kinds.begin(), expected.core_kinds.end(), t.turn->kind) !=
        expected.core_kinds.end()) {
      core.Add(t.right);
    }
    if (t.turn->sure) sure.Add(t.right);
    if (t.turn->reference_ok) agree.Add(t.right == *t.turn->reference_ok);
  }
  std::vector<Verdict> out;
  for (const auto& [bucket, count] : buckets) {
    Verdict v{"bucket " + bucket, count.all, double(count.right) / double(count.all), 0, 0, false};
    if (const auto it = expected.buckets.find(bucket); it != expected.buckets.end()) {
      v.want = it->second;
      v.margin = kNormal95 * std::sqrt(v.want * (1 - v.want) / double(count.all));
      v.holds = std::fabs(v.got - v.want) <= v.margin;
    }
    out.push_back(v);
  }
  std::sort(out.begin(), out.end(), [](const Verdict& a, const Verdict& b) {
    return a.name.size() != b.name.size() ? a.name.size() < b.name.size() : a.name < b.name;
  });
  if (core.all > 0) out.push_back(AtLeast("core kinds", core, 1.0));
  if (dataset.has_sure && sure.all > 0) out.push_back(AtLeast("sure", sure, kSureShare));
  if (agree.all > 0) out.push_back(AtLeast("agreement", agree, kAgreementShare));
  return out;
}

TierVerdict JudgeTier(const PassResult& pass, int64_t least_tokens) {
  if (pass.name != "l2" && pass.name != "l3") return {};
  int64_t hits = 0, longest = 0;
  for (const TurnResult& t : pass.turns) {
    hits += pass.name == "l2" ? t.answer.cached.host : t.answer.cached.storage;
    longest = std::max<int64_t>(longest, t.answer.prompt_tokens);
  }
  if (hits > 0) return {};
  if (longest < least_tokens) {
    return {true,
            fmt::format("pass {}: no prompt is long enough to hit that tier: the longest has {} tokens, and "
                        "{} are needed",
                        pass.name, longest, least_tokens)};
  }
  return {false,
          fmt::format("pass {}: no token came from that tier, so the pass shows nothing; {}", pass.name,
                      pass.name == "l2"
                          ? "raise --hicache-ratio or --hicache-size"
                          : "was its folder filled with this dataset, model and --kv-cache-dtype? Use "
                            "--hicache-storage-prefetch-policy wait_complete")};
}

Json VerdictJson(const std::vector<Verdict>& verdicts) {
  Json out = Json::array();
  for (const Verdict& v : verdicts) {
    out.push_back({{"name", v.name},
                   {"answers", v.answers},
                   {"got", v.got},
                   {"want", v.want},
                   {"margin", v.margin},
                   {"holds", v.holds}});
  }
  return out;
}

std::string VerdictTable(const std::string& pass, const std::vector<Verdict>& verdicts) {
  std::string out = fmt::format("\n{:<14} {:>9} {:>18} {:>8}\n", "pass " + pass, "got", "wanted", "answers");
  for (const Verdict& v : verdicts) {
    const std::string want = v.margin > 0 ? fmt::format("{:.2f}% +- {:.2f}", 100 * v.want, 100 * v.margin)
                                          : fmt::format(">= {:.2f}%", 100 * v.want);
    out += fmt::format("{:<14} {:>8.2f}% {:>18} {:>8}  {}\n", v.name, 100 * v.got, want, v.answers,
                       v.holds ? "holds" : "DOES NOT HOLD");
  }
  return out;
}

}  // namespace sluice::eval
