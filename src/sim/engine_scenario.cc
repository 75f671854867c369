// The whole engine without its thread: scheduler, cache, tiers and storage of the product, driven by StepLoop
// under a virtual clock, with requests that arrive, talk on, are aborted and expire, in pools that are far
// too small.
//
// Beside it an oracle that computes each choice alone. After each event: the audits, the partition,
// exactly-once ends.
#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <optional>

#include "base/check.h"
#include "engine/step_loop.h"
#include "sim/sim_executor.h"
#include "sim/watched_cache.h"
#include "storage/simulated_storage.h"

namespace sluice::sim {
namespace {

constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
constexpr Nanos kTick = 20'000'000;           // how often an engine that waits looks again
constexpr Nanos kPatience = 150'000'000'000;  // longer than the slowest storage holds on

struct Answer {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kLength;
  uint64_t logits_hash = 0;
};

// What the engine must say for one choice, computed from nothing.
Answer Alone(const Request& request, int32_t choice, uint64_t root, int64_t token_limit) {
  const SamplingParams& p = request.sampling;
  Answer answer;
  const int64_t max_new = std::min<int64_t>(p.max_tokens, token_limit - int64_t(request.prompt.size()));
  uint64_t chain = root;
  for (const int32_t t : request.prompt) chain = NextInChain(chain, t);
  Sampler sampler(kVocab, 1);
  SlotInit init;
  init.slot = SlotId(0);
  init.prompt_tokens = request.prompt;
  init.track_tokens = true;
  init.logit_bias = p.logit_bias;
  init.stop_token_ids = p.stop_token_ids;
  if (!p.ignore_eos) init.stop_token_ids.push_back(kEos);
  const std::vector<int32_t> stops = init.stop_token_ids;
  sampler.InitSlot(init);
  std::vector<float> logits;
  while (int64_t(answer.tokens.size()) < max_new) {
    SampleRow row;
    row.slot = SlotId(0);
    row.position = int32_t(request.prompt.size() + answer.tokens.size());
    row.temperature = p.temperature;
    row.top_p = p.top_p;
    row.top_k = p.top_k;
    row.min_p = p.min_p;
    row.presence_penalty = p.presence_penalty;
    row.frequency_penalty = p.frequency_penalty;
    row.repetition_penalty = p.repetition_penalty;
    row.seed = p.seed;
    row.choice = choice;
    row.suppress_stop = int32_t(answer.tokens.size()) < p.min_tokens;
    row.hash_logits = p.hash_logits;
    LogitsOf(chain, &logits);
    SampledToken sampled;
    sampler.Sample(row, logits.data(), &sampled);
    answer.tokens.push_back(sampled.token);
    if (p.hash_logits) answer.logits_hash = JoinLogitsHash(answer.logits_hash, sampled.logits_hash);
    chain = NextInChain(chain, sampled.token);
    if (int32_t(answer.tokens.size()) > p.min_tokens &&
        std::find(stops.begin(), stops.end(), sampled.token) != stops.end()) {
      answer.finish = FinishReason::kStop;
      break;
    }
  }
  return answer;
}

// The client's side of a request: keeps what came, checks that each choice ends once.
class Client final : public OutputChannel {
 public:
  struct Choice {
    std::vector<int32_t> tokens;
    FinishReason finish = FinishReason::kNone;
    uint64_t logits_hash = 0;
  };
  Client(Request request, Journal* journal, uint64_t root, int64_t token_limit)
      : request_(std::move(request)),
        journal_(journal),
        root_(root),
        token_limit_(token_limit),
        choices_(size_t(request_.sampling.n)) {}

  void Push(OutputEvent event) override {
    if (size_t(event.choice) >= choices_.size())
      return journal_->Violation("an event of choice {} of {}", event.choice, choices_.size());
    Choice& c = choices_[size_t(event.choice)];
    if (c.finish != FinishReason::kNone)
      journal_->Violation("request {}: an event after the end of choice {}", request_.rid, event.choice);
    for (const TokenOut& t : event.tokens) c.tokens.push_back(t.token);
    cached_ = event.cached;
    c.logits_hash = event.logits_hash;
    c.finish = event.finish;
    if (event.finish == FinishReason::kNone) return;
    ++ended_;
    CheckChoice(event.choice, c);
  }
  bool done() const { return ended_ == int(choices_.size()); }
  const Request& request() const { return request_; }
  const Choice& choice(size_t i) const { return choices_[i]; }
  bool abort_asked = false;

