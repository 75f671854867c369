#include "router/router.h"

#include <simdjson.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <random>

#include "base/log.h"
#include "nlohmann/json.hpp"

namespace sluice::router {
namespace {

using Json = nlohmann::ordered_json;
using Role = WorkerSpec::Role;

// Prompts of one request meet in rooms next to each other: rooms of two requests are this far apart at least.
constexpr uint64_t kRoomStride = 4096;
constexpr uint64_t kRoomsMax = 1ull << 62;

std::string ErrorBody(int status, const std::string& message, const char* type, const char* code) {
  return Json{{"error", {{"message", message}, {"type", type}, {"param", nullptr}, {"code", code}}}}.dump(
      -1, ' ', false, Json::error_handler_t::replace);
  (void)status;
}

HttpResponse Refusal(int status, const std::string& message, const char* type = "service_unavailable",
                     const char* code = "unavailable") {
  HttpResponse r{.status = status, .body = ErrorBody(status, message, type, code)};
  if (status == 503 || status == 429) r.headers.emplace_back("Retry-After", "1");
  return r;
}

bool Generates(std::string_view path) {
  return path == "/v1/chat/completions" || path == "/v1/completions" || path == "/generate" ||
         path == "/v1/messages";
}

const char* NameOf(Role role) {
  return role == Role::kWhole ? "worker" : role == Role::kPrefill ? "prefill" : "decode";
}

// What two requests must share for one's cache to serve the other: namespace and the prompt as it was sent.
Status ReadKey(const std::string& body, std::string* key, bool* has_room) {
  thread_local simdjson::dom::parser parser;
  simdjson::dom::object object;
  if (const auto error = parser.parse(body).get(object); error != simdjson::SUCCESS)
    return Invalid("the body is not a JSON object: {}", simdjson::error_message(error));
  for (const char* name :
       {"cache_salt", "extra_key", "tools", "system", "messages", "prompt", "text", "input_ids"}) {
    simdjson::dom::element element;
    if (object.at_key(name).get(element) != simdjson::SUCCESS) continue;
    *key += simdjson::minify(element);
    *key += '\n';
  }
  simdjson::dom::element room;
  *has_room = object.at_key("bootstrap_room").get(room) == simdjson::SUCCESS;
  return OkStatus();
}

}  // namespace

struct Router::Worker {
  WorkerSpec spec;
  HttpUrl url;
  int index = 0;
  // Under Router::mutex_.
  int64_t load = 0, dispatched = 0;
  int failures = 0;
  bool healthy = false;
  std::string why = "not asked yet";
};

// One request of a client: the calls to its workers and the one answer.
class Router::Dispatch : public std::enable_shared_from_this<Router::Dispatch> {
 public:
  Dispatch(Router* router, HttpRequest request, std::string key, std::shared_ptr<HttpExchange> exchange)
      : router_(router), request_(std::move(request)), key_(std::move(key)), exchange_(std::move(exchange)) {
    ++router_->running_;
  }
  ~Dispatch() {
    std::lock_guard lock(router_->dispatches_mutex_);
    router_->dispatches_.erase(this);
    --router_->running_;
  }

  void Start() {
    exchange_->OnGone([weak = weak_from_this()](GoneReason) {
      const auto self = weak.lock();
      if (self == nullptr) return;
      std::lock_guard lock(self->mutex_);
      if (self->over_) return;
      self->over_ = true;
      ++self->router_->gone_;
      self->CancelLocked();
    });
    {
      std::lock_guard live_lock(router_->dispatches_mutex_);
      router_->dispatches_[this] = weak_from_this();
    }
    std::lock_guard lock(mutex_);
    TryLocked();
  }

  void GiveUp(const std::string& why) {
    std::lock_guard lock(mutex_);
    if (!over_) FailLocked(503, why);
  }

 private:
  class Sink final : public HttpSink {
   public:
    Sink(std::shared_ptr<Dispatch> owner, int attempt, bool answers)
        : owner_(std::move(owner)), attempt_(attempt), answers_(answers) {}
    void OnHead(int status, const HttpHeaders& headers) override {
      owner_->OnHead(attempt_, answers_, status, headers);
    }
    void OnData(std::string_view bytes) override { owner_->OnData(attempt_, answers_, bytes); }
    void OnEnd(Status status) override { owner_->OnEnd(attempt_, answers_, std::move(status)); }

