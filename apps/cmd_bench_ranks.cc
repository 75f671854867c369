// sluice bench ranks MODEL: what sharing one request among context-parallel ranks costs and brings on this
// machine. One rank with all threads and N ranks with their share of them take turns within one run; the
// median of the rounds' ratios is reported. Beside it: planning a batch, and the bytes that cross ranks
// against the least possible.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>

#include "base/random.h"
#include "batch/row_exchange.h"
#include "commands.h"
#include "config/flags.h"
#include "engine_setup.h"
#include "exec/rank_group.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using SteadyTime = std::chrono::steady_clock;

const CommandSyntax kSyntax = {
    .usage = "sluice bench ranks [MODEL] [--attn-cp-size N] [options]",
    .summary = "Prefill and decode on N context-parallel ranks against one rank with all threads.",
    .options = {{"--prefill", "N", "prompt length (4096)"},
                {"--chunk", "N", "prompt tokens of one forward (2048)"},
                {"--decode-batch", "N", "decode batch (8)"},
                {"--decode-context", "N", "tokens before the decoded one (512)"},
                {"--rounds", "N", "rounds (5)"},
                {"--plan-only", "", "only planning and bytes, no forward"},
                {"--json", "FILE", "write one JSON document; - is stdout"}},
    .engine_flags = true,
    .max_positional = 1,
};

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

double SecondsSince(SteadyTime::time_point from) {
  return std::chrono::duration<double>(SteadyTime::now() - from).count();
}

// `batch` sequences of equal length over `ranks` lanes; each takes its pages lane after lane.
class Sequences {
 public:
  Sequences(int32_t ranks, int64_t batch, int64_t max_tokens)
      : ranks_(ranks),
        pages_per_seq_(CeilDiv(CeilDiv(max_tokens, kPageTokens), ranks) * ranks),
        batch_(batch) {}
  int64_t pages_per_lane() const { return pages_per_seq_ * batch_ / ranks_ + 1; }
  PageId Page(int64_t seq, int64_t index) const {
    return PageId(int32_t(ranks_ + seq * pages_per_seq_ + index));
  }

  // Every sequence computes rows [start, start + rows).
  ForwardBatch Batch(int64_t batch, int64_t start, int64_t rows, bool decode, int64_t vocab) const {
    ForwardBatch f;
    SeededStream random(uint64_t(start) + 1);
    for (int64_t s = 0; s < batch; ++s) {
      BatchSeq q;
      q.slot = SlotId(int32_t(s));
      q.row_begin = f.rows();
      q.num_rows = int32_t(rows);
      q.start = int32_t(start);
      q.cached = decode ? 0 : int32_t(start / kPageTokens * kPageTokens);
      q.page_begin = int32_t(f.pages.size());
      q.num_pages = int32_t(CeilDiv(start + rows, kPageTokens));
      q.decode = decode;
      for (int32_t p = 0; p < q.num_pages; ++p) f.pages.push_back(Page(s, p));
      for (int64_t i = 0; i < rows; ++i) f.tokens.push_back(int32_t(random.Below(uint64_t(vocab))));
      f.seqs.push_back(q);
    }
    return f;
  }

 private:
  int32_t ranks_;
  int64_t pages_per_seq_, batch_;
};

