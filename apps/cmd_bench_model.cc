// sluice bench model MODEL: prefill and decode speed of the model alone (no scheduler, no HTTP) by length and
// batch, as shares of what the machine can do: oneDNN's large-GEMM rate for prefill, the memory read rate for
// decode. Reference and measurement alternate within one run, and the median of the rounds' ratios is
// reported.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <thread>
#include <utility>

#include "base/random.h"
#include "bench_engine.h"
#include "bench_ttft.h"
#include "commands.h"
#include "config/flags.h"
#include "engine_setup.h"
#include "machine_rates.h"
#include "model/model_cost.h"
#include "model/sequence_runner.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

const CommandSyntax kSyntax = {
    .usage = "sluice bench model [MODEL] [--load-format dummy] [options]",
    .summary = "Prefill and decode tokens/s of the model alone, beside what the machine can do.",
    .options =
        {{"--prefill", "LENGTHS", "prompt lengths, comma separated (512,2048)"},
         {"--decode-batch", "SIZES", "decode batch sizes, comma separated (1,8,32)"},
         {"--decode-context", "LENGTHS", "tokens before the decoded one, comma separated (512)"},
         {"--cached", "LENGTHS",
          "cached tokens before --extend new ones, comma separated; each row with selected and with full "
          "dequantisation (none)"},
         {"--extend", "N", "new tokens after --cached ones (512)"},
         {"--ttft", "LENGTHS",
          "only the time to the first token, cold and cached, of prompts of these lengths"},
         {"--engine-batch", "SIZES",
          "only decode through a whole engine: that many requests at once, comma separated, behind "
          "--decode-context tokens"},
         {"--rounds", "N", "rounds of each row (5)"},
         {"--json", "FILE", "write one JSON document; - is stdout"}},
    .engine_flags = true,
    .max_positional = 1,
};

StatusOr<std::vector<int64_t>> IntList(const CommandLine& line, std::string_view option,
                                       std::string_view fallback) {
  std::vector<int64_t> list;
  std::string text = line.Text(option, fallback);
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const auto n = ParseInt(std::string_view(text).substr(0, comma));
    if (!n.ok() || *n < 1)
      return Invalid("{} {}: give whole numbers >= 1, comma separated", option, line.Text(option, fallback));
    list.push_back(*n);
    text = comma == std::string::npos ? "" : text.substr(comma + 1);
  }
  return list;
}

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

// Which fp8 rows become bf16: those that attention selects, all of the context, or what the backend finds
// faster.
enum class Dequant { kSelected, kAll, kFaster };

struct Row {
  std::string phase;
  int64_t batch = 1, context = 0;
  std::vector<double> seconds, ratio, minimal_ratio, reference;
  int64_t new_rows = 0;  // of each sequence, in a decode or extend row
  Dequant dequant = Dequant::kFaster;
  double work = 0;  // FLOP of a prefill, bytes of a decode step
  std::vector<double>
      device_share;  // of a step's time that the device was at work; empty where it is the processor
  StepTimer timer;
};

constexpr int64_t kScoreBytes = int64_t(1) << 28;  // room for index scores

// Sequences of equal length in one pool. All hold copies of the same real rows.
class BatchBench {
 public:
  static StatusOr<std::unique_ptr<BatchBench>> Make(const LoadedModel& loaded, const KvLayoutOptions& kv,
                                                    int64_t max_rows, int64_t max_batch,
                                                    int64_t max_context) {
    std::unique_ptr<BatchBench> b(new BatchBench(loaded, max_rows, max_batch));
    b->pages_per_seq_ = CeilDiv(max_context + 1, kPageTokens);
    ASSIGN_OR_RETURN(const KvLayout layout, KvLayout::Make(loaded.config, kv));
    ASSIGN_OR_RETURN(
        b->pool_, DevicePool::Make(layout, 1, max_batch * b->pages_per_seq_ + 1, loaded.backend->memory()));
    const ModelLimits limits{max_rows, max_batch, max_batch, max_context + 1};
    ops::Limits op_limits = OpLimits(loaded.config, limits);
    op_limits.score_bytes = std::min<int64_t>(max_rows * op_limits.ScoreRowBytes(), kScoreBytes);
    RETURN_IF_ERROR(loaded.backend->Plan(op_limits));
    ASSIGN_OR_RETURN(b->buffers_, ModelBuffers::Make(loaded.config, *loaded.backend, limits));
    b->queue_ = loaded.backend->MakeQueue(loaded.threads, -1);
    return b;
  }

