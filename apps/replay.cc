#include "replay.h"

#include <time.h>

#include <algorithm>
#include <deque>
#include <istream>
#include <memory>
#include <ostream>

#include "absl/container/flat_hash_set.h"
#include "base/clock.h"
#include "base/random.h"
#include "engine/step_loop.h"
#include "exec/executor.h"
#include "fmt/format.h"
#include "kv/host_pool.h"
#include "replay_storage.h"
#include "simdjson.h"

namespace sluice {
namespace {

constexpr int32_t kVocab = 150000;

int64_t CpuNanos() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Every step is done after its cost in virtual time; samples are a function of slot and position.
class CostExecutor final : public Executor {
 public:
  CostExecutor(const ReplayOptions& options, const Clock* clock) : options_(options), clock_(clock) {}

  void Submit(StepBuffers* step) override {
    const Nanos began = SteadyClock().Now();
    const ForwardBatch& b = step->batch;
    double us = options_.step_ms * 1000;
    for (const BatchSeq& s : b.seqs) {
      us += options_.token_us * s.num_rows;
      if (s.decode) us += options_.context_token_us * s.start;
    }
    free_at_ = std::max(free_at_, clock_->Now()) + Nanos(us * 1000);
    StepResult& r = step->result;
    r.step = b.step;
    for (const SampleRow& row : b.samples) {
      SampledToken& t = r.samples.emplace_back();
      t.slot = row.slot;
      t.token = int32_t((uint64_t(row.position) * 2654435761u + row.seed) % kVocab);
    }
    for (const CopyPlan& p : b.loads) r.copies_done.push_back(p.id);
    for (const CopyPlan& p : b.backups) r.copies_done.push_back(p.id);
    queue_.emplace_back(step, free_at_);
    own_nanos += SteadyClock().Now() - began;
  }
  StepBuffers* Poll() override {
    if (queue_.empty() || queue_.front().second > clock_->Now()) return nullptr;
    StepBuffers* step = queue_.front().first;
    queue_.pop_front();
    return step;
  }
  Nanos NextDone() const { return queue_.empty() ? INT64_MAX : queue_.front().second; }

  Nanos own_nanos = 0;  // spent in here: no part of the control plane

 private:
  const ReplayOptions& options_;
  const Clock* clock_;
  Nanos free_at_ = 0;
  std::deque<std::pair<StepBuffers*, Nanos>> queue_;
};

struct Tally {
  int64_t finished = 0, output_tokens = 0, l1 = 0, l2 = 0, l3 = 0;
  std::vector<std::string> violations;
  void Report(std::string s) {
    if (violations.size() < 20) violations.push_back(std::move(s));
  }
};

// Checks what comes out for one request: its length, its hit, one end.
class CountingChannel final : public OutputChannel {
 public:
  CountingChannel(int64_t index, int64_t prompt, int64_t want, Tally* tally)
      : index_(index), prompt_(prompt), want_(want), tally_(tally) {}
  void Push(OutputEvent event) override {
    got_ += int64_t(event.tokens.size());
    if (event.finish == FinishReason::kNone) return;
    if (ended_) tally_->Report(fmt::format("request {} ends twice", index_));
    ended_ = true;
    ++tally_->finished;
    tally_->output_tokens += got_;
    tally_->l1 += event.cached.device;
    tally_->l2 += event.cached.host;
    tally_->l3 += event.cached.storage;
    if (event.finish != FinishReason::kLength || got_ != want_) {
      tally_->Report(fmt::format("request {} ends with {} of {} tokens, reason {}", index_, got_, want_,
                                 int(event.finish)));
    }
    if (event.cached.total() >= prompt_ || event.cached.total() % kPageTokens != 0) {
      tally_->Report(
          fmt::format("request {} of {} tokens reports {} cached", index_, prompt_, event.cached.total()));
    }
  }