   private:
    const std::shared_ptr<Dispatch> owner_;
    const int attempt_;
    const bool answers_;
  };
  // Of the two calls; index 1 is the one whose answer the client gets.
  struct Side {
    Worker* worker = nullptr;
    uint64_t call = 0;
    bool running = false;
    int status = 0;
    HttpHeaders headers;
    std::string body;  // whole answers, and errors
  };

  void TryLocked() {
    sides_[0] = sides_[1] = Side();
    streaming_ = false;
    const bool pd = router_->pd();
    if (pd && (sides_[0].worker = router_->Pick(Role::kPrefill, key_)) == nullptr)
      return FailLocked(503, "no prefill instance is healthy; try again later");
    if ((sides_[1].worker = router_->Pick(pd ? Role::kDecode : Role::kWhole, key_)) == nullptr) {
      if (pd) router_->Release(sides_[0].worker);
      return FailLocked(503, pd ? "no decode instance is healthy; try again later"
                                : "no server is healthy; try again later");
    }
    std::string body = request_.body;
    if (pd) {
      const Worker& prefill = *sides_[0].worker;
      const size_t brace = body.find('{');
      body.insert(brace + 1, fmt::format(R"("bootstrap_host":"{}","bootstrap_port":{},"bootstrap_room":{},)",
                                         prefill.url.host, prefill.spec.bootstrap_port, router_->NewRoom()));
    }
    for (int s = pd ? 0 : 1; s < 2; ++s) {
      sides_[s].running = true;
      sides_[s].call = router_->client_->Start(router_->CallTo(*sides_[s].worker, request_, body),
                                               std::make_shared<Sink>(shared_from_this(), attempt_, s == 1));
    }
  }

  void OnHead(int attempt, bool answers, int status, const HttpHeaders& headers) {
    std::lock_guard lock(mutex_);
    if (attempt != attempt_) return;
    Side& side = sides_[answers ? 1 : 0];
    side.status = status;
    side.headers = headers;
  }

  void OnData(int attempt, bool answers, std::string_view bytes) {
    std::lock_guard lock(mutex_);
    if (attempt != attempt_ || over_) return;
    Side& side = sides_[answers ? 1 : 0];
    if (!answers) {  // prefill's own answer says nothing unless it is an error
      if (side.status != 200 && side.body.size() < (1u << 20)) side.body += bytes;
      return;
    }
    if (side.status != 200 || !IsStream(side.headers)) {
      side.body += bytes;
      return;
    }
    if (!streaming_) {  // not before there is something to say: until then an error can still be one by
                        // status
      streaming_ = true;
      exchange_->StartStream({.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}},
                              .idle_filler = ": ping\n\n"});
    }
    if (!exchange_->Write(bytes)) CancelLocked();
  }

  void OnEnd(int attempt, bool answers, Status status) {
    std::lock_guard lock(mutex_);
    if (attempt != attempt_) return;
    Side& side = sides_[answers ? 1 : 0];
    side.running = false;
    router_->Release(side.worker);
    if (over_) return;
    if (!status.ok() && !absl::IsAborted(status)) router_->MarkFailed(side.worker, Message(status));
    if (answers) {
      if (!status.ok()) {
        if (RetryLocked()) return;
        return FailLocked(
            absl::IsDeadlineExceeded(status) ? 504 : 502,
            fmt::format("{} {}: {}", NameOf(side.worker->spec.role), side.worker->spec.url, Message(status)));
      }
      over_ = true;
      ++(side.status == 200 ? router_->finished_ : router_->failed_);
      CancelLocked();
      if (streaming_) return exchange_->EndStream();
      return exchange_->Respond(Pass(side));
    }
    // Prefill's own answer. A good one means nothing: decode has what it needs, or will say why not.
    if (status.ok() && side.status == 200) return;
    if (!status.ok()) {
      if (RetryLocked()) return;
      return FailLocked(502, fmt::format("prefill {}: {}", side.worker->spec.url, Message(status)));
    }
    if (side.status >= 500 && sides_[1].status != 0 && sides_[1].status != 200)
      return;  // decode says it, too
    over_ = true;
    ++router_->failed_;
    CancelLocked();
    if (!streaming_) return exchange_->Respond(Pass(side));
    exchange_->Write("data: " + side.body + "\n\n");
    exchange_->EndStream();
  }

  static bool IsStream(const HttpHeaders& headers) {
    for (const auto& [name, value] : headers)
      if (name == "content-type") return value.starts_with("text/event-stream");
    return false;
  }

  static HttpResponse Pass(const Side& side) {
    HttpResponse r{.status = side.status, .body = side.body};
    for (const auto& [name, value] : side.headers) {
      if (name == "content-type") r.content_type = value;
      if (name == "retry-after" || name == "www-authenticate") r.headers.emplace_back(name, value);
    }
    return r;
  }

  // Nothing has reached the client and a worker broke: another pair may do better.
  bool RetryLocked() {
    if (streaming_ || attempt_ >= router_->options_.retries || router_->draining_) return false;
    const Side old[2] = {sides_[0], sides_[1]};
    ++attempt_;  // what the old calls still say goes unheard
    ++router_->retried_;
    for (const Side& side : old) {
      if (!side.running) continue;
      router_->Release(side.worker);
      router_->client_->Cancel(side.call);
    }
    TryLocked();
    return true;
  }

  void CancelLocked() {
    for (const Side& side : sides_)
      if (side.running) router_->client_->Cancel(side.call);
  }

  void FailLocked(int status, const std::string& message) {
    over_ = true;
    ++router_->failed_;
    CancelLocked();
    if (!streaming_) return exchange_->Respond(Refusal(status, message));
    exchange_->Write("data: " + ErrorBody(status, message, "service_unavailable", "unavailable") + "\n\n");
    exchange_->EndStream();
  }

  Router* const router_;
  const HttpRequest request_;
  const std::string key_;
  const std::shared_ptr<HttpExchange> exchange_;
  std::mutex mutex_;
  Side sides_[2];
  int attempt_ = 0;
  bool over_ = false, streaming_ = false;
};