  // Sequences [0, batch) each compute `rows` tokens from position `start`; logits of each last row.
  Status Step(int64_t batch, int64_t start, int64_t rows, StepTimer* timer,
              Dequant dequant = Dequant::kFaster) {
    if (timer != nullptr && buffers_->on_device() && !timer->settle)
      timer->settle = [this] { queue_->Synchronize(); };
    ForwardBatch& f = batch_;
    f.Clear();
    std::vector<int32_t>& wanted = wanted_;
    wanted.clear();
    for (int64_t s = 0; s < batch; ++s) {
      BatchSeq q;
      q.slot = SlotId(int32_t(s));
      q.row_begin = int32_t(f.tokens.size());
      q.num_rows = int32_t(rows);
      q.start = int32_t(start);
      q.page_begin = int32_t(f.pages.size());
      q.num_pages = int32_t(CeilDiv(start + rows, kPageTokens));
      f.pages.resize(f.pages.size() + size_t(q.num_pages));
      for (int32_t p = 0; p < q.num_pages; ++p) f.pages[size_t(q.page_begin + p)] = Page(s, p);
      for (int64_t i = 0; i < rows; ++i) {
        f.tokens.push_back(int32_t(random_.Below(uint64_t(loaded_.config.vocab_size))));
      }
      wanted.push_back(int32_t(f.tokens.size() - 1));
      f.seqs.push_back(q);
    }
    ASSIGN_OR_RETURN(const ModelBatch m, tables_.Build(f, f.tokens, loaded_.config.vocab_size));
    ForwardOptions options;
    options.timer = timer;
    options.dequant_only_topk = dequant != Dequant::kAll;
    options.dequant_freely = dequant == Dequant::kFaster;
    const bool checked = timer == nullptr;  // a timer waits at each border
    if (checked) queue_->BeginStep();
    queue_->Mark(false);
    const Status forward = loaded_.model->Forward(*queue_, m, *pool_, *buffers_, options);
    if (forward.ok()) Head(wanted, timer);
    queue_->Mark(true);
    queue_->Synchronize();
    const Status step = checked ? queue_->EndStep(1) : OkStatus();
    device_seconds_ += queue_->MarkedSeconds();
    RETURN_IF_ERROR(forward);
    RETURN_IF_ERROR(queue_->status());
    return step;
  }
  // With --debug-device: steps from here on are checked.
  void WarmedUp() { queue_->WarmedUp(); }

  // Greedy tokens of these rows, as far as the device takes them.
  void Head(std::span<const int32_t> rows, StepTimer* timer) {
    if (!buffers_->on_device()) {
      loaded_.model->Logits(*queue_, rows, *buffers_, timer);
      return;
    }
    for (size_t i = 0; i < rows.size(); ++i) buffers_->requests[i] = RowRequest{.place = int32_t(i)};
    loaded_.model->Reduce(*queue_, Model::LogitsKind::kTarget, rows, int64_t(rows.size()), {}, *buffers_,
                          timer);
  }

  bool on_device() const { return buffers_->on_device(); }
  // Seconds between the first and the last work of the steps since the last call; 0 on the processor.
  double TakeDeviceSeconds() { return std::exchange(device_seconds_, 0.0); }