 private:
  const int64_t index_, prompt_, want_;
  Tally* const tally_;
  int64_t got_ = 0;
  bool ended_ = false;
};

// A value of a trace line for a complaint: as it stands there, cut when it is long.
std::string Shown(const simdjson::dom::element& element) {
  std::string text = simdjson::minify(element);
  if (text.size() > 40) text = text.substr(0, 37) + "...";
  return text;
}
std::string Field(const simdjson::dom::element& line, const char* name) {
  simdjson::dom::element element;
  return line[name].get(element) == simdjson::SUCCESS ? Shown(element) : "missing";
}

double Percentile(std::vector<float>& v, double p) {
  if (v.empty()) return 0;
  const auto at = size_t(p * double(v.size() - 1));
  std::nth_element(v.begin(), v.begin() + int64_t(at), v.end());
  return double(v[at]);
}

}  // namespace

KvLayout ReplayLayout() {
  ModelConfig m;
  m.num_layers = 78;
  m.kv_lora_rank = 512;
  m.qk_rope = 64;
  m.index.num_heads = 32;
  m.index.head_dim = 128;
  m.index.topk = 2048;
  for (int64_t i = 0; i < m.num_layers; ++i) m.index.computes.push_back(std::max<int64_t>(i - 2, 0) % 4 == 0);
  KvLayoutOptions o;
  o.latent_dtype = o.index_dtype = DType::kF8E4M3;
  o.numerics_class = "replay";
  return KvLayout::Make(m, o).value();
}

StatusOr<std::vector<TraceRequest>> ParseTrace(std::istream& in) {
  std::vector<TraceRequest> trace;
  simdjson::dom::parser parser;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    simdjson::dom::element doc;
    if (parser.parse(line).get(doc) != simdjson::SUCCESS)
      return Invalid("trace line {}: not a JSON object", number);
    TraceRequest r;
    double timestamp = 0;
    simdjson::dom::array ids;
    if (doc["timestamp"].get(timestamp) != simdjson::SUCCESS || !(timestamp >= 0) ||
        timestamp > double(kTraceMillisMax)) {
      return Invalid("trace line {}: timestamp is {}; it must be a number of milliseconds from 0 to {}",
                     number, Field(doc, "timestamp"), kTraceMillisMax);
    }
    r.timestamp_ms = int64_t(timestamp);
    for (const auto& [field, target] :
         {std::pair{"input_length", &r.input_length}, std::pair{"output_length", &r.output_length}}) {
      if (doc[field].get(*target) != simdjson::SUCCESS || *target < 1 || *target > kTraceTokensMax) {
        return Invalid("trace line {}: {} is {}; it must be a whole number of tokens from 1 to {}", number,
                       field, Field(doc, field), kTraceTokensMax);
      }
    }
    if (doc["hash_ids"].get(ids) != simdjson::SUCCESS) {
      return Invalid("trace line {}: hash_ids is {}; it must be a list of whole numbers", number,
                     Field(doc, "hash_ids"));
    }
    for (const simdjson::dom::element id : ids) {
      int64_t value = 0;
      if (id.get(value) != simdjson::SUCCESS)
        return Invalid("trace line {}: hash_ids holds {}; each must be a whole number of 64 bits", number,
                       Shown(id));
      r.hash_ids.push_back(value);
    }
    if (int64_t(r.hash_ids.size()) != CeilDiv(r.input_length, kTraceBlockTokens)) {
      return Invalid("trace line {}: {} hash_ids for {} tokens; one for each block of {} tokens is right",
                     number, r.hash_ids.size(), r.input_length, kTraceBlockTokens);
    }
    trace.push_back(std::move(r));
  }
  std::stable_sort(trace.begin(), trace.end(),
                   [](const auto& a, const auto& b) { return a.timestamp_ms < b.timestamp_ms; });
  return trace;
}

std::vector<TraceRequest> GenerateTrace(int64_t requests, uint64_t seed) {
  SeededStream random(seed);
  struct Conversation {
    std::vector<int64_t> ids;
    int64_t tokens = 0;
  };
  std::vector<Conversation> open;
  std::vector<TraceRequest> trace;
  int64_t next_id = 1000, now = 0;
  for (int64_t i = 0; i < requests; ++i) {
    now += int64_t(random.Below(400));
    if (open.size() < 8 || random.Chance(0.25)) {
      Conversation c;
      const int64_t system = int64_t(random.Below(3));  // three system prompts of 1, 2 and 3 blocks
      for (int64_t b = 0; b <= system; ++b) c.ids.push_back(system * 10 + b);
      c.tokens = int64_t(c.ids.size()) * kTraceBlockTokens;
      open.push_back(std::move(c));
    }
    Conversation& c = open[random.Below(open.size())];
    // The answer before and the new question; what does not fill a block is written anew, as in the published
    // traces.
    c.tokens += 50 + int64_t(random.Below(1500));
    c.ids.resize(size_t(std::min<int64_t>(int64_t(c.ids.size()), c.tokens / kTraceBlockTokens)));
    while (int64_t(c.ids.size()) < CeilDiv(c.tokens, kTraceBlockTokens)) c.ids.push_back(next_id++);
    trace.push_back({now, c.tokens, 1 + int64_t(random.Below(300)), c.ids});
    if (c.tokens % kTraceBlockTokens != 0) c.ids.pop_back();
    c.tokens += trace.back().output_length;
    if (c.tokens > 30000) {
      std::swap(c, open.back());
      open.pop_back();
    }
  }
  return trace;
}