 private:
  void CheckChoice(int32_t i, const Choice& c) {
    const Answer want = Alone(request_, i, root_, token_limit_);
    if (c.finish == FinishReason::kAbort || c.finish == FinishReason::kError) {
      if (c.tokens.size() > want.tokens.size() ||
          !std::equal(c.tokens.begin(), c.tokens.end(), want.tokens.begin()))
        journal_->Violation("request {}:{}: what came before its end is wrong", request_.rid, i);
      journal_->Cover(c.finish == FinishReason::kAbort ? "choices_aborted" : "choices_failed");
      return;
    }
    if (c.tokens != want.tokens) {
      const auto at = std::mismatch(c.tokens.begin(), c.tokens.end(), want.tokens.begin(), want.tokens.end());
      journal_->Violation(
          "request {}:{}: {} tokens that differ from the {} of the request alone, first at token {}",
          request_.rid, i, c.tokens.size(), want.tokens.size(), at.first - c.tokens.begin());
    }
    if (c.finish != want.finish)
      journal_->Violation("request {}:{}: finish {} instead of {}", request_.rid, i, int(c.finish),
                          int(want.finish));
    if (request_.sampling.hash_logits && c.logits_hash != want.logits_hash)
      journal_->Violation("request {}:{}: the joined logits hash differs", request_.rid, i);
    journal_->Cover("choices_finished");
    journal_->Cover("cached_prompt_tokens", cached_.total());
  }

  const Request request_;
  Journal* const journal_;
  const uint64_t root_;
  const int64_t token_limit_;
  std::vector<Choice> choices_;
  CachedTokens cached_;
  int ended_ = 0;
};

class EngineWorld {
 public:
  // drafts: with speculation. ranks: on several ranks that share each request's pages, with requests that
  // come in groups over one prefix.
  EngineWorld(uint64_t seed, bool trace, bool drafts, bool ranks)
      : ranks_(ranks), journal_(trace), random_(seed), drafts_(drafts) {
    use_storage_ = random_.Chance(0.4);
    use_host_ = use_storage_ || random_.Chance(0.5);
    const auto sometimes = [&](double p) { return random_.Chance(0.3) ? p : 0.0; };
    executor_faults_.slow_step = sometimes(0.02);
    executor_faults_.step_error = sometimes(0.03);
    executor_faults_.bad_row = sometimes(0.02);
    executor_faults_.copy_error = sometimes(0.05);
    executor_faults_.late_ack = random_.Chance(0.6) ? 0.5 : 0;
    storage_faults_.slow = sometimes(0.1);
    storage_faults_.hang = sometimes(0.03);
    storage_faults_.refuse = sometimes(0.1);
    storage_faults_.error = sometimes(0.08);
    storage_faults_.full = sometimes(0.05);
    storage_faults_.lose = sometimes(0.08);
    storage_faults_.flip = sometimes(0.05);
    storage_faults_.truncate = sometimes(0.05);
    storage_faults_.swap = sometimes(0.05);
    storage_faults_.vanish = sometimes(0.05);
    StartProcess();
  }

  SeedReport Run() {
    const int processes = 1 + int(random_.Below(2));
    for (int p = 0; p < processes && !journal_.failed(); ++p) {
      if (p > 0) StartProcess();
      Serve();
      if (!journal_.failed()) WindDown();
      StopProcess();
    }
    return std::move(journal_.report());
  }