// The same request to all workers; one answer that lists theirs.
class Router::Fan : public std::enable_shared_from_this<Router::Fan> {
 public:
  Fan(Router* router, std::string path, std::shared_ptr<HttpExchange> exchange)
      : router_(router), path_(std::move(path)), exchange_(std::move(exchange)) {}
  void Start(const HttpRequest& request) {
    left_ = router_->workers_.size();
    answers_.resize(left_);
    for (size_t i = 0; i < router_->workers_.size(); ++i) {
      HttpCall call = router_->CallTo(*router_->workers_[i], request, request.body);
      call.stall_timeout_s = 30;
      router_->client_->Start(std::move(call), std::make_shared<Sink>(shared_from_this(), i));
    }
  }

 private:
  struct Answer {
    int status = 0;
    std::string body, error;
  };
  class Sink final : public HttpSink {
   public:
    Sink(std::shared_ptr<Fan> fan, size_t at) : fan_(std::move(fan)), at_(at) {}
    void OnHead(int status, const HttpHeaders&) override { answer_.status = status; }
    void OnData(std::string_view bytes) override { answer_.body += bytes; }
    void OnEnd(Status status) override {
      if (!status.ok()) answer_.error = std::string(Message(status));
      fan_->Done(at_, std::move(answer_));
    }