// The least bytes that must cross ranks in a batch: a row that is computed elsewhere than it is stored, and
// each other rank's row that a rank's rows see, once.
int64_t LeastBytes(const ForwardBatch& b, const RankSplit& split, int32_t ranks, int64_t row_bytes) {
  int64_t rows = 0;
  for (int32_t r = 0; r < ranks; ++r) {
    std::vector<std::pair<int32_t, int32_t>> furthest;  // (slot, end) of what the rank's rows see
    for (const BatchSeq& s : split.part(Rank(r)).seqs) {
      for (int32_t p = s.start; p < s.start + s.num_rows; ++p)
        rows += PageOwner(b.pages[size_t(s.page_begin + p / kPageTokens)], ranks) != r;
      const auto known = std::find_if(furthest.begin(), furthest.end(),
                                      [&](const auto& f) { return f.first == s.slot.value; });
      if (known == furthest.end()) {
        furthest.emplace_back(s.slot.value, s.start + s.num_rows);
      } else {
        known->second = std::max(known->second, s.start + s.num_rows);
      }
    }
    for (const auto& [slot, end] : furthest) {
      const auto s = std::find_if(b.seqs.begin(), b.seqs.end(),
                                  [&, id = slot](const BatchSeq& q) { return q.slot.value == id; });
      for (int32_t p = 0; p < end; ++p) {
        const bool own = PageOwner(b.pages[size_t(s->page_begin + p / kPageTokens)], ranks) == r;
        // A row that this rank has computed itself is here already.
        const bool mine = p >= s->start && split.Where(s->row_begin + p - s->start).rank.value == r;
        rows += !own && !mine;
      }
    }
  }
  return rows * row_bytes;
}

class Side {
 public:
  static StatusOr<std::unique_ptr<Side>> Make(const LoadedModel& loaded, const KvLayout& layout,
                                              const ServerConfig& config, int32_t ranks, int threads,
                                              int64_t batch, int64_t max_tokens, int64_t max_rows) {
    std::unique_ptr<Side> s(new Side(ranks, batch, max_tokens));
    s->vocab_ = loaded.config.vocab_size;
    ASSIGN_OR_RETURN(s->pool_, DevicePool::Make(layout, ranks, s->sequences_.pages_per_lane()));
    RankGroupOptions o;
    o.ranks = ranks;
    SetKvExchange(config, &o);
    o.threads_per_rank = threads;
    o.cores = AvailableCores();
    o.limits = {max_rows, batch, batch, max_tokens};
    ASSIGN_OR_RETURN(s->group_, RankGroup::Make(*loaded.model, *loaded.backend, *s->pool_, o));
    return s;
  }
  Status Step(int64_t batch, int64_t start, int64_t rows, bool decode) {
    const ForwardBatch f = sequences_.Batch(batch, start, rows, decode, vocab_);
    ForwardOptions options;
    RETURN_IF_ERROR(group_->Forward(f, f.tokens, options));
    std::vector<int32_t> last;
    for (const BatchSeq& s : f.seqs) last.push_back(s.row_begin + s.num_rows - 1);
    group_->Logits(last);
    return OkStatus();
  }
  Status Prefill(int64_t tokens, int64_t chunk) {
    for (int64_t at = 0; at < tokens; at += chunk)
      RETURN_IF_ERROR(Step(1, at, std::min(chunk, tokens - at), false));
    return OkStatus();
  }
  Status Fill(int64_t batch, int64_t tokens, int64_t chunk) {
    RETURN_IF_ERROR(Prefill(tokens, chunk));
    for (int64_t s = 1; s < batch; ++s)
      for (int64_t p = 0; p < CeilDiv(tokens, kPageTokens); ++p)
        for (const KvPiece& piece : pool_->layout().pieces())
          std::memcpy(pool_->Piece(piece, sequences_.Page(s, p)), pool_->Piece(piece, sequences_.Page(0, p)),
                      size_t(piece.bytes));
    return OkStatus();
  }
  const Sequences& sequences() const { return sequences_; }
  const RankGroup& group() const { return *group_; }

 private:
  Side(int32_t ranks, int64_t batch, int64_t max_tokens) : sequences_(ranks, batch, max_tokens) {}
  Sequences sequences_;
  int64_t vocab_ = 0;
  std::unique_ptr<DevicePool> pool_;
  std::unique_ptr<RankGroup> group_;
};

// Microseconds of planning one batch: median and 99th percentile.
std::pair<double, double> PlanTime(const ForwardBatch& batch, int32_t ranks, int64_t pages_per_lane) {
  RankSplit split;
  std::vector<double> us;
  for (int i = 0; i < 2000; ++i) {
    const auto from = SteadyTime::now();
    if (!split.Plan(batch, ranks, pages_per_lane).ok()) return {-1, -1};
    us.push_back(SecondsSince(from) * 1e6);
  }
  us.erase(us.begin(), us.begin() + 100);
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() * 99 / 100]};
}