 private:
  void StartProcess() {
    const DType latent = random_.Chance(0.5) ? DType::kBF16 : DType::kF8E4M3;
    const DType index = random_.Chance(0.5) ? DType::kBF16 : DType::kF8E4M3;
    const uint64_t identity = random_.Below(2);
    const bool draft_rows = random_.Chance(0.3);
    const KvLayout layout = SimLayout(latent, index, draft_rows || drafts_, identity);
    const uint64_t model =
        Mix(identity + 1, (uint64_t(latent) << 8 | uint64_t(index)) + layout.pieces().size() * 65536);
    constexpr int32_t kRanks[] = {2, 3, 4, 8};
    const int32_t lanes = ranks_ ? kRanks[random_.Below(4)] : 1 + int32_t(random_.Below(3));
    const int64_t per_lane = std::max<int64_t>(1, (random_.Chance(0.5) ? 6 : 14) / lanes) +
                             int64_t(random_.Below(uint64_t(30 / lanes)));
    const int64_t host_per_lane = use_host_ ? 2 + int64_t(random_.Below(uint64_t(60 / lanes))) : 0;
    device_ = DevicePool::Make(layout, lanes, per_lane + 1).value();
    // Rows leave some of their bytes as they are; those are equal everywhere, as they are when pages come
    // back.
    for (int64_t page = 0; page < lanes * (per_lane + 1); ++page) device_->Poison(PageId(int32_t(page)));
    if (use_host_) host_ = HostPool::Make(layout, HostLayout(random_.Below(4)), lanes, host_per_lane).value();
    if (use_storage_) {
      StorageFormat format;
      format.content_fingerprint = layout.content_fingerprint();
      for (const KvPiece& p : layout.pieces()) format.piece_bytes.push_back(uint32_t(p.bytes));
      storage_ =
          std::make_unique<SimulatedStorage>(format, &medium_, &clock_, random_.Next(), storage_faults_);
    }
    CacheOptions cache;
    cache.lanes = lanes;
    cache.pages_per_lane = per_lane;
    cache.host_pages_per_lane = host_per_lane;
    cache.enable_radix = !random_.Chance(0.1);
    cache.eviction = EvictionPolicy(random_.Below(5));
    cache.write_policy = WritePolicy(random_.Below(3));
    cache.prefetch = PrefetchPolicy(random_.Below(3));
    cache.prefetch_min_tokens = 64;
    cache.free_room_pages = random_.Chance(0.5) ? int64_t(random_.Below(3)) : 0;
    cache.poison_on_free = true;
    cache.poison_pool = device_.get();
    if (cache.enable_radix && random_.Chance(0.3)) {
      cache.verify_share = random_.Unit();
      cache.verify_seed = random_.Next();
      cache.verify_pool = device_.get();
      cache.bad_page = [this](const std::string& evidence) { journal_.Violation("{}", evidence); };
    }

    StepLoopOptions o;
    o.verify = cache.verify_share > 0;
    o.depth = int32_t(random_.Below(2));
    o.scheduler.max_running = 1 + int64_t(random_.Below(8));
    const int64_t chunks[] = {-1, 16, 37, 64, 100, 128, 256};
    o.scheduler.chunk_tokens = chunks[random_.Below(7)];
    o.scheduler.max_prefill_tokens = 256;
    o.scheduler.context_length = 256 + int64_t(random_.Below(1024));
    o.scheduler.policy = random_.Chance(0.5) ? SchedulePolicy::kFcfs : SchedulePolicy::kLongestPrefix;
    o.scheduler.use_priority = random_.Chance(0.3);
    o.scheduler.conservativeness = random_.Chance(0.5) ? 1.0 : random_.Unit();
    o.scheduler.eos_token_ids = {kEos};
    if (drafts_) {
      o.scheduler.draft_tokens = 1 + int32_t(random_.Below(5));
      o.scheduler.adaptive_drafts = random_.Chance(0.5);
    }
    if (ranks_) executor_faults_.slow_step = 0.05;  // a stalled rank holds all of them
    executor_ = std::make_unique<SimExecutor>(device_.get(), host_.get(),
                                              int32_t(2 * o.scheduler.max_running), &clock_, &journal_,
                                              random_.Next(), executor_faults_, o.scheduler.draft_tokens);
    if (ranks_) executor_->UseRanks(random_.Next(), random_.Chance(0.3) ? 0.03 : 0.0);
    auto watched = std::make_unique<WatchedCache>(MakeKvCache(cache, layout, host_.get(), storage_.get()),
                                                  executor_.get(), model, &journal_);
    cache_ = watched.get();
    token_limit_ = std::min(o.scheduler.context_length, cache_->total_pages() * kPageTokens);
    loop_ = std::make_unique<StepLoop>(o, std::move(watched), executor_.get(), &clock_);
    journal_.Trace(clock_.Now(),
                   "process: {} lanes of {} + {} pages, depth {}, {} running, chunk {}, radix {}", lanes,
                   per_lane, host_per_lane, o.depth, o.scheduler.max_running, o.scheduler.chunk_tokens,
                   cache.enable_radix);
  }

