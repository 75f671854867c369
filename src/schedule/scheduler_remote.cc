// Requests that are prefilled in one instance and decoded in another.
//
// Prefill: a sequence waits until its room is ready, computes the prompt and one token, and keeps its pages
// until the room has ended. Decode: a sequence reserves its pages, waits in kReceiving while they are filled,
// and goes on as if it had computed them.
#include <algorithm>

#include "base/check.h"
#include "schedule/scheduler.h"

namespace sluice {

void Scheduler::SetRemote(RemoteRooms* remote) {
  SLUICE_CHECK((options_.remote != RemoteRole::kNone) == (remote != nullptr), "role {}",
               int(options_.remote));
  remote_ = remote;
}

RequestGroup* Scheduler::FindRoom(uint64_t room) const {
  const auto it = rooms_.find(room);
  return it == rooms_.end() ? nullptr : it->second;
}

bool Scheduler::AwaitsPages(const Sequence& s) const {
  return options_.remote == RemoteRole::kDecode && s.group->request.remote.active && s.choice == 0 &&
         int32_t(s.tokens.size()) == s.group->prompt_len();
}

void Scheduler::Hold(Sequence* s) {
  SLUICE_CHECK(!s->held, "sequence {}:{}", s->group->arrival, s->choice);
  s->held = true;
  ++s->in_flight;
}

void Scheduler::Receive(Sequence* s) {
  s->state = SeqState::kReceiving;
  Hold(s);
  const size_t pages = size_t(CeilDiv(s->group->prompt_len(), kPageTokens));
  const size_t first = size_t(s->kv.computed / kPageTokens);
  remote_->Open(s->group->request, int32_t(first), std::span(s->kv.pages).subspan(first, pages - first));
}

void Scheduler::TellChunks(const Step& step) {
  if (options_.remote != RemoteRole::kPrefill) return;
  for (const Part& part : step.parts) {
    const Sequence* s = part.seq;
    if (!s->held || part.rows == 0) continue;
    const int32_t prompt = s->group->prompt_len(), end = part.start + part.rows;
    remote_->Chunk(step.id, s->group->request.remote.room, part.start, end, part.start <= s->kv.cached,
                   end == prompt, std::span(s->kv.pages).first(size_t(CeilDiv(prompt, kPageTokens))));
  }
}

void Scheduler::RoomReady(uint64_t room) {
  RequestGroup* group = FindRoom(room);
  if (group == nullptr) return;
  for (Sequence* s : group->sequences) s->wait_room = false;
  blocked_ = false;
}

void Scheduler::RoomFailed(uint64_t room, const Status& status) {
  RequestGroup* group = FindRoom(room);
  if (group != nullptr && group->unfinished > 0) EndGroup(group, FinishReason::kError, status);
}

void Scheduler::RoomEnded(uint64_t room) {
  RequestGroup* group = FindRoom(room);
  if (group == nullptr) return;
  for (Sequence* s : group->sequences) {
    if (!s->held) continue;
    s->held = false;
    blocked_ = false;
    return Settle(s);  // may drop the group
  }
}

void Scheduler::ForgetRooms() {
  std::vector<uint64_t> rooms;
  for (const auto& [room, group] : rooms_) rooms.push_back(room);
  std::sort(rooms.begin(), rooms.end());
  for (const uint64_t room : rooms) {
    RoomFailed(room, Unavailable("the server is shutting down"));
    RoomEnded(room);
  }
}

void Scheduler::RoomFilled(uint64_t room, const RemoteResult& result) {
  RequestGroup* group = FindRoom(room);
  if (group == nullptr) return;
  Sequence* s = nullptr;
  for (Sequence* c : group->sequences)
    if (c->state == SeqState::kReceiving) s = c;
  if (s == nullptr) return;  // it ended while the last bytes came
  if (int32_t(result.first.size()) != group->choices() ||
      int32_t(result.prompt_logprobs.size()) != group->scored_tokens()) {
    return EndGroup(
        group, FinishReason::kError,
        Internal("room {}: prefill sent {} first tokens and {} prompt logprobs, {} and {} are due", room,
                 result.first.size(), result.prompt_logprobs.size(), group->choices(),
                 group->scored_tokens()));
  }
  if (int64_t(result.first_state.size()) != options_.draft_state_floats) {
    return EndGroup(group, FinishReason::kError,
                    Internal("room {}: prefill sent a state of {} values for the draft layer, {} are due",
                             room, result.first_state.size(), options_.draft_state_floats));
  }
  group->cached = result.cached;
  group->prompt_logprobs = result.prompt_logprobs;
  s->state = SeqState::kRunning;
  s->planned = s->computed = group->prompt_len();
  s->sampled_in_slot = s->init_slot = true;
  s->state_missing = false;  // it came with the pages
  s->first_state = result.first_state;
  s->held = false;
  TellCache(s);
  // The other choices begin like retracted ones: they find the prompt's full pages here and compute its tail.
  std::vector<Sequence*> choices = {s};
  while (group->spawned < group->choices()) {
    Sequence* other = NewSequence(group, group->spawned++);
    Insert(&waiting_, other);
    choices.push_back(other);
  }
  for (size_t i = 0; i < choices.size(); ++i) KeepToken(choices[i], result.first[i]);
  Settle(s);
  blocked_ = false;
}

}  // namespace sluice