void WriteTrace(const std::vector<TraceRequest>& trace, std::ostream& out) {
  for (const TraceRequest& r : trace) {
    out << fmt::format(
        "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [{}]}}\n",
        r.timestamp_ms, r.input_length, r.output_length, fmt::join(r.hash_ids, ", "));
  }
}

std::vector<int32_t> ExpandPrompt(const TraceRequest& r) {
  std::vector<int32_t> tokens(static_cast<size_t>(r.input_length));
  for (size_t b = 0; b < r.hash_ids.size(); ++b) {
    uint64_t x = (uint64_t(r.hash_ids[b]) + 1) * 0x9E3779B97F4A7C15ull;
    const size_t end = std::min(tokens.size(), (b + 1) * size_t(kTraceBlockTokens));
    for (size_t i = b * size_t(kTraceBlockTokens); i < end; ++i) {
      x = x * 6364136223846793005ull + 1442695040888963407ull;
      tokens[i] = int32_t((x >> 33) % kVocab);
    }
  }
  return tokens;
}

ReplayReport Replay(const std::vector<TraceRequest>& trace, const ReplayOptions& o,
                    const std::function<void(int64_t)>& progress) {
  ReplayReport report;
  Tally tally;
  VirtualClock clock;
  CostExecutor executor(o, &clock);
  CacheOptions cache;
  cache.lanes = o.lanes;
  absl::flat_hash_set<int64_t> blocks;
  for (const TraceRequest& r : trace) blocks.insert(r.hash_ids.begin(), r.hash_ids.end());
  report.working_set_tokens = int64_t(blocks.size()) * kTraceBlockTokens;
  const int64_t device_tokens = o.working_set_share > 0
                                    ? int64_t(double(report.working_set_tokens) * o.working_set_share)
                                    : o.device_tokens;
  cache.pages_per_lane = std::max<int64_t>(1, device_tokens / kPageTokens / o.lanes);
  cache.host_pages_per_lane = o.host_tokens / kPageTokens / o.lanes;
  cache.eviction = o.eviction;
  cache.write_policy = o.write_policy;
  StepLoopOptions loop_options;
  loop_options.depth = o.depth;
  loop_options.scheduler.max_running = o.max_running;
  loop_options.scheduler.chunk_tokens = o.chunk_tokens;
  loop_options.scheduler.max_prefill_tokens = std::max<int64_t>(o.chunk_tokens, 16384);
  loop_options.scheduler.context_length = cache.pages_per_lane * o.lanes * kPageTokens;
  loop_options.scheduler.policy = o.policy;
  report.device_tokens = cache.pages_per_lane * o.lanes * kPageTokens;
  report.host_tokens = cache.host_pages_per_lane * o.lanes * kPageTokens;
  const KvLayout layout = ReplayLayout();
  std::unique_ptr<HostPool> host;
  std::unique_ptr<TraceStorage> storage;
  if (o.storage_tokens > 0 && cache.host_pages_per_lane > 0) {
    // Addresses only: nothing ever touches the memory.
    auto made = HostPool::Make(layout, HostLayout::kPageFirstDirect, o.lanes, cache.host_pages_per_lane);
    if (!made.ok()) {
      report.violations.push_back(std::string(made.status().message()));
      return report;
    }
    host = *std::move(made);
    storage = std::make_unique<TraceStorage>(layout, o, &clock);
    cache.prefetch = o.prefetch;
  }
  StepLoop loop(loop_options, MakeKvCache(cache, layout, host.get(), storage.get()), &executor, &clock);

  const SteadyClock steady;
  const Nanos wall_from = steady.Now();
  std::vector<float> steps, full_steps, cpu_steps, full_cpu_steps;
  Nanos cpu = 0;
  size_t next = 0;
  int64_t audited = 0;
  const Nanos origin = trace.empty() ? 0 : trace.front().timestamp_ms;
  auto arrival = [&](size_t i) { return Nanos(double(trace[i].timestamp_ms - origin) * 1e6 / o.time_scale); };
  for (;;) {
    while (next < trace.size() && arrival(next) <= clock.Now()) {
      const TraceRequest& r = trace[next];
      Request request;
      request.id = NextRequestId();
      request.rid = std::to_string(next);
      request.prompt = ExpandPrompt(r);
      request.sampling.max_tokens = int32_t(r.output_length);
      request.sampling.ignore_eos = true;
      request.sampling.temperature = 0;
      request.sampling.seed = uint64_t(next) * 1000003;
      request.output =
          std::make_shared<CountingChannel>(int64_t(next), r.input_length, r.output_length, &tally);
      ++next;
      const Nanos from = CpuNanos();
      // What does not fit with its whole output would end early, which no trace asks for.
      if (r.input_length + r.output_length <= report.device_tokens && loop.Check(request).ok()) {
        report.prompt_tokens += r.input_length;
        ++report.requests;
        loop.Enqueue(std::move(request));
      } else {
        ++report.rejected;
      }
      cpu += CpuNanos() - from;
    }
    const bool full = loop.scheduler().running() >= o.max_running;
    const int64_t steps_before = loop.scheduler().counters().steps;
    executor.own_nanos = 0;
    const Nanos cpu_from = CpuNanos(), from = steady.Now();
    const StepLoop::Progress moved = loop.StepOnce();
    const Nanos spent = steady.Now() - from - executor.own_nanos;
    const Nanos spent_cpu = std::max<Nanos>(0, CpuNanos() - cpu_from - executor.own_nanos);
    cpu += spent_cpu;
    const int64_t planned = loop.scheduler().counters().steps - steps_before;
    if (planned > 0) {
      const float us = float(spent) / 1000 / float(planned);
      const float cpu_us = float(spent_cpu) / 1000 / float(planned);
      steps.push_back(us);
      cpu_steps.push_back(cpu_us);
      if (full) {
        full_steps.push_back(us);
        full_cpu_steps.push_back(cpu_us);
      }
    }
    report.peak_running = std::max(report.peak_running, loop.scheduler().running());
    if (o.audit_every > 0 && report.steps / o.audit_every != audited) {
      audited = report.steps / o.audit_every;
      for (std::string& v : loop.Audit()) tally.Report(std::move(v));
    }
    report.steps += planned;
    if (progress && planned > 0 && report.steps % 1024 == 0) progress(tally.finished);
    if (moved == StepLoop::Progress::kMoved) continue;
    const Nanos done = executor.NextDone(), arrives = next < trace.size() ? arrival(next) : INT64_MAX;
    const Nanos stored = storage != nullptr ? storage->NextDue() : INT64_MAX;
    const Nanos wake = std::min({done, arrives, stored});
    if (wake == INT64_MAX) {
      if (moved == StepLoop::Progress::kIdle) break;
      tally.Report("sequences wait and nothing is on its way");
      break;
    }
    clock.Set(std::max(clock.Now(), wake));
  }
  for (std::string& v : loop.Audit()) tally.Report(std::move(v));
  if (tally.finished != report.requests)
    tally.Report(fmt::format("{} of {} requests ended", tally.finished, report.requests));
  report.retractions = loop.scheduler().counters().retractions;
  report.output_tokens = tally.output_tokens;
  report.hit_l1 = tally.l1, report.hit_l2 = tally.l2, report.hit_l3 = tally.l3;
  report.cpu_seconds = double(cpu) / 1e9;
  report.wall_seconds = double(steady.Now() - wall_from) / 1e9;
  report.virtual_seconds = double(clock.Now()) / 1e9;
  report.prompt_tokens_per_s = report.cpu_seconds > 0 ? double(report.prompt_tokens) / report.cpu_seconds : 0;
  report.step_us_p50 = Percentile(steps, 0.5), report.step_us_p99 = Percentile(steps, 0.99);
  report.step_us_max = Percentile(steps, 1.0);
  report.full_step_us_p50 = Percentile(full_steps, 0.5),
  report.full_step_us_p99 = Percentile(full_steps, 0.99);
  report.full_steps = int64_t(full_steps.size());
  report.step_cpu_us_p50 = Percentile(cpu_steps, 0.5), report.step_cpu_us_p99 = Percentile(cpu_steps, 0.99);
  report.full_step_cpu_us_p99 = Percentile(full_cpu_steps, 0.99);
  report.cache = loop.cache().Stats();
  const CacheStats& c = report.cache;
  if (const int64_t moved = c.evicted_pages_device + c.evicted_pages_host + c.load_pages;
      c.planning_page_visits > moved)
    tally.Report(fmt::format(
        "planning looked at {} page entries for {} pages evicted and loaded: owners were recounted",
        c.planning_page_visits, moved));
  report.violations = std::move(tally.violations);
  return report;
}

}  // namespace sluice
