// One request of a client: the calls to its workers and the one answer.
//
// Lives until its last call has ended; the router ends it early by GiveUp. Thread: any.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "router/worker.h"

namespace sluice::router {

class Router::Dispatch : public std::enable_shared_from_this<Router::Dispatch> {
 public:
  Dispatch(Router* router, HttpRequest request, std::string key, std::shared_ptr<HttpExchange> exchange)
      : router_(router), request_(std::move(request)), key_(std::move(key)), exchange_(std::move(exchange)) {
    ++router_->running_;
  }
  ~Dispatch();
  void Start();
  void GiveUp(const std::string& why);

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

  void TryLocked();
  void OnHead(int attempt, bool answers, int status, const HttpHeaders& headers);
  void OnData(int attempt, bool answers, std::string_view bytes);
  void OnEnd(int attempt, bool answers, Status status);
  static bool IsStream(const HttpHeaders& headers);
  static HttpResponse Pass(const Side& side);
  // Nothing has reached the client and a worker broke: another pair may do better.
  bool RetryLocked();
  void CancelLocked();
  void FailLocked(int status, const std::string& message);

  Router* const router_;
  const HttpRequest request_;
  const std::string key_;
  const std::shared_ptr<HttpExchange> exchange_;
  std::mutex mutex_;
  Side sides_[2];
  int attempt_ = 0;
  bool over_ = false, streaming_ = false;
};

}  // namespace sluice::router