   private:
    const std::shared_ptr<Fan> fan_;
    const size_t at_;
    Answer answer_;
  };
  void Done(size_t at, Answer answer) {
    {
      std::lock_guard lock(mutex_);
      answers_[at] = std::move(answer);
      if (--left_ > 0) return;
    }
    Json workers = Json::array();
    int status = 200;
    for (size_t i = 0; i < answers_.size(); ++i) {
      const Answer& a = answers_[i];
      const Worker& w = *router_->workers_[i];
      Json one = {{"url", w.spec.url}, {"role", NameOf(w.spec.role)}, {"status", a.status}};
      if (!a.error.empty()) one["error"] = a.error;
      Json body = Json::parse(a.body, nullptr, /*allow_exceptions=*/false);
      one["answer"] = body.is_discarded() ? Json(a.body) : std::move(body);
      if (a.status != 200) status = a.status == 0 ? 502 : std::max(status, a.status);
      workers.push_back(std::move(one));
    }
    Json out = Json::object();
    if (path_ == "/server_info" || path_ == "/get_server_info") {
      status = 200;
      // What an instance says of the model holds for all of them.
      for (size_t i = 0; i < answers_.size() && out.empty(); ++i)
        if (router_->workers_[i]->spec.role != Role::kPrefill && workers[i]["answer"].is_object())
          out = workers[i]["answer"];
      out["version"] = router_->options_.version;
      out["role"] = "router";
      out["status"] = router_->draining_ ? "draining" : "ready";
      out["policy"] = router_->options_.policy;
      {
        std::lock_guard lock(router_->mutex_);
        for (size_t i = 0; i < answers_.size(); ++i) {
          workers[i]["healthy"] = router_->workers_[i]->healthy;
          workers[i]["load"] = router_->workers_[i]->load;
          if (!router_->workers_[i]->healthy) workers[i]["why"] = router_->workers_[i]->why;
        }
      }
    }
    out["workers"] = std::move(workers);
    exchange_->Respond({.status = status, .body = out.dump(-1, ' ', false, Json::error_handler_t::replace)});
  }
  Router* const router_;
  const std::string path_;
  const std::shared_ptr<HttpExchange> exchange_;
  std::mutex mutex_;
  std::vector<Answer> answers_;
  size_t left_ = 0;
};

Router::Router(const RouterOptions& options)
    : options_(options),
      random_([] {
        std::random_device device;
        return uint64_t(device()) << 32 | device();
      }()),
      client_(HttpClient::Make()) {}

StatusOr<std::unique_ptr<Router>> Router::Start(const RouterOptions& options) {
  std::unique_ptr<Router> router(new Router(options));
  bool has[3] = {};
  for (const WorkerSpec& spec : options.workers) {
    auto worker = std::make_unique<Worker>();
    worker->spec = spec;
    ASSIGN_OR_RETURN(worker->url, HttpUrl::ParseServer(spec.url));
    worker->index = int(router->workers_.size());
    has[int(spec.role)] = true;
    router->workers_.push_back(std::move(worker));
  }
  if (has[0] == (has[1] || has[2]))
    return Invalid("name either --worker URL, or --prefill URL BOOTSTRAP_PORT and --decode URL");
  if (has[1] != has[2])
    return Invalid("{} is missing: both sides are needed", has[1] ? "--decode URL" : "--prefill URL PORT");
  router->pd_ = has[1];
  for (const Role role : {Role::kWhole, Role::kPrefill, Role::kDecode}) {
    const std::string& own = role == Role::kPrefill  ? options.prefill_policy
                             : role == Role::kDecode ? options.decode_policy
                                                     : options.policy;
    ASSIGN_OR_RETURN(router->policies_[int(role)],
                     MakePolicy(own.empty() ? options.policy : own, router->random_.Next()));
  }
  if (options.page.has_value()) {
    std::vector<LiveRelay::Instance> instances;
    for (const auto& w : router->workers_) instances.push_back({w->spec.url, w->url});
    router->live_ =
        std::make_unique<LiveRelay>(LiveRelay::Options(), router->client_.get(), std::move(instances),
                                    [r = router.get()] { return r->DescribeDeployment(); });
  }
  ASSIGN_OR_RETURN(router->http_, HttpServer::Start(options.http, router.get()));
  router->health_ = std::thread([r = router.get()] { r->CheckHealth(); });
  return router;
}

Router::~Router() { Stop(0); }