  // What a device with memory of its own does in the same process: bytes read and written a second of a copy
  // inside it, and FLOP/s of this backend's own product of 8192 x 8192 x 8192 (e4m3 where it has one).
  StatusOr<double> DeviceCopyRate() {
    constexpr int64_t kBytes = int64_t(1) << 30;
    DeviceMemory& memory = *loaded_.backend->memory();
    ASSIGN_OR_RETURN(const auto from, memory.Allocate(kBytes, "copy rate"));
    ASSIGN_OR_RETURN(const auto to, memory.Allocate(kBytes, "copy rate"));
    memory.Fill(from.get(), 3, kBytes);
    memory.Copy(to.get(), from.get(), kBytes);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 8; ++i) memory.Copy(to.get(), from.get(), kBytes);
    return 16.0 * double(kBytes) /
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  StatusOr<double> DeviceGemmRate() {
    constexpr int64_t kN = 8192;
    DeviceMemory& memory = *loaded_.backend->memory();
    std::vector<uint8_t> w(size_t(kN * kN));
    for (uint8_t& b : w) b = uint8_t(random_.Below(256)) & 0xbf;  // no NaN, no large values
    std::vector<float> scale(size_t(kN / 128 * (kN / 128)), 0.01f);
    const ops::WeightView view{DType::kF8E4M3, kN, kN, w.data(), scale.data(), 128, 128};
    ASSIGN_OR_RETURN(const auto packed, loaded_.backend->Pack({&view, 1}));
    ASSIGN_OR_RETURN(const auto x, memory.Allocate(kN * kN * 4, "product rate"));
    ASSIGN_OR_RETURN(const auto y, memory.Allocate(kN * kN * 4, "product rate"));
    std::vector<uint16_t> values(size_t(kN * kN));
    for (uint16_t& v : values) v = F32ToBF16(float(random_.Below(2001)) * 1e-3f - 1.0f);
    memory.Copy(x.get(), values.data(), kN * kN * 2);
    ops::LinearArgs a;
    a.weight = packed.get();
    a.rows = kN;
    a.x = x.get();
    a.y = y.get();
    a.mode = ops::OutMode::kAct;
    std::vector<double> seconds;
    for (int i = 0; i < 8; ++i) {
      queue_->Mark(false);
      loaded_.backend->Apply(*queue_, a);
      queue_->Mark(true);
      queue_->Synchronize();
      seconds.push_back(queue_->MarkedSeconds());
    }
    std::sort(seconds.begin(), seconds.end());
    RETURN_IF_ERROR(queue_->status());
    return 2.0 * double(kN) * double(kN) * double(kN) / seconds[4];
  }

  // Gives every sequence `length` real rows: one is computed, the others get copies.
  Status Fill(int64_t batch, int64_t length, int64_t chunk) {
    for (int64_t at = 0; at < length; at += chunk)
      RETURN_IF_ERROR(Step(1, at, std::min(chunk, length - at), nullptr));
    for (int64_t s = 1; s < batch; ++s) {
      for (int32_t p = 0; p < CeilDiv(length, kPageTokens); ++p) {
        pool_->CopyPage(Page(0, p), Page(s, p));
      }
    }
    return OkStatus();
  }

 private:
  BatchBench(const LoadedModel& loaded, int64_t max_rows, int64_t max_batch)
      : loaded_(loaded), tables_(max_rows, max_batch) {}
  PageId Page(int64_t seq, int64_t page) const { return PageId(int32_t(1 + seq * pages_per_seq_ + page)); }

  const LoadedModel& loaded_;
  BatchTables tables_;
  ForwardBatch batch_;
  std::vector<int32_t> wanted_;  // rows of it whose logits are
  SeededStream random_{1};
  double device_seconds_ = 0;
  int64_t pages_per_seq_ = 0;
  std::unique_ptr<DevicePool> pool_;
  std::unique_ptr<ModelBuffers> buffers_;
  std::unique_ptr<ops::Queue> queue_;
};

// One timed sample of a row: the median of steps that together take at least 0.2 s.
template <typename Fn>
StatusOr<double> Sample(Fn step) {
  using SteadyTime = std::chrono::steady_clock;
  std::vector<double> times;
  double total = 0;
  while (total < 0.2 || times.size() < 3) {
    const auto start = SteadyTime::now();
    RETURN_IF_ERROR(step());
    times.push_back(std::chrono::duration<double>(SteadyTime::now() - start).count());
    total += times.back();
    if (total > 3.0) break;
  }
  return Median(times);
}

Status WriteJson(const std::string& path, const Json& doc) {
  std::ofstream out(path);
  return out << doc.dump(2) << "\n" ? OkStatus() : Unavailable("--json {}: cannot be written", path);
}

