#include "serve/live_feed.h"

#include <pthread.h>

#include <algorithm>

#include "api/json_writer.h"

namespace sluice {
namespace {

constexpr size_t kPointsMax = 21;  // ten seconds at the usual pace

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void WriteCounts(JsonWriter& w, const TierCounts& c) {
  w.Object().Key("all").Int(c.all).Key("free").Int(c.free).Key("leased").Int(c.leased);
  w.Key("cached").Int(c.cached).End();
}

// Microseconds since `from`; -1: it never came to that.
int64_t Since(int64_t from, int64_t at) { return at == 0 ? -1 : (at - from) / 1000; }

void WriteTimeline(JsonWriter& w, const disagg::RoomTimeline& t) {
  w.Object().Key("room").Text(std::to_string(t.room)).Key("tokens").Int(t.prompt_tokens);
  w.Key("transport").Text(t.transport).Key("failed").Bool(t.failed);
  w.Key("ready").Int(Since(t.announced, t.ready)).Key("ended").Int(Since(t.announced, t.ended));
  w.Key("forwards").Array();
  for (const auto& f : t.forwards)
    w.Array().Int(f.from).Int(f.to).Int(Since(t.announced, f.begin)).Int(Since(t.announced, f.end)).End();
  w.End().Key("moves").Array();
  for (const auto& m : t.moves) {
    w.Array().Int(m.first_layer).Int(m.last_layer).Int(m.pages).Int(m.bytes);
    w.Int(Since(t.announced, m.posted)).Int(Since(t.announced, m.done)).End();
  }
  w.End().Key("moves_left_out").Int(t.moves_left_out).End();
}

}  // namespace

HttpResponse PageResponse() {
  return {.content_type = "text/html; charset=utf-8",
          .headers = {{"Cache-Control", "no-cache"},
                      {"Content-Security-Policy",
                       "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                       "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
                       "frame-ancestors 'none'"},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"}},
          .body = std::string(PageHtml())};
}

LiveFeed::LiveFeed(const LiveFeedOptions& options, const Engine* engine, ServeMetrics* metrics,
                   std::string model_name)
    : options_(options),
      engine_(engine),
      metrics_(metrics),
      model_name_(std::move(model_name)),
      thread_([this] { Run(); }) {}

LiveFeed::~LiveFeed() { Stop(); }

void LiveFeed::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool LiveFeed::Add(std::shared_ptr<HttpExchange> exchange) {
  std::lock_guard lock(mutex_);
  std::erase_if(viewers_, [](const auto& viewer) { return viewer->gone(); });
  if (stop_ || viewers_.size() >= options_.viewers_max) return false;
  exchange->StartStream({.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}}});
  viewers_.push_back(std::move(exchange));
  fresh_ = true;
  wake_.notify_all();
  return true;
}

void LiveFeed::Run() {
  pthread_setname_np(pthread_self(), "sluice-live");
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, options_.interval, [this] { return stop_ || fresh_; });
      if (!stop_ && viewers_.empty()) {
        points_.clear();
        wake_.wait(lock, [this] { return stop_ || fresh_; });
      }
      fresh_ = false;
      if (stop_) {
        for (const auto& viewer : viewers_) viewer->EndStream();
        viewers_.clear();
        return;
      }
    }
    const std::string record = Sample();
    std::lock_guard lock(mutex_);
    std::erase_if(viewers_, [&](const auto& viewer) { return viewer->gone() || !viewer->Write(record); });
  }
}

std::string LiveFeed::Sample() {
  const EngineLive live = engine_->Live(options_.nodes_max, options_.sequences_max);
  const EngineSnapshot& e = live.snapshot;
  points_.push_back({Now(), e.generation_tokens_total, e.prompt_tokens_total, e.cached_tokens_total});
  if (points_.size() > kPointsMax) points_.pop_front();
  const Point& last = points_.back();
  // Rates over about two seconds, shares over all points.
  const Point& before = points_[points_.size() > 4 ? points_.size() - 5 : 0];
  const double seconds = std::max(1e-3, last.time_s - before.time_s);
  const bool some = points_.size() > 1;
  std::string out = "data: ";
  JsonWriter w(&out);
  w.Object().Key("model").Text(model_name_);
  w.Key("generation_rate").Num(some ? double(last.generated - before.generated) / seconds : 0);
  w.Key("prompt_rate")
      .Num(some ? double(last.prompt - before.prompt - (last.cached - before.cached)) / seconds : 0);
  w.Key("ttft_s").Num(metrics_->RecentFirstToken());
  w.Key("running").Int(e.running).Key("queued").Int(e.queued).Key("steps").Int(e.steps);
  w.Key("recent_prompt_tokens").Int(last.prompt - points_.front().prompt);
  w.Key("recent_cached_tokens").Int(last.cached - points_.front().cached);
  w.Key("page_tokens").Int(kPageTokens);
  w.Key("lanes").Array();
  for (const TierCounts& lane : live.cache.lanes) WriteCounts(w, lane);
  w.End().Key("host");
  WriteCounts(w, e.cache.host);
  w.Key("tree_nodes").Int(e.cache.nodes).Key("nodes_left_out").Int(live.cache.left_out);
  w.Key("nodes").Array();
  for (const CacheSketch::Node& n : live.cache.nodes) {
    w.Object().Key("id").Int(int64_t(n.id)).Key("parent").Int(n.parent).Key("start").Int(n.start);
    w.Key("pages").Text(n.pages).Key("lock").Int(n.lock).Key("hits").Int(n.hits).End();
  }
  w.End().Key("requests").Array();
  for (const LiveSequence& s : live.sequences) {
    w.Object().Key("rid").Text(s.rid).Key("choice").Int(s.choice).Key("prompt").Int(s.prompt);
    w.Key("computed").Int(s.computed).Key("output").Int(s.output).Key("cached").Int(s.cached);
    w.Key("waiting").Bool(s.waiting).End();
  }
  w.End().Key("requests_left_out");
  w.Int(std::max<int64_t>(0, e.running + e.queued - int64_t(live.sequences.size())));
  w.Key("role").Text(e.pd.role).Key("rooms").Array();
  for (const auto& timeline : e.pd.timelines) WriteTimeline(w, *timeline);
  w.End();
  w.End();
  out += "\n\n";
  return out;
}

}  // namespace sluice