void Router::Stop(double grace_s) {
  draining_ = true;
  if (stop_.exchange(true)) return;
  if (health_.joinable()) health_.join();
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(int64_t(grace_s * 1000));
  while (running_ > 0 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (live_) live_->Stop();
  if (http_) http_->Stop(2);
  client_.reset();
}

void Router::EndAll(const std::string& why) {
  std::vector<std::shared_ptr<Dispatch>> live;
  {
    std::lock_guard lock(dispatches_mutex_);
    for (const auto& [ignored, weak] : dispatches_)
      if (auto dispatch = weak.lock()) live.push_back(std::move(dispatch));
  }
  for (const auto& dispatch : live) dispatch->GiveUp(why);
}

uint64_t Router::NewRoom() {
  std::lock_guard lock(mutex_);
  return (random_.Next() % (kRoomsMax / kRoomStride)) * kRoomStride + kRoomStride;
}

Router::Worker* Router::Pick(Role role, std::string_view key) {
  std::lock_guard lock(mutex_);
  std::vector<Candidate> candidates;
  for (const auto& w : workers_)
    if (w->spec.role == role && w->healthy) candidates.push_back({w->index, w->load});
  if (candidates.empty()) {  // all ill: any may have come back since it was asked
    for (const auto& w : workers_)
      if (w->spec.role == role && w->failures < options_.health_failures)
        candidates.push_back({w->index, w->load});
  }
  if (candidates.empty()) return nullptr;
  Worker* worker = workers_[size_t(candidates[policies_[int(role)]->Pick(candidates, key)].worker)].get();
  ++worker->load;
  ++worker->dispatched;
  return worker;
}

void Router::Release(Worker* worker) {
  std::lock_guard lock(mutex_);
  --worker->load;
}

void Router::MarkFailed(Worker* worker, std::string_view why) {
  std::lock_guard lock(mutex_);
  if (worker->healthy) spdlog::warn("{} {} is ill: {}", NameOf(worker->spec.role), worker->spec.url, why);
  worker->healthy = false;
  worker->failures = std::max(worker->failures, options_.health_failures);
  worker->why = std::string(why);
  policies_[int(worker->spec.role)]->Forget(worker->index);
}

void Router::CheckHealth() {
  const auto interval = std::chrono::milliseconds(int64_t(options_.health_interval_s * 1000));
  while (!stop_) {
    struct Probe final : HttpSink {
      void OnHead(int s, const HttpHeaders&) override { status = s; }
      void OnData(std::string_view) override {}
      void OnEnd(Status s) override {
        std::lock_guard lock(*mutex);
        if (!s.ok()) error = std::string(Message(s));
        done = true;
        --*left;
        signal->notify_all();
      }
      std::shared_ptr<std::mutex> mutex;
      std::shared_ptr<std::condition_variable> signal;
      std::shared_ptr<size_t> left;
      int status = 0;
      std::string error;
      bool done = false;
    };
    auto mutex = std::make_shared<std::mutex>();
    auto signal = std::make_shared<std::condition_variable>();
    auto left = std::make_shared<size_t>(workers_.size());
    std::vector<std::shared_ptr<Probe>> probes;
    for (const auto& w : workers_) {
      auto probe = std::make_shared<Probe>();
      probe->mutex = mutex;
      probe->signal = signal;
      probe->left = left;
      HttpCall call;
      call.url = w->url;
      call.request.method = "GET";
      call.request.path = (w->url.path == "/" ? "" : w->url.path) + "/health";
      call.connect_timeout_s = call.stall_timeout_s = options_.health_timeout_s;
      client_->Start(std::move(call), probe);
      probes.push_back(probe);
    }
    {
      std::unique_lock lock(*mutex);
      signal->wait(lock, [&] { return *left == 0; });
    }
    {
      std::lock_guard lock(mutex_);
      for (size_t i = 0; i < workers_.size(); ++i) {
        Worker& w = *workers_[i];
        const bool well = probes[i]->error.empty() && probes[i]->status == 200;
        if (well) {
          if (!w.healthy) spdlog::info("{} {} is healthy", NameOf(w.spec.role), w.spec.url);
          w.healthy = true;
          w.failures = 0;
          continue;
        }
        w.why =
            probes[i]->error.empty() ? fmt::format("/health says {}", probes[i]->status) : probes[i]->error;
        // A server that says that it is leaving is believed at once.
        w.failures = probes[i]->status == 503 ? options_.health_failures : w.failures + 1;
        if (w.failures < options_.health_failures || !w.healthy) continue;
        spdlog::warn("{} {} is ill: {}", NameOf(w.spec.role), w.spec.url, w.why);
        w.healthy = false;
        policies_[int(w.spec.role)]->Forget(w.index);
      }
    }
    const auto until = std::chrono::steady_clock::now() + interval;
    while (!stop_ && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::min(interval, std::chrono::milliseconds(50)));
  }
}

HttpCall Router::CallTo(const Worker& worker, const HttpRequest& request, std::string body) const {
  HttpCall call;
  call.url = worker.url;
  call.request.method = request.method;
  call.request.path = (worker.url.path == "/" ? "" : worker.url.path) + request.path;
  call.request.query = request.query;
  call.request.body = std::move(body);
  call.stall_timeout_s = options_.request_timeout_s;
  for (const auto& [name, value] : request.headers)
    if (name == "authorization" || name == "content-type" || name == "accept" || name == "x-request-id")
      call.request.headers.emplace_back(name, value);
  return call;
}

std::optional<HttpResponse> Router::CheckHead(const HttpRequest&) { return std::nullopt; }

HttpResponse Router::ErrorResponse(HttpError error, std::string_view detail) {
  const std::string text(detail);
  switch (error) {
    case HttpError::kUnknownCoding:
      return Refusal(501, text, "invalid_request_error", "bad_request");
    case HttpError::kMalformed:
      return Refusal(400, text, "invalid_request_error", "bad_request");
    case HttpError::kHeadTooLarge:
      return Refusal(431, text, "invalid_request_error", "bad_request");
    case HttpError::kBodyTooLarge:
      return Refusal(413, text, "invalid_request_error", "request_too_large");
    case HttpError::kTimeout:
      return Refusal(408, text, "timeout_error", "timeout");
    case HttpError::kTooManyConnections:
    case HttpError::kTooManyBodies:
      return Refusal(503, text, "overloaded_error", "overloaded");
    case HttpError::kNoAnswer:
      break;
  }
  return Refusal(500, text, "internal_error", "internal");
}

void Router::Health(const std::shared_ptr<HttpExchange>& exchange) {
  if (draining_) return exchange->Respond(Refusal(503, "the router is shutting down"));
  bool has[3] = {};
  {
    std::lock_guard lock(mutex_);
    for (const auto& w : workers_) has[int(w->spec.role)] |= w->healthy;
  }
  if (pd_ ? has[1] && has[2] : has[0]) return exchange->Respond({.body = R"({"status":"ok"})"});
  exchange->Respond(Refusal(503, pd_ ? fmt::format("healthy: {} prefill, {} decode; one of each is needed",
                                                   has[1] ? "some" : "no", has[2] ? "some" : "no")
                                     : "no worker is healthy"));
}

void Router::Handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  const std::string_view path = request.path;
  if (path == "/health") return Health(exchange);
  if (path == "/metrics")
    return exchange->Respond({.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = Metrics()});
  if (path == "/" && options_.page.has_value()) return exchange->Respond(*options_.page);
  if (path == "/live" && live_ != nullptr) {
    if (request.method != "GET")
      return exchange->Respond(
          Refusal(405, "/live takes GET", "invalid_request_error", "method_not_allowed"));
    if (draining_) return exchange->Respond(Refusal(503, "the router is shutting down"));
    if (live_->Add(request, exchange)) return;
    return exchange->Respond(
        Refusal(503, "too many viewers; close another page", "overloaded_error", "overloaded"));
  }
  if (path == "/" || path == "/live")
    return exchange->Respond(
        Refusal(404, "there is no page here (--disable-page)", "not_found_error", "not_found"));
  if (path == "/server_info" || path == "/get_server_info" || path == "/flush_cache" ||
      path == "/abort_request")
    return FanOut(std::move(request), std::move(exchange));
  if (Generates(path) && request.method == "POST") return Generate(std::move(request), std::move(exchange));
  ForwardToAny(std::move(request), std::move(exchange));
}