StatusOr<int> RunTtft(CommandLine& line, const std::shared_ptr<LoadedModel>& loaded, int64_t rounds) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> lengths, IntList(line, "--ttft", "4096"));
  Json doc = {{"model", loaded->name}, {"threads", loaded->threads}, {"rows", Json::array()}};
  std::string table = fmt::format("{:<16} {:>8} {:>8} {:>10} {:>8} {:>10}\n", "first token", "prompt",
                                  "cached", "ms", "ratio", "evictions");
  for (const int64_t n : lengths) {
    ASSIGN_OR_RETURN(const std::vector<TtftRow> rows, MeasureTtft(line.server, loaded, n, rounds));
    for (const TtftRow& r : rows) {
      doc["rows"].push_back({{"phase", "ttft " + r.from},
                             {"batch", 1},
                             {"context", r.prompt_tokens},
                             {"cached_tokens", r.cached_tokens},
                             {"ms", r.ms},
                             {"ratio_to_cold", r.ratio},
                             {"deficit_evictions", r.deficit_evictions}});
      table += fmt::format("{:<16} {:>8} {:>8} {:>10.2f} {:>8.3f} {:>10}\n", r.from, r.prompt_tokens,
                           r.cached_tokens, r.ms, r.ratio, r.deficit_evictions);
    }
  }
  const std::string path = line.Text("--json");
  if (path != "-") std::cout << table;
  if (path == "-") std::cout << doc.dump(2) << "\n";
  if (!path.empty() && path != "-") RETURN_IF_ERROR(WriteJson(path, doc));
  return int(kExitOk);
}

StatusOr<int> RunEngine(CommandLine& line, const std::shared_ptr<LoadedModel>& loaded,
                        const std::vector<int64_t>& contexts) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> batches, IntList(line, "--engine-batch", "1,8,32"));
  Json doc = {{"model", loaded->name}, {"threads", loaded->threads}, {"rows", Json::array()}};
  std::string table = fmt::format("{:<28} {:>6} {:>8} {:>11} {:>9} {:>6} {:>9}\n", "engine", "batch",
                                  "context", "tokens/s", "ms", "steps", "host gap");
  for (const int64_t context : contexts) {
    ASSIGN_OR_RETURN(const std::vector<EngineDecodeRow> rows,
                     MeasureEngineDecode(line.server, loaded, batches, context));
    for (const EngineDecodeRow& r : rows) {
      Json row = {{"phase", "engine decode"}, {"step_depth", r.step_depth},     {"batch", r.batch},
                  {"context", r.context},     {"tokens_per_s", r.tokens_per_s}, {"ms", r.step_ms},
                  {"steps", r.steps}};
      if (r.host_gap >= 0) row["host_gap"] = r.host_gap;
      doc["rows"].push_back(row);
      table += fmt::format("{:<28} {:>6} {:>8} {:>11.1f} {:>9.3f} {:>6} {:>9}\n",
                           r.step_depth == 0 ? "decode, one step at a time" : "decode, next step planned",
                           r.batch, r.context, r.tokens_per_s, r.step_ms, r.steps,
                           r.host_gap < 0 ? "-" : fmt::format("{:.2f}%", 100 * r.host_gap));
    }
  }
  const std::string path = line.Text("--json");
  if (path != "-") std::cout << table;
  if (path == "-") std::cout << doc.dump(2) << "\n";
  if (!path.empty() && path != "-") RETURN_IF_ERROR(WriteJson(path, doc));
  return int(kExitOk);
}

