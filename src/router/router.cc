#include "router/router.h"

#include <simdjson.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <random>

#include "base/log.h"
#include "nlohmann/json.hpp"
#include "router/dispatch.h"

namespace sluice::router {
namespace {

using Json = nlohmann::ordered_json;
using Role = WorkerSpec::Role;

// Prompts of one request meet in rooms next to each other: rooms of two requests are this far apart at least.
constexpr uint64_t kRoomStride = 4096;
constexpr uint64_t kRoomsMax = 1ull << 62;

bool Generates(std::string_view path) {
  return path == "/v1/chat/completions" || path == "/v1/completions" || path == "/generate" ||
         path == "/v1/messages";
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

const char* NameOf(Role role) {
  return role == Role::kWhole ? "worker" : role == Role::kPrefill ? "prefill" : "decode";
}

std::string ErrorBody(const std::string& message, const char* type, const char* code) {
  return Json{{"error", {{"message", message}, {"type", type}, {"param", nullptr}, {"code", code}}}}.dump(
      -1, ' ', false, Json::error_handler_t::replace);
}

HttpResponse Refusal(int status, const std::string& message, const char* type, const char* code) {
  HttpResponse r{.status = status, .body = ErrorBody(message, type, code)};
  if (status == 503 || status == 429) r.headers.emplace_back("Retry-After", "1");
  return r;
}

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