void Router::FanOut(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  if (request.path == "/flush_cache") {
    std::lock_guard lock(mutex_);
    for (const auto& w : workers_) policies_[int(w->spec.role)]->Forget(w->index);
  }
  std::make_shared<Fan>(this, request.path, std::move(exchange))->Start(request);
}

void Router::Generate(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  if (draining_) {
    ++refused_;
    return exchange->Respond(Refusal(503, "the router is shutting down; send the request to another one"));
  }
  std::string key;
  bool has_room = false;
  if (const Status s = ReadKey(request.body, &key, &has_room); !s.ok())
    return exchange->Respond(Refusal(400, std::string(Message(s)), "invalid_request_error", "bad_request"));
  if (has_room) {
    ++refused_;
    return exchange->Respond(Refusal(400, "bootstrap_room: the router gives rooms out; leave the field out",
                                     "invalid_request_error", "bad_request"));
  }
  if (pd_ && key.empty()) {  // nothing to generate from: a worker says it in its own words
    return ForwardToAny(std::move(request), std::move(exchange));
  }
  std::make_shared<Dispatch>(this, std::move(request), std::move(key), std::move(exchange))->Start();
}

// Questions that every instance answers alike.
void Router::ForwardToAny(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  Worker* worker = Pick(pd_ ? Role::kDecode : Role::kWhole, "");
  if (worker == nullptr) return exchange->Respond(Refusal(503, "no server is healthy; try again later"));
  struct Collect final : HttpSink {
    void OnHead(int s, const HttpHeaders& headers) override {
      response.status = s;
      for (const auto& [name, value] : headers) {
        if (name == "content-type") response.content_type = value;
        if (name == "allow" || name == "www-authenticate") response.headers.emplace_back(name, value);
      }
    }
    void OnData(std::string_view bytes) override { response.body += bytes; }
    void OnEnd(Status status) override {
      router->Release(worker);
      exchange->Respond(status.ok() ? std::move(response)
                                    : Refusal(502, fmt::format("{}: {}", worker->spec.url, Message(status))));
    }
    Router* router;
    Worker* worker;
    std::shared_ptr<HttpExchange> exchange;
    HttpResponse response;
  };
  auto sink = std::make_shared<Collect>();
  sink->router = this;
  sink->worker = worker;
  sink->exchange = std::move(exchange);
  HttpCall call = CallTo(*worker, request, request.body);
  client_->Start(std::move(call), sink);
}