StatusOr<int> Run(CommandLine& line) {
  ServerConfig& server = line.server;
  if (!line.positional.empty()) server.model_path = line.positional[0];
  if (server.nsa_dequant_verify) {
    return Invalid(
        "--nsa-dequant-verify: computes every attention twice, so nothing can be measured; leave it out");
  }
  ASSIGN_OR_RETURN(const std::vector<int64_t> prefill, IntList(line, "--prefill", "512,2048"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> batches, IntList(line, "--decode-batch", "1,8,32"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> contexts, IntList(line, "--decode-context", "512"));
  std::vector<int64_t> cached;
  if (line.Has("--cached")) {
    ASSIGN_OR_RETURN(cached, IntList(line, "--cached", ""));
  }
  ASSIGN_OR_RETURN(const int64_t extend, line.Int("--extend", 512, 1, 1 << 20));
  ASSIGN_OR_RETURN(const int64_t rounds, line.Int("--rounds", 5, 1, 1000));
  ASSIGN_OR_RETURN(const std::shared_ptr<LoadedModel> loaded, LoadModel(server));
  ASSIGN_OR_RETURN(const KvLayoutOptions kv, KvOptionsFor(server, *loaded));
  if (line.Has("--ttft")) return RunTtft(line, loaded, rounds);
  if (line.Has("--engine-batch")) return RunEngine(line, loaded, contexts);
  const DType act = loaded->backend->info().act;

  const int64_t chunk_limit = server.chunked_prefill_size > 0 ? server.chunked_prefill_size : INT64_MAX;
  int64_t max_batch = 1, max_context = 1, max_rows = 1;
  for (int64_t b : batches) max_batch = std::max(max_batch, b);
  for (int64_t c : contexts) max_context = std::max(max_context, c);
  for (int64_t n : prefill) max_context = std::max(max_context, n);
  for (int64_t n : cached) {
    max_context = std::max(max_context, n + extend);
    max_rows = std::max(max_rows, extend);
  }
  for (int64_t n : prefill) max_rows = std::max(max_rows, std::min(n, chunk_limit));
  max_rows = std::max({max_rows, max_batch, std::min<int64_t>(512, max_context)});
  if (max_context >= loaded->context_length) {
    return Invalid("{} tokens do not fit the model's context of {}", max_context + 1, loaded->context_length);
  }
  ASSIGN_OR_RETURN(const auto bench, BatchBench::Make(*loaded, kv, max_rows, max_batch, max_context));
  const ModelCost cost(loaded->config, *loaded->model, kv);
  double copy_rate = 0, product_rate = 0;
  if (bench->on_device()) {
    ASSIGN_OR_RETURN(copy_rate, bench->DeviceCopyRate());
    ASSIGN_OR_RETURN(product_rate, bench->DeviceGemmRate());
  }

  std::vector<Row> rows;
  for (int64_t n : prefill) {
    Row r;
    r.phase = "prefill";
    r.context = n;
    r.work = cost.PrefillFlops(n);
    rows.push_back(r);
  }
  for (int64_t c : contexts) {
    for (int64_t b : batches) {
      Row r;
      r.phase = "decode";
      r.batch = b;
      r.context = c;
      r.new_rows = 1;
      r.work = cost.DecodeBytes(b, c + 1);
      rows.push_back(r);
    }
  }
  for (int64_t c : cached) {
    for (const Dequant dequant : {Dequant::kSelected, Dequant::kAll}) {
      Row r;
      r.phase = dequant == Dequant::kSelected ? "extend" : "extend, full";
      r.context = c;
      r.new_rows = extend;
      r.dequant = dequant;
      r.work = cost.PrefillFlops(c + extend) - cost.PrefillFlops(c);
      rows.push_back(r);
    }
  }
  for (int64_t round = 0; round <= rounds; ++round) {  // round 0 warms up
    if (round == 1) bench->WarmedUp();
    for (Row& r : rows) {
      // The zones come from the last round: on the processor from its timed steps, on a device from one step
      // more, since there every zone's end is waited for.
      StepTimer* timer = round == rounds && !bench->on_device() ? &r.timer : nullptr;
      const bool decode = r.phase == "decode", is_prefill = r.phase == "prefill";
      const auto rate = [&] {
        if (bench->on_device()) return decode ? copy_rate : product_rate;
        return decode ? MemoryReadRate(loaded->threads) : LargeGemmRate(act, loaded->threads);
      };
      const double before = rate();
      if (!bench->on_device())  // let the other library's threads go to sleep
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const auto step = [&](StepTimer* zones) -> Status {
        if (!is_prefill) return bench->Step(r.batch, r.context, r.new_rows, zones, r.dequant);
        for (int64_t at = 0; at < r.context; at += max_rows)
          RETURN_IF_ERROR(bench->Step(1, at, std::min(max_rows, r.context - at), zones));
        return OkStatus();
      };
      if (!is_prefill && (round == 0 || !bench->on_device()))
        RETURN_IF_ERROR(bench->Fill(r.batch, r.context,
                                    bench->on_device() ? max_rows : std::min<int64_t>(max_rows, 512)));
      RETURN_IF_ERROR(bench->on_device() ? step(nullptr) : OkStatus());
      bench->TakeDeviceSeconds();
      double wall = 0;
      const StatusOr<double> seconds = Sample([&]() -> Status {
        const auto start = std::chrono::steady_clock::now();
        const Status status = step(timer);
        wall += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        return status;
      });
      RETURN_IF_ERROR(seconds.status());
      const double device = bench->TakeDeviceSeconds();
      const double after = rate();
      if (round == 0) continue;
      if (bench->on_device()) {
        r.device_share.push_back(device / wall);
        if (round == rounds) RETURN_IF_ERROR(step(&r.timer));
        bench->TakeDeviceSeconds();
      }
      const double reference = (before + after) / 2;
      r.seconds.push_back(*seconds);
      r.reference.push_back(reference);
      r.ratio.push_back(r.work / *seconds / reference);
      if (is_prefill) r.minimal_ratio.push_back(cost.PrefillFlopsExpanded(r.context) / *seconds / reference);
    }
  }

  Json doc;
  doc["model"] = loaded->name;
  doc["isa"] = loaded->backend->info().isa;
  doc["compute_dtype"] = Name(act);
  doc["kv_cache_dtype"] = Name(kv.latent_dtype);
  doc["threads"] = loaded->threads;
  doc["rows"] = Json::array();
  std::string table =
      fmt::format("{:<12} {:>6} {:>8} {:>11} {:>9} {:>11} {:>16} {:>16} {:>7}\n", "phase", "batch", "context",
                  "tokens/s", "ms", "gemm share", "rate", "machine", "ratio");
  for (const Row& r : rows) {
    const bool is_prefill = r.phase == "prefill", decode = r.phase == "decode";
    const double s = Median(r.seconds),
                 tokens = is_prefill ? double(r.context) : double(r.batch * r.new_rows);
    Json zones = Json::object();
    for (size_t z = 0; z < size_t(Zone::kCount); ++z) {
      zones[std::string(Name(Zone(z)))] =
          double(r.timer.ns(Zone(z))) / double(std::max<int64_t>(r.timer.total_ns(), 1));
    }
    Json row = {{"phase", r.phase},           {"batch", r.batch}, {"context", r.context},
                {"tokens_per_s", tokens / s}, {"ms", s * 1e3},    {"gemm_share", r.timer.compute_share()},
                {"ratio", Median(r.ratio)}};
    if (r.new_rows > 0) row["new_tokens"] = r.batch * r.new_rows;
    if (!r.device_share.empty()) row["host_gap"] = 1 - Median(r.device_share);
    if (!decode) {
      row["gflop_s"] = r.work / s / 1e9;
      row[bench->on_device() ? "own_product_gflop_s" : "onednn_gflop_s"] = Median(r.reference) / 1e9;
      if (is_prefill)
        row["ratio_expanded_attention"] =
            Median(r.minimal_ratio);  // attention counted as if it were not absorbed
    } else {
      row["gb_s"] = r.work / s / 1e9;
      row["read_gb_s"] = Median(r.reference) / 1e9;
    }
    row["zones"] = zones;
    row["zones_ms"] = double(r.timer.total_ns()) / 1e6;
    doc["rows"].push_back(row);
    const std::string unit = decode ? "GB/s" : "GFLOP/s";
    table += fmt::format(
        "{:<12} {:>6} {:>8} {:>11.1f} {:>9.2f} {:>11.3f} {:>8.1f} {:>7} {:>8.1f} {:>7} {:>7.3f}{}\n", r.phase,
        r.batch, r.context, tokens / s, s * 1e3, r.timer.compute_share(), r.work / s / 1e9, unit,
        Median(r.reference) / 1e9, unit, Median(r.ratio),
        r.device_share.empty() ? "" : fmt::format("  host gap {:.2f}%", 100 * (1 - Median(r.device_share))));
  }
  const std::string path = line.Text("--json");
  if (path.empty()) {
    std::cout << table;
  } else if (path == "-") {
    std::cout << doc.dump(2) << "\n";
  } else {
    std::ofstream out(path);
    if (!(out << doc.dump(2) << "\n")) return Unavailable("--json {}: cannot be written", path);
    std::cout << table;
  }
  return int(kExitOk);
}

}  // namespace

int RunBenchModel(const std::vector<std::string>& args) {
  StatusOr<CommandLine> line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("bench model", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  SayNotices("bench model", line->server);
  const StatusOr<int> code = Run(*line);
  return code.ok() ? *code : FailWith("bench model", code.status());
}

}  // namespace sluice