StatusOr<int> Run(CommandLine& line) {
  ServerConfig& server = line.server;
  if (!line.positional.empty()) server.model_path = line.positional[0];
  const auto ranks = int32_t(server.attn_cp_size > 1 ? server.attn_cp_size : 2);
  ASSIGN_OR_RETURN(const int64_t prefill, line.Int("--prefill", 4096, 1, 1 << 24));
  ASSIGN_OR_RETURN(const int64_t chunk, line.Int("--chunk", 2048, 1, 1 << 24));
  ASSIGN_OR_RETURN(const int64_t batch, line.Int("--decode-batch", 8, 1, 1024));
  ASSIGN_OR_RETURN(const int64_t context, line.Int("--decode-context", 512, 1, 1 << 24));
  ASSIGN_OR_RETURN(const int64_t rounds, line.Int("--rounds", 5, 1, 1000));
  server.attn_cp_size = 1;
  ASSIGN_OR_RETURN(const std::shared_ptr<LoadedModel> loaded, LoadModel(server));
  ASSIGN_OR_RETURN(const KvLayoutOptions kv, KvOptionsFor(server, *loaded));
  ASSIGN_OR_RETURN(const KvLayout layout, KvLayout::Make(loaded->config, kv));
  const int64_t vocab = loaded->config.vocab_size;
  Json doc;
  doc["model"] = loaded->name;
  doc["kv_cache_dtype"] = Name(kv.latent_dtype);
  doc["cores"] = AvailableCores();
  doc["rows"] = Json::array();
  std::string table;

  // Planning: 32 requests, as prompts and as a mix of tiny extends after long prefixes.
  for (const int32_t n : {int32_t(2), int32_t(8)}) {
    for (const auto& [name, start, rows] :
         {std::tuple("extends of 64 after 4096", int64_t(4096), int64_t(64)),
          std::tuple("extends of 3 after 16384", int64_t(16384), int64_t(3))}) {
      const Sequences s(n, 32, start + rows);
      const auto [p50, p99] = PlanTime(s.Batch(32, start, rows, false, vocab), n, s.pages_per_lane());
      doc["rows"].push_back(Json{{"phase", "plan"},
                                 {"ranks", n},
                                 {"requests", 32},
                                 {"what", name},
                                 {"p50_us", p50},
                                 {"p99_us", p99},
                                 {"limit_us", 100}});
      table += fmt::format(
          "plan      32 requests, {} ranks, {}: p50 {:.1f} us  p99 {:.1f} us  (limit 100: {:.2f})\n", n, name,
          p50, p99, p50 / 100);
    }
  }

  // Bytes of one prompt and of one decode step, by rows and pages alone.
  const int64_t row_bytes = layout.page_bytes() / kPageTokens;
  for (const int32_t n : {2, 4, 8}) {
    const Sequences s(n, batch, std::max(prefill, context + 1));
    for (const bool decode : {false, true}) {
      int64_t moved = 0, least = 0, tokens = 0;
      for (int64_t at = decode ? context : 0; at < (decode ? context + 1 : prefill);
           at += decode ? 1 : chunk) {
        const int64_t rows = decode ? 1 : std::min(chunk, prefill - at);
        const ForwardBatch f = s.Batch(decode ? batch : 1, at, rows, decode, vocab);
        RankSplit split;
        RETURN_IF_ERROR(split.Plan(f, n, s.pages_per_lane()));
        moved += BytesBetweenRanks(f, split, n, layout);
        least += LeastBytes(f, split, n, row_bytes);
        tokens += f.rows();
      }
      const double each = double(moved) / double(tokens), best = double(least) / double(tokens);
      doc["rows"].push_back(Json{{"phase", decode ? "decode bytes" : "prefill bytes"},
                                 {"ranks", n},
                                 {"bytes_per_token", each},
                                 {"least_bytes_per_token", best},
                                 {"ratio", least > 0 ? each / best : 1.0}});
      table += fmt::format(
          "bytes     {}, {} ranks: {:.0f} per token, least {:.0f}, ratio {:.3f}\n",
          decode ? fmt::format("decode {} x {}", batch, context) : fmt::format("prefill {}", prefill), n,
          each, best, least > 0 ? each / best : 1.0);
    }
  }

  if (!line.Has("--plan-only")) {
    const int64_t max_tokens = std::max(prefill, context + 1);
    const int64_t max_rows = std::max({std::min(chunk, prefill), batch, std::min<int64_t>(chunk, context)});
    const ModelLimits limits{max_rows, batch, batch, max_tokens};
    RETURN_IF_ERROR(loaded->backend->Plan(OpLimits(loaded->config, limits)));
    const int each = std::max(1, loaded->threads / ranks);
    ASSIGN_OR_RETURN(const auto one,
                     Side::Make(*loaded, layout, server, 1, loaded->threads, batch, max_tokens, max_rows));
    ASSIGN_OR_RETURN(const auto many,
                     Side::Make(*loaded, layout, server, ranks, each, batch, max_tokens, max_rows));
    for (const bool decode : {false, true}) {
      std::vector<double> alone, shared, ratio;
      if (decode)
        for (Side* side : {one.get(), many.get()}) RETURN_IF_ERROR(side->Fill(batch, context, chunk));
      const int steps = decode ? 40 : 1;
      const auto timed = [&](Side* side) -> StatusOr<double> {
        const auto from = SteadyTime::now();
        for (int i = 0; i < steps; ++i)
          RETURN_IF_ERROR(decode ? side->Step(batch, context, 1, true) : side->Prefill(prefill, chunk));
        return SecondsSince(from) / steps;
      };
      int64_t moved = 0;
      for (int64_t round = 0; round <= rounds; ++round) {  // round 0 warms up
        ASSIGN_OR_RETURN(const double a, timed(one.get()));
        const int64_t before = many->group().bytes_moved();
        ASSIGN_OR_RETURN(const double b, timed(many.get()));
        moved = (many->group().bytes_moved() - before) / steps;
        if (round == 0) continue;
        alone.push_back(a), shared.push_back(b), ratio.push_back(a / b);
      }
      const double tokens = decode ? double(batch) : double(prefill);
      doc["rows"].push_back(Json{{"phase", decode ? "decode" : "prefill"},
                                 {"ranks", ranks},
                                 {"threads_per_rank", each},
                                 {"one_rank_threads", loaded->threads},
                                 {"tokens_per_s", tokens / Median(shared)},
                                 {"one_rank_tokens_per_s", tokens / Median(alone)},
                                 {"ratio", Median(ratio)},
                                 {"kv_exchange", server.cp_kv_exchange},
                                 {"bytes_moved_per_token", double(moved) / tokens}});
      table += fmt::format(
          "{:<9} {}: {} ranks x {} threads {:.0f} tokens/s, 1 rank x {} threads {:.0f} tokens/s, ratio "
          "{:.3f} "
          "({:.3f}..{:.3f}); {}: {:.0f} bytes moved per token\n",
          decode ? "decode" : "prefill",
          decode ? fmt::format("batch {} at {}", batch, context) : fmt::format("{} tokens", prefill), ranks,
          each, tokens / Median(shared), loaded->threads, tokens / Median(alone), Median(ratio),
          *std::min_element(ratio.begin(), ratio.end()), *std::max_element(ratio.begin(), ratio.end()),
          server.cp_kv_exchange, double(moved) / tokens);
    }
  }
  const std::string path = line.Text("--json");
  if (path != "-") std::cout << table;
  if (path == "-") {
    std::cout << doc.dump(2) << "\n";
  } else if (!path.empty()) {
    std::ofstream out(path);
    if (!(out << doc.dump(2) << "\n")) return Unavailable("--json {}: cannot be written", path);
  }
  return int(kExitOk);
}

}  // namespace

int RunBenchRanks(const std::vector<std::string>& args) {
  StatusOr<CommandLine> line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("bench ranks", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  SayNotices("bench ranks", line->server);
  const StatusOr<int> code = Run(*line);
  return code.ok() ? *code : FailWith("bench ranks", code.status());
}

}  // namespace sluice
