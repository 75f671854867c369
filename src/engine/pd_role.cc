#include "engine/pd_role.h"

#include <unordered_map>
#include <utility>

#include "disagg/decode_node.h"
#include "disagg/prefill_node.h"

namespace sluice {
namespace {

using disagg::RoomEvent;
using transfer::Aux;
using transfer::AuxToken;

// What both sides must agree on: the tokens and the namespace that their pages belong to.
Digest256 PromptDigest(const Request& request) {
  Hasher hasher;
  hasher.AddFramed(NamespaceKey(request.cache_salt, request.adapter));
  hasher.AddTokens(request.prompt);
  return hasher.Finish();
}

AuxToken ToAux(const TokenOut& t, uint64_t logits_hash) { return {t.token, t.logprob, t.top, logits_hash}; }

SampledToken FromAux(const AuxToken& t) {
  SampledToken s;
  s.token = t.token;
  s.logprob = t.logprob;
  for (const auto& [token, logprob] : t.top) s.top.push_back({token, logprob});
  s.logits_hash = t.logits_hash;
  return s;
}

// Sees every event of a request before the client does, to learn how it ended.
class WatchedOutput final : public OutputChannel {
 public:
  using Done = std::function<void(const std::vector<OutputEvent>& last)>;
  WatchedOutput(std::shared_ptr<OutputChannel> inner, int32_t choices, bool keep_tokens, Done done)
      : inner_(std::move(inner)),
        last_(size_t(choices)),
        left_(choices),
        keep_(keep_tokens),
        done_(std::move(done)) {}
  void Push(OutputEvent event) override {
    OutputEvent& mine = last_[size_t(event.choice)];
    if (keep_) {
      for (const TokenOut& t : event.tokens) mine.tokens.push_back(t);
      if (!event.prompt_logprobs.empty()) mine.prompt_logprobs = event.prompt_logprobs;
      mine.cached = event.cached;
      mine.logits_hash = event.logits_hash;
    }
    const bool final = event.finish != FinishReason::kNone;
    if (final) {
      mine.finish = event.finish;
      mine.error = event.error;
    }
    if (inner_ != nullptr) inner_->Push(std::move(event));
    if (final && --left_ == 0) done_(last_);
  }

 private:
  const std::shared_ptr<OutputChannel> inner_;
  std::vector<OutputEvent> last_;
  int32_t left_;
  const bool keep_;
  const Done done_;
};

// The worst end of all choices; OK when all ended well.
Status EndOf(const std::vector<OutputEvent>& last) {
  for (const OutputEvent& e : last) {
    if (e.finish == FinishReason::kStop || e.finish == FinishReason::kLength) continue;
    return e.error.ok() ? Aborted("the request was aborted") : e.error;
  }
  return OkStatus();
}

class PrefillRole final : public PdRole, private StepObserver {
 public:
  static StatusOr<std::unique_ptr<PdRole>> Make(const disagg::NodeOptions& options, const KvLayout& layout,
                                                const DevicePool& pool) {
    auto role = std::make_unique<PrefillRole>();
    PrefillRole* self = role.get();
    ASSIGN_OR_RETURN(role->node_, disagg::PrefillNode::Start(options, layout, pool, [self] {
                       if (self->wake) self->wake();
                     }));
    return role;
  }
  RemoteRole role() const override { return RemoteRole::kPrefill; }
  void Attach(Scheduler* scheduler) override { scheduler_ = scheduler; }
  StepObserver* observer() override { return this; }
  PdSnapshot Snapshot() const override { return node_->Stats(); }
  void Abandon() override {
    node_->StopThread();
    scheduler_->ForgetRooms();
  }

  void Accept(Request* request) override {
    const uint64_t room = request->remote.room;
    if (scheduler_->RoomInUse(room)) return;  // refused by the scheduler, without a word to the room's owner
    request->output = std::make_shared<WatchedOutput>(std::move(request->output), request->sampling.n, true,
                                                      [this, room](const std::vector<OutputEvent>& last) {
                                                        const auto seed = states_.extract(room);
                                                        if (Status end = EndOf(last); !end.ok())
                                                          return node_->Cancel(room, std::move(end));
                                                        Aux aux = MakeAux(last);
                                                        if (!seed.empty()) {
                                                          aux.draft_tokens = {aux.first_token};
                                                          aux.draft_hidden = seed.mapped();
                                                        }
                                                        node_->SetAux(room, std::move(aux));
                                                      });
    node_->Add(room, int64_t(request->prompt.size()), PromptDigest(*request));
  }

  bool Poll() override {
    events_.clear();
    if (!node_->TakeEvents(&events_)) return false;
    for (const RoomEvent& e : events_) {
      if (e.kind == RoomEvent::Kind::kReady) scheduler_->RoomReady(e.room);
      if (e.kind == RoomEvent::Kind::kFailed) scheduler_->RoomFailed(e.room, e.status);
      if (e.kind == RoomEvent::Kind::kEnded) scheduler_->RoomEnded(e.room);
    }
    return true;
  }

  void Open(const Request&, int32_t, std::span<const PageId>) override {}
  void Chunk(int64_t step, uint64_t room, int32_t start, int32_t end, bool first, bool last,
             std::span<const PageId> source) override {
    node_->BeginForward(step, room, {start, end, first, last}, {source.begin(), source.end()});
  }
  void FirstState(uint64_t room, std::span<const float> state) override {
    states_[room].assign(state.begin(), state.end());
  }