std::string Router::DescribeDeployment() {
  Json instances = Json::array();
  {
    std::lock_guard lock(mutex_);
    for (const auto& w : workers_) {
      Json one = {{"url", w->spec.url},
                  {"role", NameOf(w->spec.role)},
                  {"healthy", w->healthy},
                  {"load", w->load},
                  {"dispatched", w->dispatched}};
      if (!w->healthy) one["why"] = w->why;
      instances.push_back(std::move(one));
    }
  }
  return Json{{"version", options_.version},      {"policy", options_.policy}, {"running", running_.load()},
              {"finished", finished_.load()},     {"failed", failed_.load()},  {"retried", retried_.load()},
              {"instances", std::move(instances)}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string Router::Metrics() {
  std::string out;
  const auto line = [&](std::string_view name, std::string_view type, std::string_view help, int64_t value) {
    out += fmt::format("# HELP sluice:{0} {1}\n# TYPE sluice:{0} {2}\nsluice:{0} {3}\n", name, help, type,
                       value);
  };
  line("router_running_requests", "gauge", "Requests under way.", running_);
  line("router_requests_finished_total", "counter", "Requests that got a whole answer.", finished_);
  line("router_requests_failed_total", "counter", "Requests that got an error.", failed_);
  line("router_requests_refused_total", "counter", "Requests refused before dispatch.", refused_);
  line("router_clients_gone_total", "counter", "Clients that left before their answer was whole.", gone_);
  line("router_retries_total", "counter", "Dispatches repeated on other workers.", retried_);
  std::lock_guard lock(mutex_);
  for (const auto& [name, help, type] :
       {std::tuple{"router_worker_healthy", "1: requests are sent to it.", "gauge"},
        {"router_worker_load", "Requests under way on it.", "gauge"},
        {"router_worker_dispatched_total", "Requests sent to it.", "counter"}}) {
    out += fmt::format("# HELP sluice:{0} {1}\n# TYPE sluice:{0} {2}\n", name, help, type);
    for (const auto& w : workers_) {
      const std::string_view n = name;
      const int64_t value = n.ends_with("healthy") ? int64_t(w->healthy)
                            : n.ends_with("load")  ? w->load
                                                   : w->dispatched;
      out += fmt::format("sluice:{}{{worker=\"{}\",role=\"{}\"}} {}\n", name, w->spec.url,
                         NameOf(w->spec.role), value);
    }
  }
  return out;
}

}  // namespace sluice::router
