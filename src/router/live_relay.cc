#include "router/live_relay.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace sluice::router {

using Clock = std::chrono::steady_clock;

// One viewer. Lock order: mutex_, then whatever the exchange and the client take.
class LiveRelay::View : public std::enable_shared_from_this<LiveRelay::View> {
 public:
  View(const LiveRelay* relay, const HttpRequest& request, std::shared_ptr<HttpExchange> exchange)
      : relay_(relay), exchange_(std::move(exchange)), sources_(relay->instances_.size()) {
    for (const auto& [name, value] : request.headers)
      if (name == "authorization") headers_.emplace_back(name, value);
    headers_.emplace_back("accept", "text/event-stream");
  }

  // False: it is over. Opens what is not open, and once all have answered something, writes the deployment.
  bool Beat(const std::string& deployment, Clock::time_point now) {
    std::lock_guard lock(mutex_);
    if (over_) return false;
    if (exchange_->gone()) {
      EndLocked();
      return false;
    }
    for (size_t i = 0; i < sources_.size(); ++i) {
      Source& source = sources_[i];
      if (source.call != 0 || now < source.not_before) continue;
      source.held.clear();
      HttpCall call;
      call.url = relay_->instances_[i].url;
      call.request.method = "GET";
      call.request.path = (call.url.path == "/" ? "" : call.url.path) + "/live";
      call.request.headers = headers_;
      call.stall_timeout_s = 10;
      call.max_body_bytes = UINT64_MAX;
      source.call = relay_->client_->Start(std::move(call), std::make_shared<Sink>(shared_from_this(), i));
    }
    MaybeStartLocked();
    if (streaming_ && !exchange_->Write("data: {\"deployment\":" + deployment + "}\n\n")) EndLocked();
    return !over_;
  }

  void End() {
    std::lock_guard lock(mutex_);
    if (over_) return;
    if (!streaming_) {
      streaming_ = true;
      exchange_->StartStream({});
    }
    exchange_->EndStream();
    EndLocked();
  }

 private:
  class Sink final : public HttpSink {
   public:
    Sink(std::shared_ptr<View> view, size_t at) : view_(std::move(view)), at_(at) {}
    void OnHead(int status, const HttpHeaders& headers) override { view_->OnHead(at_, status, headers); }
    void OnData(std::string_view bytes) override { view_->OnData(at_, bytes); }
    void OnEnd(Status) override { view_->OnEnd(at_); }

   private:
    const std::shared_ptr<View> view_;
    const size_t at_;
  };
  struct Source {
    uint64_t call = 0;   // 0: not open
    int status = 0;      // of the last answer; 0: none yet
    bool asked = false;  // has answered or failed at least once
    std::string held;
    Clock::time_point not_before{};
  };

  void OnHead(size_t at, int status, const HttpHeaders& headers) {
    std::lock_guard lock(mutex_);
    Source& source = sources_[at];
    source.status = status;
    source.asked = true;
    if (over_) return;
    if (status == 401 && !streaming_) {
      HttpResponse refusal{.status = 401,
                           .body =
                               R"({"error":{"message":"the instances ask for an API key",)"
                               R"("type":"authentication_error","param":null,"code":"invalid_api_key"}})"};
      for (const auto& [name, value] : headers)
        if (name == "www-authenticate") refusal.headers.emplace_back(name, value);
      exchange_->Respond(std::move(refusal));
      return EndLocked();
    }
    MaybeStartLocked();
  }

  void OnData(size_t at, std::string_view bytes) {
    std::lock_guard lock(mutex_);
    Source& source = sources_[at];
    if (over_ || source.status != 200) return;
    source.held += bytes;
    for (size_t end; !over_ && (end = source.held.find("\n\n")) != std::string::npos;) {
      const std::string record = source.held.substr(0, end);
      source.held.erase(0, end + 2);
      if (!record.starts_with("data: ") || !streaming_) continue;
      if (!exchange_->Write(fmt::format("data: {{\"instance\":{},\"live\":{}}}\n\n", at,
                                        std::string_view(record).substr(6))))
        EndLocked();
    }
    if (source.held.size() > relay_->options_.record_bytes_max) source.held.clear();
  }

  void OnEnd(size_t at) {
    std::lock_guard lock(mutex_);
    Source& source = sources_[at];
    source.call = 0;
    source.asked = true;
    source.not_before = Clock::now() + relay_->options_.ask_again;
    if (!over_) MaybeStartLocked();
  }

  void MaybeStartLocked() {
    if (streaming_ || !std::all_of(sources_.begin(), sources_.end(), [](const Source& s) { return s.asked; }))
      return;
    streaming_ = true;
    exchange_->StartStream({.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}}});
  }

  void EndLocked() {
    over_ = true;
    for (const Source& source : sources_)
      if (source.call != 0) relay_->client_->Cancel(source.call);
  }

  const LiveRelay* const relay_;
  const std::shared_ptr<HttpExchange> exchange_;
  HttpHeaders headers_;
  std::mutex mutex_;
  std::vector<Source> sources_;
  bool streaming_ = false, over_ = false;
};

LiveRelay::LiveRelay(const Options& options, HttpClient* client, std::vector<Instance> instances,
                     std::function<std::string()> describe)
    : options_(options),
      client_(client),
      instances_(std::move(instances)),
      describe_(std::move(describe)),
      thread_([this] { Run(); }) {}

LiveRelay::~LiveRelay() { Stop(); }

void LiveRelay::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool LiveRelay::Add(const HttpRequest& request, std::shared_ptr<HttpExchange> exchange) {
  std::lock_guard lock(mutex_);
  if (stop_ || views_.size() >= options_.viewers_max) return false;
  views_.push_back(std::make_shared<View>(this, request, std::move(exchange)));
  wake_.notify_all();
  return true;
}

void LiveRelay::Run() {
  pthread_setname_np(pthread_self(), "sluice-live");
  std::vector<std::shared_ptr<View>> views;
  for (size_t known = 0;;) {
    {
      std::unique_lock lock(mutex_);
      const auto fresh = [&] { return stop_ || views_.size() > known; };
      if (views_.empty()) {
        wake_.wait(lock, fresh);
      } else {
        wake_.wait_for(lock, options_.interval, fresh);
      }
      views = views_;
      if (stop_) views_.clear();
      if (stop_) break;
      known = views_.size();
    }
    const std::string deployment = describe_();
    const auto now = Clock::now();
    std::erase_if(views, [&](const auto& view) { return view->Beat(deployment, now); });  // leaves ended ones
    if (views.empty()) continue;
    std::lock_guard lock(mutex_);
    for (const auto& ended : views) std::erase(views_, ended);
    known = views_.size();
  }
  for (const auto& view : views) view->End();
}

}  // namespace sluice::router
