#include "router/dispatch.h"

#include <fmt/format.h>

namespace sluice::router {

using Role = WorkerSpec::Role;

Router::Dispatch::~Dispatch() {
  std::lock_guard lock(router_->dispatches_mutex_);
  router_->dispatches_.erase(this);
  --router_->running_;
}

void Router::Dispatch::Start() {
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

void Router::Dispatch::GiveUp(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (!over_) FailLocked(503, why);
}

void Router::Dispatch::TryLocked() {
  sides_[0] = sides_[1] = Side();
  streaming_ = false;
  const bool pd = router_->pd();
  if (pd && (sides_[0].worker = router_->Pick(Role::kPrefill, key_)) == nullptr)
    return FailLocked(503, "no prefill instance is healthy; try again later");
  if ((sides_[1].worker = router_->Pick(pd ? Role::kDecode : Role::kWhole, key_)) == nullptr) {
    if (pd) router_->Release(sides_[0].worker);
    return FailLocked(
        503, pd ? "no decode instance is healthy; try again later" : "no server is healthy; try again later");
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

void Router::Dispatch::OnHead(int attempt, bool answers, int status, const HttpHeaders& headers) {
  std::lock_guard lock(mutex_);
  if (attempt != attempt_) return;
  Side& side = sides_[answers ? 1 : 0];
  side.status = status;
  side.headers = headers;
}

void Router::Dispatch::OnData(int attempt, bool answers, std::string_view bytes) {
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

void Router::Dispatch::OnEnd(int attempt, bool answers, Status status) {
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
  if (side.status >= 500 && sides_[1].status != 0 && sides_[1].status != 200) return;  // decode says it, too
  over_ = true;
  ++router_->failed_;
  CancelLocked();
  if (!streaming_) return exchange_->Respond(Pass(side));
  exchange_->Write("data: " + side.body + "\n\n");
  exchange_->EndStream();
}

bool Router::Dispatch::IsStream(const HttpHeaders& headers) {
  for (const auto& [name, value] : headers)
    if (name == "content-type") return value.starts_with("text/event-stream");
  return false;
}

HttpResponse Router::Dispatch::Pass(const Side& side) {
  HttpResponse r{.status = side.status, .body = side.body};
  for (const auto& [name, value] : side.headers) {
    if (name == "content-type") r.content_type = value;
    if (name == "retry-after" || name == "www-authenticate") r.headers.emplace_back(name, value);
  }
  return r;
}

bool Router::Dispatch::RetryLocked() {
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

void Router::Dispatch::CancelLocked() {
  for (const Side& side : sides_)
    if (side.running) router_->client_->Cancel(side.call);
}

void Router::Dispatch::FailLocked(int status, const std::string& message) {
  over_ = true;
  ++router_->failed_;
  CancelLocked();
  if (!streaming_) return exchange_->Respond(Refusal(status, message));
  exchange_->Write("data: " + ErrorBody(message, "service_unavailable", "unavailable") + "\n\n");
  exchange_->EndStream();
}

}  // namespace sluice::router