  void StopProcess() {
    if (loop_->steps_in_flight() > 0) {  // after a violation: let the executor give its steps back
      for (int i = 0; i < 1000 && loop_->steps_in_flight() > 0; ++i) {
        clock_.Advance(1'000'000'000);
        loop_->StepOnce();
      }
    }
    CountCoverage();
    loop_.reset();
    executor_.reset();
    storage_.reset();
    host_.reset();
    clients_.clear();
  }

  // Requests and interruptions at random times, the loop in between.
  void Serve() {
    int64_t requests = 5 + int64_t(random_.Below(30));
    const Nanos pause = random_.Chance(0.5) ? 3'000'000 : 30'000'000;
    Nanos next_action = clock_.Now();
    Nanos progressed = clock_.Now();
    int64_t last_work = Work();
    for (int64_t turns = 0; !journal_.failed(); ++turns) {
      if (requests == 0 && loop_->Idle()) return;
      if (turns > 200'000) return journal_.Violation("no end after {} turns", turns);
      const StepLoop::Progress progress = loop_->StepOnce();
      journal_.CountEvent();
      Audit(progress != StepLoop::Progress::kMoved);
      if (Work() != last_work || loop_->Idle()) {
        last_work = Work();
        progressed = clock_.Now();
      }
      if (clock_.Now() - progressed > kPatience)
        return journal_.Violation("nothing has moved for {} s: {} running, {} waiting, {} steps in flight",
                                  (clock_.Now() - progressed) / 1'000'000'000, loop_->scheduler().running(),
                                  loop_->scheduler().waiting(), loop_->steps_in_flight());
      if (progress == StepLoop::Progress::kMoved && random_.Chance(0.7)) continue;
      const Nanos next = std::min({requests > 0 ? next_action : kNever, executor_->NextDue(),
                                   storage_ != nullptr ? storage_->NextDue() : kNever, clock_.Now() + kTick});
      clock_.Set(std::max(clock_.Now(), next));
      if (requests > 0 && clock_.Now() >= next_action) {
        next_action = clock_.Now() + Nanos(random_.Below(uint64_t(pause)));
        Act(&requests);
      }
    }
  }
  int64_t Work() const {
    const SchedulerCounters& c = loop_->scheduler().counters();
    return c.finished + c.aborted + c.failed + c.prefill_rows + c.decode_rows;
  }

  void Act(int64_t* requests) {
    const double what = random_.Unit();
    if (what < 0.72) {
      const auto together = ranks_ && random_.Chance(0.4) ? 2 + int64_t(random_.Below(3)) : 1;
      std::optional<std::pair<std::string, std::vector<int32_t>>> shared;
      if (together > 1 && !talks_.empty()) shared = talks_[random_.Below(talks_.size())];
      for (int64_t left = std::min<int64_t>(together, *requests); left > 0; --left) {
        --*requests;
        Arrive(shared);
      }
    } else if (what < 0.90) {
      if (clients_.empty()) return;
      Client& c = *clients_[random_.Below(clients_.size())];
      const bool live = !c.done();
      const bool known = loop_->Abort(c.request().rid, absl::CancelledError("the client has left"));
      if (known != live)
        journal_.Violation("abort of {} said {}, it was {}", c.request().rid, known, live ? "live" : "done");
      if (!c.done()) journal_.Violation("request {} has no end after its abort", c.request().rid);
      journal_.Trace(clock_.Now(), "abort {}", c.request().rid);
      journal_.Cover("aborts_of_live_requests", known);
    } else if (what < 0.93) {
      const bool idle = loop_->Idle();
      if (loop_->Flush() != idle && !loop_->verifying())
        journal_.Violation("flush of {} engine said {}", idle ? "an idle" : "a busy", !idle);
      journal_.Cover("flushes", idle);
    } else if (what < 0.96) {
      journal_.Cover("drops_of_the_device_tier", loop_->DropDeviceCache());
    } else if (what < 0.98) {
      if (storage_ != nullptr) (void)storage_->Clear();
    } else {
      const int64_t n = loop_->AbortAll(absl::CancelledError("shutting down"));
      journal_.Cover("aborts_of_all", n > 0);
    }
  }

  void Arrive(const std::optional<std::pair<std::string, std::vector<int32_t>>>& shared) {
    Request r;
    r.id = NextRequestId();
    r.rid = fmt::format("r{}", next_rid_++);
    // A new turn of an old conversation, a shared prefix, or something new.
    if (shared) {
      r.cache_salt = shared->first;
      r.prompt = shared->second;
    } else if (!talks_.empty() && random_.Chance(0.6)) {
      const auto& [salt, tokens] = talks_[random_.Below(talks_.size())];
      r.cache_salt = salt;
      const bool whole = random_.Chance(0.6);
      r.prompt.assign(tokens.begin(),
                      tokens.begin() + long(whole ? tokens.size() : random_.Below(tokens.size() + 1)));
    } else {
      r.cache_salt = random_.Chance(0.7) ? "" : "x";
    }
    int32_t state = 0;
    const uint64_t words = random_.Below(random_.Chance(0.2) ? 12 : 4) + (r.prompt.empty() ? 1 : 0);
    for (uint64_t w = 0; w < words; ++w) {
      state = state * 3 + int32_t(random_.Below(random_.Chance(0.3) ? 3 : 1));
      for (int i = 0; i < 32; ++i) r.prompt.push_back(state % 2 != 0 && i < 31 ? i : (state % 31 + i) % 60);
    }
    for (uint64_t tail = random_.Below(32); tail > 0; --tail) r.prompt.push_back(int32_t(tail));
    if (r.prompt.empty()) r.prompt.push_back(1);

    SamplingParams& p = r.sampling;
    p.max_tokens = random_.Chance(0.05) ? 0 : 1 + int32_t(random_.Below(random_.Chance(0.3) ? 150 : 20));
    p.temperature = random_.Chance(0.5) ? 0 : float(random_.Unit() * 1.5);
    p.seed = random_.Next();
    p.hash_logits = random_.Chance(0.5);
    if (random_.Chance(0.15)) p.repetition_penalty = 1.3f;
    if (random_.Chance(0.15)) p.presence_penalty = 0.5f;
    if (random_.Chance(0.15)) p.top_k = int32_t(random_.Below(20));
    if (random_.Chance(0.2)) p.min_tokens = int32_t(random_.Below(10));
    if (random_.Chance(0.2)) p.stop_token_ids = {int32_t(random_.Below(60))};
    if (random_.Chance(0.3)) p.ignore_eos = true;
    if (random_.Chance(0.1)) p.n = 2 + int32_t(random_.Below(4));
    if (random_.Chance(0.1)) p.prompt_logprobs_from = int32_t(random_.Below(r.prompt.size()));
    r.priority = int32_t(random_.Below(3));
    if (random_.Chance(0.08)) r.deadline = clock_.Now() + Nanos(random_.Below(300'000'000));
    const Status check = loop_->Check(r);
    if (!check.ok()) {
      journal_.Cover("requests_refused");
      return;
    }
    const std::string ns = NamespaceKey(r.cache_salt, r.adapter);
    auto client = std::make_shared<Client>(r, &journal_, cache_->Root(ns), token_limit_);
    r.output = client;
    journal_.Trace(clock_.Now(), "request {}: {} tokens, max {}, n {}", r.rid, r.prompt.size(), p.max_tokens,
                   p.n);
    // The talk goes on with what it will answer; the oracle knows.
    std::vector<int32_t> talk = r.prompt;
    const Answer answer = Alone(r, 0, cache_->Root(ns), token_limit_);
    talk.insert(talk.end(), answer.tokens.begin(), answer.tokens.end());
    if (talk.size() < 700) talks_.emplace_back(r.cache_salt, std::move(talk));
    if (talks_.size() > 12) talks_.erase(talks_.begin());
    clients_.push_back(client);
    loop_->Enqueue(std::move(r));
  }

  void Audit(bool deep) {
    if (!deep && !random_.Chance(0.2)) return;
    for (const std::string& m : loop_->Audit()) journal_.Violation("audit: {}", m);
  }

  void WindDown() {
    for (const auto& c : clients_)
      if (!c->done()) journal_.Violation("request {} never ended", c->request().rid);
    const auto busy = [&] {
      const CacheStats s = cache_->Stats();
      return s.pending_backups + s.pending_loads + s.pending_prefetches + s.awaited_host_pages +
                 s.pending_stores + s.deferred_pages >
             0;
    };
    for (int i = 0; i < 800 && (busy() || i < 3 || loop_->steps_in_flight() > 0); ++i) {
      clock_.Advance(200'000'000);
      loop_->StepOnce();
    }
    Audit(true);
    const CacheStats s = cache_->Stats();
    if (s.device.leased + s.host.leased + s.reserved_host_pages != 0 || busy())
      journal_.Violation(
          "idle, and {} device pages and {} host pages are leased, {} reserved; {} backups, {} loads, {} "
          "prefetches, {} stores pending",
          s.device.leased, s.host.leased, s.reserved_host_pages, s.pending_backups, s.pending_loads,
          s.pending_prefetches, s.pending_stores);
    if (!loop_->Flush()) journal_.Violation("an idle engine refuses to flush");
    const CacheStats e = cache_->Stats();
    if (e.device.free != e.device.all || e.host.free != e.host.all)
      journal_.Violation("after a flush {} of {} device pages and {} of {} host pages are free",
                         e.device.free, e.device.all, e.host.free, e.host.all);
  }

  void CountCoverage() {
    const SchedulerCounters& c = loop_->scheduler().counters();
    const CacheStats s = cache_->Stats();
    for (const auto& [name, n] : {std::pair("engine_steps", c.steps),
                                  std::pair("retractions", c.retractions),
                                  std::pair("prefill_rows", c.prefill_rows),
                                  std::pair("decode_rows", c.decode_rows),
                                  std::pair("dropped_tokens", c.dropped_tokens),
                                  std::pair("evicted_pages_device", s.evicted_pages_device),
                                  std::pair("evicted_pages_host", s.evicted_pages_host),
                                  std::pair("backup_pages", s.backup_pages),
                                  std::pair("load_pages", s.load_pages),
                                  std::pair("prefetch_pages", s.prefetch_pages),
                                  std::pair("prefetch_timeouts", s.prefetch_timeouts),
                                  std::pair("prefetches_put_off", s.prefetches_put_off),
                                  std::pair("prefetches_repeated", s.prefetches_repeated),
                                  std::pair("storage_errors", s.storage_errors),
                                  std::pair("failed_backups", s.failed_backups),
                                  std::pair("verified_pages", s.verified_pages),
                                  std::pair("verify_skipped", s.verify_skipped),
                                  std::pair("lanes_passed_over", s.lanes_passed_over),
                                  std::pair("lane_deficits", s.lane_deficits),
                                  std::pair("short_evictions", s.short_evictions)})
      journal_.Cover(name, n);
    if (!drafts_) return;
    journal_.Cover("drafts_proposed", c.drafts.proposed);
    journal_.Cover("drafts_kept", c.drafts.accepted);
    journal_.Cover("drafts_rejected", c.drafts.proposed - c.drafts.accepted);
  }

  const bool ranks_;
  Journal journal_;
  SeededStream random_;
  VirtualClock clock_;
  SimulatedMedium medium_;
  StorageFaults storage_faults_;
  ExecutorFaults executor_faults_;
  const bool drafts_;
  bool use_host_ = false, use_storage_ = false;

  std::unique_ptr<DevicePool> device_;
  std::unique_ptr<HostPool> host_;
  std::unique_ptr<SimulatedStorage> storage_;
  std::unique_ptr<SimExecutor> executor_;
  std::unique_ptr<StepLoop> loop_;
  WatchedCache* cache_ = nullptr;  // the loop's
  int64_t token_limit_ = 0;
  int64_t next_rid_ = 0;
  std::vector<std::shared_ptr<Client>> clients_;
  std::vector<std::pair<std::string, std::vector<int32_t>>> talks_;  // salt and tokens
};

}  // namespace

SeedReport RunEngineSeed(uint64_t seed, bool trace) { return EngineWorld(seed, trace, false, false).Run(); }
SeedReport RunDraftSeed(uint64_t seed, bool trace) { return EngineWorld(seed, trace, true, false).Run(); }
SeedReport RunCpSeed(uint64_t seed, bool trace) { return EngineWorld(seed, trace, false, true).Run(); }

}  // namespace sluice::sim
