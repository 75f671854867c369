#include "serve/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

namespace sluice {

namespace prom = prometheus;

namespace {

const prom::Histogram::BucketBoundaries kFirstTokenBuckets = {
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 15, 25, 60};
const prom::Histogram::BucketBoundaries kTotalBuckets = {0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1,  1.5, 2,
                                                         2.5,  5,    10,  15,  20,  30,  40, 60,  120};
const prom::Histogram::BucketBoundaries kTokenBuckets = {0.002, 0.005, 0.01,  0.015, 0.02, 0.025, 0.03,
                                                         0.04,  0.05,  0.075, 0.1,   0.15, 0.2,   0.3,
                                                         0.4,   0.5,   0.75,  1,     2.5};

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

struct ServeMetrics::Series {
  prom::Registry registry;
  prom::Labels model;
  prom::Family<prom::Counter>*requests, *aborted, *rejected, *failed;
  prom::Counter *prompt_tokens, *generation_tokens, *cached_device, *cached_host, *cached_storage;
  prom::Histogram *first_token, *total, *per_token, *inter_token;

  explicit Series(const std::string& model_name) : model{{"model_name", model_name}} {
    const auto family = [&](const char* name, const char* help) {
      return &prom::BuildCounter().Name(name).Help(help).Labels(model).Register(registry);
    };
    requests = family("sluice:num_requests_total", "Requests that ended, by endpoint and result.");
    aborted = family("sluice:num_aborted_requests_total",
                     "Requests that ended before their answer was whole, by reason.");
    rejected = family("sluice:num_rejected_requests_total", "Requests refused before any work, by reason.");
    failed = family("sluice:num_failed_requests_total", "Requests that ended with an error, by reason.");
    prompt_tokens = &family("sluice:prompt_tokens_total", "Prompt tokens of ended requests.")->Add({});
    generation_tokens =
        &family("sluice:generation_tokens_total", "Tokens generated for ended requests.")->Add({});
    auto* cached = family("sluice:cached_tokens_total", "Prompt tokens that came from the cache, by tier.");
    cached_device = &cached->Add({{"cache_source", "device"}});
    cached_host = &cached->Add({{"cache_source", "host"}});
    cached_storage = &cached->Add({{"cache_source", "storage"}});
    const auto histogram = [&](const char* name, const char* help,
                               const prom::Histogram::BucketBoundaries& buckets) {
      return &prom::BuildHistogram().Name(name).Help(help).Labels(model).Register(registry).Add({}, buckets);
    };
    first_token = histogram("sluice:time_to_first_token_seconds", "From arrival to the first token.",
                            kFirstTokenBuckets);
    total = histogram("sluice:e2e_request_latency_seconds", "From arrival to the end of an answer.",
                      kTotalBuckets);
    per_token = histogram("sluice:time_per_output_token_seconds", "(total - first token) / (tokens - 1).",
                          kTokenBuckets);
    inter_token =
        histogram("sluice:inter_token_latency_seconds", "Time between tokens of one choice.", kTokenBuckets);
  }
};

ServeMetrics::ServeMetrics(std::string model_name, bool sglang_aliases)
    : series_(std::make_unique<Series>(model_name)),
      model_name_(std::move(model_name)),
      aliases_(sglang_aliases) {}

ServeMetrics::~ServeMetrics() = default;

void ServeMetrics::Finished(const RequestRecord& r) {
  static constexpr const char* kResults[] = {"ok", "abort", "error", "rejected"};
  Series& s = *series_;
  s.requests->Add({{"endpoint", std::string(r.endpoint)}, {"result", kResults[int(r.result)]}}).Increment();
  const std::string reason(r.reason.empty() ? "other" : r.reason);
  if (r.result == RequestResult::kAborted) s.aborted->Add({{"reason", reason}}).Increment();
  if (r.result == RequestResult::kRejected) s.rejected->Add({{"reason", reason}}).Increment();
  if (r.result == RequestResult::kError) s.failed->Add({{"reason", reason}}).Increment();
  if (r.result == RequestResult::kRejected) return;
  s.prompt_tokens->Increment(double(r.prompt_tokens));
  s.generation_tokens->Increment(double(r.completion_tokens));
  s.cached_device->Increment(r.cached.device);
  s.cached_host->Increment(r.cached.host);
  s.cached_storage->Increment(r.cached.storage);
  if (r.result != RequestResult::kOk) return;  // histogram counts = answers that were whole
  if (r.first_token_s >= 0) {
    s.first_token->Observe(r.first_token_s);
    std::lock_guard lock(rate_mutex_);
    first_tokens_[first_token_count_++ % first_tokens_.size()] = r.first_token_s;
  }
  if (r.per_token_s >= 0) s.per_token->Observe(r.per_token_s);
  s.total->Observe(std::max(0.0, r.total_s));
}

void ServeMetrics::InterToken(double seconds, int64_t tokens) {
  if (tokens <= 0) return;
  const double each = std::max(0.0, seconds) / double(tokens);
  for (int64_t i = 0; i < tokens; ++i) series_->inter_token->Observe(each);
}

double ServeMetrics::RecentFirstToken() const {
  std::lock_guard lock(rate_mutex_);
  const size_t n = std::min(first_token_count_, first_tokens_.size());
  if (n == 0) return -1;
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += first_tokens_[i];
  return sum / double(n);
}

double ServeMetrics::GenerationRate(const EngineSnapshot& snapshot) {
  std::lock_guard lock(rate_mutex_);
  const double now = Now();
  if (rate_time_s_ < 0) {
    rate_time_s_ = now;
    rate_tokens_ = snapshot.generation_tokens_total;
  } else if (now - rate_time_s_ >= 1) {
    rate_ =
        double(std::max<int64_t>(0, snapshot.generation_tokens_total - rate_tokens_)) / (now - rate_time_s_);
    rate_time_s_ = now;
    rate_tokens_ = snapshot.generation_tokens_total;
  }
  return rate_;
}

std::string ServeMetrics::Render(const EngineSnapshot& e, const FrontEnd& front_end) {
  std::vector<prom::MetricFamily> families = series_->registry.Collect();
  const auto add = [&](std::string name, const char* help, prom::MetricType type,
                       std::vector<std::pair<prom::ClientMetric::Label, double>> values) {
    prom::MetricFamily family;
    family.name = "sluice:" + name;
    family.help = help;
    family.type = type;
    for (const auto& [label, value] : values) {
      prom::ClientMetric metric;
      metric.label.push_back({"model_name", model_name_});
      if (!label.name.empty()) metric.label.push_back(label);
      if (type == prom::MetricType::Counter) {
        metric.counter.value = value;
      } else {
        metric.gauge.value = value;
      }
      family.metric.push_back(std::move(metric));
    }
    families.push_back(std::move(family));
  };
  const auto gauge = [&](const char* name, const char* help, double value) {
    add(name, help, prom::MetricType::Gauge, {{{}, value}});
  };
  const auto counter = [&](const char* name, const char* help, double value) {
    add(name, help, prom::MetricType::Counter, {{{}, value}});
  };
  const auto ratio = [](int64_t part, int64_t whole) { return whole > 0 ? double(part) / double(whole) : 0; };
  const CacheStats& c = e.cache;
  const int64_t page_tokens = c.device.all > 0 ? e.max_total_tokens / c.device.all : 64;
  gauge("num_running_reqs", "Choices being computed.", double(e.running));
  gauge("num_queue_reqs", "Requests waiting to be computed.", double(e.queued));
  gauge("num_used_tokens", "Tokens of device KV pages in use or cached.", double(e.used_tokens));
  gauge("max_total_num_tokens", "Tokens that the device KV pool holds.", double(e.max_total_tokens));
  gauge("token_usage", "Share of the device KV pool in use or cached.",
        ratio(e.used_tokens, e.max_total_tokens));
  gauge("page_size", "Tokens of a KV page.", double(page_tokens));
  gauge("cache_hit_rate", "Cached share of all prompt tokens so far.",
        ratio(e.cached_tokens_total, e.prompt_tokens_total));
  gauge("gen_throughput", "Output tokens per second over the last second or more.", GenerationRate(e));
  gauge("http_connections", "Open HTTP connections.", double(front_end.connections));
  counter("engine_steps_total", "Forward batches computed.", double(e.steps));
  counter("engine_prompt_tokens_total", "Prompt tokens admitted, cached ones included.",
          double(e.prompt_tokens_total));
  counter("engine_generation_tokens_total", "Tokens sampled and kept.", double(e.generation_tokens_total));
  counter("forced_tokens_total", "Tokens of bound answers that were kept without a step of their own.",
          double(e.forced_tokens_total));
  counter("num_retractions_total", "Sequences set back because KV pages ran out.",
          double(e.retractions_total));
  counter("http_cpu_seconds_total", "CPU time of the threads that read and write sockets.",
          front_end.http_cpu_s);
  counter("text_cpu_seconds_total", "CPU time of the threads that parse and tokenise.", front_end.text_cpu_s);
  counter("engine_cpu_seconds_total", "CPU time of the engine thread.", e.cpu_seconds);
  for (const auto& [tier, counts] : {std::pair{"device", &c.device}, {"host", &c.host}}) {
    add(std::string(tier) + "_pages", "KV pages by state; the states add up to all.", prom::MetricType::Gauge,
        {{{"state", "all"}, double(counts->all)},
         {{"state", "free"}, double(counts->free)},
         {{"state", "leased"}, double(counts->leased)},
         {{"state", "cached"}, double(counts->cached)}});
  }
  gauge("hicache_host_used_tokens", "Tokens in the host tier.",
        double((c.host.all - c.host.free) * page_tokens));
  gauge("hicache_host_total_tokens", "Tokens that the host tier holds.", double(c.host.all * page_tokens));
  counter("evicted_tokens_total", "Tokens evicted from the device tier.",
          double(c.evicted_pages_device * page_tokens));
  counter("slow_evictions_total", "Evictions whose planning took longer than a millisecond.",
          double(c.slow_evictions));
  counter("short_evictions_total", "Evictions that freed less than was asked.", double(c.short_evictions));
  counter("lane_deficits_total", "Times one rank's lane stayed short although all lanes together had room.",
          double(c.lane_deficits));
  counter("load_back_tokens_total", "Tokens loaded from the host tier.", double(c.load_pages * page_tokens));
  counter("hicache_backup_tokens_total", "Tokens written to the host tier.",
          double(c.backup_pages * page_tokens));
  counter("evicted_for_deficit_tokens_total", "Tokens evicted because a request needed their pages at once.",
          double(c.deficit_evictions * page_tokens));
  counter("free_room_misses_total", "Times that pages were needed and the free room was used up.",
          double(c.free_room_misses));
  counter("load_back_waits_total", "Hits in the host tier that had to wait for device pages.",
          double(c.loads_waited));
  counter("verified_pages_total", "Cached pages that a second computation gave the same bytes for.",
          double(c.verified_pages));
  counter("verify_differences_total", "Cached pages that a second computation gave other bytes for.",
          double(c.verify_differences));
  counter("verify_skipped_total", "Hits chosen for a second computation, but gone before it.",
          double(c.verify_skipped));
  counter("storage_read_bytes_total", "Bytes read from the storage tier.", double(c.storage_read_bytes));
  counter("storage_write_bytes_total", "Bytes written to the storage tier.", double(c.storage_write_bytes));
  counter("storage_errors_total", "Storage operations that failed.", double(c.storage_errors));
  counter("load_back_bytes_total", "Bytes loaded from the host tier.", double(c.load_pages * c.page_bytes));
  counter("hicache_backup_bytes_total", "Bytes written to the host tier.",
          double(c.backup_pages * c.page_bytes));
  add("hicache_pending", "Copies between device and host tier on their way.", prom::MetricType::Gauge,
      {{{"copy", "backup"}, double(c.pending_backups)}, {{"copy", "load"}, double(c.pending_loads)}});
  add("storage_pending", "What is on its way to or from the storage tier: stored nodes, prefetches.",
      prom::MetricType::Gauge,
      {{{"op", "store"}, double(c.pending_stores)}, {{"op", "prefetch"}, double(c.pending_prefetches)}});
  gauge("storage_reserved_tokens", "Tokens of the host tier reserved for prefetches on their way.",
        double(c.reserved_host_pages * page_tokens));
  counter("storage_prefetches_total", "Prompts that the storage tier was asked for.", double(c.prefetches));
  counter("storage_prefetched_tokens_total", "Tokens that prefetches brought to the host tier.",
          double(c.prefetch_pages * page_tokens));
  counter("storage_prefetch_timeouts_total", "Prefetches ended by their deadline.",
          double(c.prefetch_timeouts));
  counter("storage_prefetches_put_off_total", "Prefetches that found no room before their prompt's turn.",
          double(c.prefetches_put_off));
  counter("storage_prefetches_repeated_total",
          "Prefetches made again at their prompt's turn: not all that is or may be stored was there.",
          double(c.prefetches_repeated));
  counter("hicache_evicted_tokens_total", "Tokens evicted from the host tier.",
          double(c.evicted_pages_host * page_tokens));
  counter("hicache_skipped_tokens_total", "Tokens not written to the host tier for want of room.",
          double(c.backups_skipped * page_tokens));
  counter("storage_skipped_tokens_total",
          "Tokens not stored because the storage tier was full or could not keep up.",
          double(c.stores_skipped * page_tokens));
  counter("hicache_failed_copies_total", "Copies between device and host tier that failed.",
          double(c.failed_loads + c.failed_backups));
  const DraftCounters& d = e.drafts;
  counter("spec_verify_runs_total", "Steps of a sequence that verified drafted tokens.", double(d.runs));
  counter("spec_proposed_tokens_total", "Tokens drafted and verified.", double(d.proposed));
  counter("spec_accepted_tokens_total", "Drafted tokens that answers kept.", double(d.accepted));
  gauge("spec_accept_length", "Tokens of a verification step, the sampled one included; mean so far.",
        d.runs > 0 ? 1 + ratio(d.accepted, d.runs) : 0);
  gauge("spec_accept_rate", "Share of drafted tokens that answers kept.", ratio(d.accepted, d.proposed));
  if (d.runs > 0) {
    int32_t most = 0;
    for (int32_t i = 0; i < kMaxDraftTokens; ++i)
      if (d.proposed_at[size_t(i)] > 0) most = i + 1;
    prom::MetricFamily lengths;
    lengths.name = "sluice:spec_accept_length_tokens";
    lengths.help = "Verification steps by the tokens that they gave.";
    lengths.type = prom::MetricType::Histogram;
    prom::ClientMetric& metric = lengths.metric.emplace_back();
    metric.label.push_back({"model_name", model_name_});
    uint64_t below = 0;
    for (int32_t i = 0; i <= most; ++i) {
      below += uint64_t(d.runs_by_accepted[size_t(i)]);
      metric.histogram.bucket.push_back({below, double(i + 1)});
    }
    metric.histogram.bucket.push_back({below, std::numeric_limits<double>::infinity()});
    metric.histogram.sample_count = below;
    metric.histogram.sample_sum = double(d.runs + d.accepted);
    families.push_back(std::move(lengths));
    std::vector<std::pair<prom::ClientMetric::Label, double>> proposed, accepted;
    for (int32_t i = 0; i < most; ++i) {
      const prom::ClientMetric::Label place{"place", std::to_string(i + 1)};
      proposed.push_back({place, double(d.proposed_at[size_t(i)])});
      accepted.push_back({place, double(d.accepted_at[size_t(i)])});
    }
    add("spec_proposed_at_total", "Drafts verified, by how many tokens ahead they were.",
        prom::MetricType::Counter, std::move(proposed));
    add("spec_accepted_at_total", "Drafts that stood, by how many tokens ahead they were.",
        prom::MetricType::Counter, std::move(accepted));
  }
  if (!e.pd.role.empty()) {
    const PdSnapshot& pd = e.pd;
    counter("pd_bytes_sent_total", "Bytes of KV pages written into decode instances.", double(pd.bytes_sent));
    counter("pd_bytes_received_total", "Bytes of KV pages that prefill instances wrote here.",
            double(pd.bytes_received));
    add("pd_rooms_total", "Transfers that ended, by result.", prom::MetricType::Counter,
        {{{"result", "ok"}, double(pd.rooms_completed)},
         {{"result", "failed"}, double(pd.rooms_failed)},
         {{"result", "aborted"}, double(pd.rooms_aborted)}});
    add("pd_rooms_by_mode_total", "Transfers that ended well, by mode.", prom::MetricType::Counter,
        {{{"mode", "per_layer"}, double(pd.rooms_per_layer)},
         {{"mode", "monolithic"}, double(pd.rooms_by_flag + pd.rooms_by_fault)},
         {{"mode", "empty"}, double(pd.rooms_empty)}});
    add("pd_rooms_monolithic_total", "Monolithic transfers, by the reason.", prom::MetricType::Counter,
        {{{"reason", "flag"}, double(pd.rooms_by_flag)}, {{"reason", "fault"}, double(pd.rooms_by_fault)}});
    add("pd_bytes_by_component_total", "Bytes sent, by what they are.", prom::MetricType::Counter,
        {{{"component", "latent"}, double(pd.latent_bytes)},
         {{"component", "index"}, double(pd.index_bytes)},
         {{"component", "draft"}, double(pd.draft_bytes)},
         {{"component", "aux"}, double(pd.aux_bytes)}});
    counter("pd_bytes_overlapped_total",
            "Bytes that had arrived before the last forward of their room ended.",
            double(pd.bytes_before_forward_end));
    counter("pd_exposed_seconds_total", "Time between the end of a room's last forward and its last byte.",
            pd.wait_completions_s);
    counter(
        "pd_wait_layers_seconds_total",
        "Time in which a room's forward ran, nothing of it was under way and the next layers were not final.",
        pd.wait_layers_s);
    counter("pd_transfer_seconds_total", "Time between a room's first and last write.", pd.transfer_s);
    counter("pd_writes_total", "Groups of layers submitted.", double(pd.writes));
    counter("pd_write_retries_total", "Submits repeated after an error of the transport.",
            double(pd.write_retries));
    counter("pd_resumes_total", "Transfers that went on over another connection.", double(pd.resumes));
    counter("pd_layers_at_end_total", "Layers sent after the forward for want of a hook.",
            double(pd.layers_sent_at_end));
    counter("pd_bytes_at_end_total", "Bytes sent after the forward for want of a hook.",
            double(pd.bytes_sent_at_end));
    counter("pd_abort_acks_total", "Aborts that the peer has answered.", double(pd.abort_acks));
    counter("pd_abort_ack_seconds_total", "Time between a room's failure and the end of its leases.",
            pd.abort_ack_seconds);
    counter("pd_fences_total", "Connections cut because a peer did not answer.", double(pd.fences));
    gauge("pd_rooms_active", "Transfers that wait or run.", double(pd.active_rooms));
    gauge("pd_leased_pages", "Pages reserved for transfers.", double(pd.leased_pages));
  }
  if (aliases_) {
    const size_t own = families.size();
    for (size_t i = 0; i < own; ++i) {
      prom::MetricFamily alias = families[i];
      alias.name = "sglang:" + alias.name.substr(alias.name.find(':') + 1);
      families.push_back(std::move(alias));
    }
  }
  return prom::TextSerializer().Serialize(families);
}

}  // namespace sluice
