#include "eval/report.h"

#include <algorithm>
#include <fstream>
#include <map>

namespace sluice::eval {
namespace {

struct Share {
  int64_t right = 0, all = 0;
  void Add(bool ok) {
    right += ok;
    ++all;
  }
  // Null when nothing was counted: no share is not a share of zero.
  Json Value() const { return all == 0 ? Json(nullptr) : Json(double(right) / double(all)); }
};

// "512" before "1024": numbers by value, then text.
struct ByNumber {
  bool operator()(const std::string& a, const std::string& b) const {
    const bool na = !a.empty() && a.find_first_not_of("0123456789") == std::string::npos;
    const bool nb = !b.empty() && b.find_first_not_of("0123456789") == std::string::npos;
    if (na != nb) return na;
    if (na && a.size() != b.size()) return a.size() < b.size();
    return a < b;
  }
};

template <typename Map>
void PutShares(Json* out, const char* shares, const char* counts, const Map& map) {
  Json values = Json::object(), answers = Json::object();
  for (const auto& [key, share] : map) {
    values[key] = share.Value();
    answers[key] = share.all;
  }
  (*out)[shares] = std::move(values);
  (*out)[counts] = std::move(answers);
}

std::string Percent(const Json& v) {
  return v.is_number() ? fmt::format("{:.2f}%", 100 * v.get<double>()) : "-";
}

// Drafts by how far ahead they were, of every pass that had some: share accepted of those that were reached.
std::string DraftTable(const Json& passes) {
  std::string out;
  for (const Json& p : passes) {
    if (p["draft_places"].empty()) continue;
    if (out.empty())
      out = fmt::format("\n{:<10} {:>6} {:>9} {:>9} {:>9} {:>11}\n", "drafts", "place", "proposed", "reached",
                        "accepted", "of reached");
    int64_t place = 0;
    for (const Json& at : p["draft_places"])
      out += fmt::format("{:<10} {:>6} {:>9} {:>9} {:>9} {:>11}\n", p["name"].get<std::string>(), ++place,
                         at["proposed"].get<int64_t>(), at["reached"].get<int64_t>(),
                         at["accepted"].get<int64_t>(), Percent(at["acceptance"]));
  }
  return out;
}

}  // namespace

Json PassJson(const PassResult& pass, const PassResult* cold, const Dataset& dataset, bool has_hashes) {
  Share all, sure, agree, same_text, same_logits;
  std::map<std::string, Share, ByNumber> buckets;
  std::map<std::string, Share> kinds;
  CachedTokens cached;
  int64_t prompt = 0, output = 0, cached_total = 0, l1 = 0, l2 = 0, l3 = 0, proposed = 0, accepted = 0,
          steps = 0, first = 0;
  for (size_t i = 0; i < pass.turns.size(); ++i) {
    const TurnResult& t = pass.turns[i];
    all.Add(t.right);
    if (t.turn->sure) sure.Add(t.right);
    if (t.turn->reference_ok) agree.Add(t.right == *t.turn->reference_ok);
    if (!t.session->bucket.empty()) buckets[t.session->bucket].Add(t.right);
    if (!t.turn->kind.empty()) kinds[t.turn->kind].Add(t.right);
    prompt += t.answer.prompt_tokens;
    output += t.answer.output_tokens;
    cached_total += t.answer.cached.total();
    l1 += t.answer.cached.device;
    l2 += t.answer.cached.host;
    l3 += t.answer.cached.storage;
    proposed += t.answer.spec_proposed;
    accepted += t.answer.spec_accepted;
    steps += t.answer.spec_steps;
    first += t.answer.spec_first_accepted;
    if (cold != nullptr && i < cold->turns.size()) {
      const Answer& c = cold->turns[i].answer;
      same_text.Add(c.text == t.answer.text && c.finish == t.answer.finish &&
                    c.output_ids == t.answer.output_ids);
      if (has_hashes)
        same_logits.Add(c.logits_hash == t.answer.logits_hash && c.output_ids == t.answer.output_ids);
    }
  }
  Json out = Json::object();
  out["name"] = pass.name;
  out["answers"] = all.all;
  out["accuracy"] = all.Value();
  out["accuracy_sure"] = dataset.has_sure ? sure.Value() : Json(nullptr);
  out["answers_sure"] = sure.all;
  out["agreement_reference"] = agree.Value();
  PutShares(&out, "by_bucket", "answers_by_bucket", buckets);
  PutShares(&out, "by_kind", "answers_by_kind", kinds);
  out["identical_to_cold"] = same_text.Value();
  out["logits_identical_to_cold"] = same_logits.Value();
  out["differing_from_cold"] = same_text.all - same_text.right;
  out["cached_tokens"] = cached_total;
  out["cached_by_tier"] = {{"l1", l1}, {"l2", l2}, {"l3", l3}};
  out["prompt_tokens"] = prompt;
  out["output_tokens"] = output;
  out["seconds"] = pass.seconds;
  out["accept_length"] = steps == 0 ? Json(nullptr) : Json(double(accepted + steps) / double(steps));
  out["draft_share"] = output == 0 ? 0.0 : double(accepted) / double(output);
  out["draft_proposed"] = proposed;
  out["draft_accepted"] = accepted;
  out["draft_first_acceptance"] = steps == 0 ? Json(nullptr) : Json(double(first) / double(steps));
  out["draft_places"] = pass.drafts ? DraftPlacesJson(*pass.drafts) : Json(nullptr);
  return out;
}

Json DraftPlacesJson(const DraftCounters& drafts) {
  Json places = Json::array();
  for (size_t i = 0; i < drafts.proposed_at.size() && drafts.proposed_at[i] > 0; ++i) {
    const int64_t reached = drafts.reached_at[i], accepted = drafts.accepted_at[i];
    places.push_back(
        {{"proposed", drafts.proposed_at[i]},
         {"reached", reached},
         {"accepted", accepted},
         {"acceptance", reached == 0 ? Json(nullptr) : Json(double(accepted) / double(reached))}});
  }
  return places;
}

std::string OutputLine(const PassResult& pass, const TurnResult& turn, bool has_hashes) {
  Json line = Json::object();
  line["pass"] = pass.name;
  line["id"] = turn.session->id;
  line["turn"] = turn.number;
  line["text"] = turn.answer.text;
  line["prompt_tokens"] = turn.answer.prompt_tokens;
  line["cached_tokens"] = turn.answer.cached.total();
  line["finish"] = int(turn.answer.finish);
  if (has_hashes) {
    line["output_ids"] = turn.answer.output_ids;
    line["logits_hash"] = fmt::format("{:016x}", turn.answer.logits_hash);
  }
  return line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

StatusOr<PassResult> ReadColdOutputs(const std::string& path, const Dataset& dataset) {
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(fmt::format("{}: cannot be read", path));
  std::map<std::pair<std::string, int64_t>, Json> lines;
  for (std::string text; std::getline(in, text);) {
    Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    const bool whole = line.is_object() && line.contains("pass") && line.contains("id") &&
                       line.contains("turn") && line.contains("text") && line.contains("finish") &&
                       line.contains("output_ids") && line.contains("logits_hash");
    if (!whole)
      return Invalid("{}: line {} is no output of an evaluation with hashes", path, lines.size() + 1);
    if (line["pass"] != "cold") continue;
    // A name of its own: an assignment's right side, which empties `line`, is evaluated first.
    const std::pair key(line["id"].get<std::string>(), line["turn"].get<int64_t>());
    lines[key] = std::move(line);
  }
  PassResult cold;
  cold.name = "cold";
  for (const Session& session : dataset.sessions) {
    for (size_t t = 0; t < session.turns.size(); ++t) {
      const auto it = lines.find({session.id, int64_t(t)});
      if (it == lines.end())
        return Invalid("{}: has no cold output of session {}, turn {}; use the same dataset and --limit",
                       path, session.id, t);
      TurnResult& r = cold.turns.emplace_back();
      r.session = &session;
      r.turn = &session.turns[t];
      r.number = int32_t(t);
      r.answer.text = it->second["text"].get<std::string>();
      r.answer.finish = FinishReason(it->second["finish"].get<int>());
      r.answer.output_ids = it->second["output_ids"].get<std::vector<int32_t>>();
      r.answer.logits_hash = std::stoull(it->second["logits_hash"].get<std::string>(), nullptr, 16);
    }
  }
  return cold;
}

std::string PassTable(const Json& passes) {
  std::string out =
      fmt::format("{:<6} {:>8} {:>9} {:>9} {:>10} {:>10} {:>10} {:>9} {:>9} {:>9} {:>8}\n", "pass", "answers",
                  "right", "sure", "reference", "same text", "same bits", "cached l1", "l2", "l3", "seconds");
  for (const Json& p : passes) {
    out += fmt::format("{:<6} {:>8} {:>9} {:>9} {:>10} {:>10} {:>10} {:>9} {:>9} {:>9} {:>8.1f}\n",
                       p["name"].get<std::string>(), p["answers"].get<int64_t>(), Percent(p["accuracy"]),
                       Percent(p["accuracy_sure"]), Percent(p["agreement_reference"]),
                       Percent(p["identical_to_cold"]), Percent(p["logits_identical_to_cold"]),
                       p["cached_by_tier"]["l1"].get<int64_t>(), p["cached_by_tier"]["l2"].get<int64_t>(),
                       p["cached_by_tier"]["l3"].get<int64_t>(), p["seconds"].get<double>());
  }
  for (const char* key : {"by_bucket", "by_kind"}) {
    const Json& first = passes.at(0)[key];
    if (first.empty()) continue;
    out += fmt::format("\n{:<10}", key + 3);
    for (const Json& p : passes) out += fmt::format(" {:>9}", p["name"].get<std::string>());
    out += "   answers\n";
    for (const auto& [name, share] : first.items()) {
      out += fmt::format("{:<10}", name);
      for (const Json& p : passes) out += fmt::format(" {:>9}", Percent(p[key].value(name, Json(nullptr))));
      const std::string counts = std::string("answers_") + key;
      out += fmt::format("   {}\n", passes.at(0)[counts][name].get<int64_t>());
    }
  }
  return out + DraftTable(passes);
}

}  // namespace sluice::eval
