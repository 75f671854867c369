// The front door of several servers: picks a prefill and a decode instance (or one whole server) for each
// request, passes the answer on, and keeps out what is ill.
//
// With prefill and decode instances every request gets a room of its own before it is dispatched to both; the
// answer is decode's. A client that leaves cancels both sides; an error of prefill before decode has answered
// is the answer.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "http/client.h"
#include "http/server.h"
#include "router/live_relay.h"
#include "router/policy.h"

namespace sluice::router {

struct WorkerSpec {
  enum class Role : uint8_t { kWhole, kPrefill, kDecode } role{};
  std::string url;
  int bootstrap_port = 0;  // of a prefill instance
};

struct RouterOptions {
  HttpServerOptions http;
  std::vector<WorkerSpec> workers;
  std::string policy = "cache_aware", prefill_policy, decode_policy;  // a side without its own: `policy`
  double health_interval_s = 2;
  double health_timeout_s = 5;
  int health_failures = 2;          // in a row: ill
  double request_timeout_s = 1800;  // without a byte from the worker
  int retries = 1;                  // on other workers, when one fails before it has answered anything
  std::string version;
  std::optional<HttpResponse> page;  // what "/" answers; none: no page, no live data
  std::string api_key;  // for health checks and fan-out of the router's own; clients bring theirs
};

class Router final : public HttpHandler {
 public:
  static StatusOr<std::unique_ptr<Router>> Start(const RouterOptions& options);
  ~Router() override;
  uint16_t port() const { return http_->port(); }
  // From now on new requests are refused with 503.
  void BeginDrain() { draining_ = true; }
  int64_t running() const { return running_; }
  // Requests under way end with an error, streams with an error event; their clients learn why.
  void EndAll(const std::string& why);
  void Stop(double grace_s);

  std::optional<HttpResponse> CheckHead(const HttpRequest& head) override;
  void Handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) override;
  HttpResponse ErrorResponse(HttpError error, std::string_view detail) override;

 private:
  struct Worker;
  class Dispatch;
  class Fan;
  explicit Router(const RouterOptions& options);
  bool pd() const { return pd_; }
  // Null: none is healthy. Raises the load of what it returns.
  Worker* Pick(WorkerSpec::Role role, std::string_view key);
  void Release(Worker* worker);
  void MarkFailed(Worker* worker, std::string_view why);
  void CheckHealth();
  void Generate(HttpRequest request, std::shared_ptr<HttpExchange> exchange);
  void ForwardToAny(HttpRequest request, std::shared_ptr<HttpExchange> exchange);
  void FanOut(HttpRequest request, std::shared_ptr<HttpExchange> exchange);
  void Health(const std::shared_ptr<HttpExchange>& exchange);
  std::string Metrics();
  std::string DescribeDeployment();  // one JSON object, for the page
  uint64_t NewRoom();
  HttpCall CallTo(const Worker& worker, const HttpRequest& request, std::string body) const;

  const RouterOptions options_;
  bool pd_ = false;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::mutex mutex_;  // policies, worker state, room numbers
  std::unique_ptr<Policy> policies_[3];
  SeededStream random_;
  std::atomic<bool> draining_{false}, stop_{false};
  std::atomic<int64_t> running_{0}, finished_{0}, failed_{0}, refused_{0}, retried_{0}, gone_{0};
  std::mutex dispatches_mutex_;
  std::unordered_map<Dispatch*, std::weak_ptr<Dispatch>> dispatches_;
  std::unique_ptr<HttpClient> client_;
  std::unique_ptr<LiveRelay> live_;  // null: no page
  std::unique_ptr<HttpServer> http_;
  std::thread health_;
};

}  // namespace sluice::router
