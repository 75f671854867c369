#include <algorithm>

#include "nlohmann/json.hpp"
#include "router/worker.h"

namespace sluice::router {

using Json = nlohmann::ordered_json;
using Role = WorkerSpec::Role;

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

void Router::FanOut(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  if (request.path == "/flush_cache") {
    std::lock_guard lock(mutex_);
    for (const auto& w : workers_) policies_[int(w->spec.role)]->Forget(w->index);
  }
  std::make_shared<Fan>(this, request.path, std::move(exchange))->Start(request);
}

}  // namespace sluice::router