 private:
  void LayerFinal(int64_t step, LogicalLayer layer) override { node_->LayerFinal(step, layer); }
  bool EndsGroup(LogicalLayer layer) override { return node_->EndsGroup(layer); }
  void LayerQueued(int64_t step, LogicalLayer layer, std::shared_ptr<DeviceEvent> event) override {
    node_->LayerQueued(step, layer, std::move(event));
  }
  void StepDone(int64_t step, const Status& status) override { node_->ForwardDone(step, status); }

  static Aux MakeAux(const std::vector<OutputEvent>& last) {
    Aux aux;
    for (size_t i = 0; i < last.size(); ++i) {
      const AuxToken first =
          ToAux(last[i].tokens.empty() ? TokenOut() : last[i].tokens[0], last[i].logits_hash);
      if (i > 0) {
        aux.other_choices.push_back(first);
        continue;
      }
      aux.first_token = first.token;
      aux.logprob = first.logprob;
      aux.top_logprobs = first.top;
      aux.logits_hash = first.logits_hash;
      for (const TokenOut& t : last[i].prompt_logprobs) aux.prompt_logprobs.push_back(ToAux(t, 0));
      aux.cached_device = last[i].cached.device;
      aux.cached_host = last[i].cached.host;
      aux.cached_storage = last[i].cached.storage;
    }
    return aux;
  }

  Scheduler* scheduler_ = nullptr;
  std::vector<RoomEvent> events_;
  std::unordered_map<uint64_t, std::vector<float>> states_;  // of rooms whose first token is being sent
  std::unique_ptr<disagg::PrefillNode> node_;                // last: its thread ends first
};

class DecodeRole final : public PdRole {
 public:
  static StatusOr<std::unique_ptr<PdRole>> Make(const disagg::NodeOptions& options, const KvLayout& layout,
                                                const DevicePool& pool) {
    auto role = std::make_unique<DecodeRole>();
    DecodeRole* self = role.get();
    ASSIGN_OR_RETURN(role->node_, disagg::DecodeNode::Start(options, layout, pool, [self] {
                       if (self->wake) self->wake();
                     }));
    return role;
  }
  RemoteRole role() const override { return RemoteRole::kDecode; }
  void Attach(Scheduler* scheduler) override { scheduler_ = scheduler; }
  PdSnapshot Snapshot() const override { return node_->Stats(); }
  void Abandon() override {
    node_->StopThread();
    scheduler_->ForgetRooms();
  }

  void Accept(Request* request) override {
    const uint64_t room = request->remote.room;
    if (scheduler_->RoomInUse(room)) return;
    request->output = std::make_shared<WatchedOutput>(std::move(request->output), request->sampling.n, false,
                                                      [this, room](const std::vector<OutputEvent>& last) {
                                                        if (Status end = EndOf(last); !end.ok())
                                                          node_->Cancel(room, std::move(end));
                                                      });
    node_->Announce(room, request->remote.host, request->remote.port);
  }

  bool Poll() override {
    events_.clear();
    if (!node_->TakeEvents(&events_)) return false;
    for (const RoomEvent& e : events_) {
      if (e.kind == RoomEvent::Kind::kReady) scheduler_->RoomFilled(e.room, ResultOf(e.aux));
      if (e.kind == RoomEvent::Kind::kFailed) scheduler_->RoomFailed(e.room, e.status);
      if (e.kind == RoomEvent::Kind::kEnded) scheduler_->RoomEnded(e.room);
    }
    return true;
  }

  void Open(const Request& request, int32_t first_page, std::span<const PageId> pages) override {
    node_->Open(request.remote.room, int64_t(request.prompt.size()), PromptDigest(request), first_page,
                {pages.begin(), pages.end()});
  }
  void Chunk(int64_t, uint64_t, int32_t, int32_t, bool, bool, std::span<const PageId>) override {}
  void FirstState(uint64_t, std::span<const float>) override {}

 private:
  static RemoteResult ResultOf(const Aux& aux) {
    RemoteResult r;
    r.first.push_back(FromAux({aux.first_token, aux.logprob, aux.top_logprobs, aux.logits_hash}));
    for (const AuxToken& t : aux.other_choices) r.first.push_back(FromAux(t));
    for (const AuxToken& t : aux.prompt_logprobs) {
      TokenOut out;
      out.token = t.token;
      out.logprob = t.logprob;
      out.top = t.top;
      r.prompt_logprobs.push_back(std::move(out));
    }
    r.cached = {aux.cached_device, aux.cached_host, aux.cached_storage};
    r.first_state = aux.draft_hidden;
    return r;
  }

  Scheduler* scheduler_ = nullptr;
  std::vector<RoomEvent> events_;
  std::unique_ptr<disagg::DecodeNode> node_;  // last: its thread ends first
};

}  // namespace

StatusOr<std::unique_ptr<PdRole>> MakePrefillRole(const disagg::NodeOptions& options, const KvLayout& layout,
                                                  const DevicePool& pool) {
  return PrefillRole::Make(options, layout, pool);
}
StatusOr<std::unique_ptr<PdRole>> MakeDecodeRole(const disagg::NodeOptions& options, const KvLayout& layout,
                                                 const DevicePool& pool) {
  return DecodeRole::Make(options, layout, pool);
}

}  // namespace sluice
