// Decides what each step computes. Owns every queued and running sequence; knows no executor, thread or
// clock: time comes in as a value, work leaves as a ForwardBatch, results come back as a StepResult, tokens
// go to the requests' channels.
//
// Plan may be called again before the result of an earlier plan has been committed (one step ahead): input
// tokens are then references to executor slots, and a sequence that turns out to be finished is dropped from
// the later step's result. Results must be committed in the order of the plans. The same calls with the same
// values give the same batches.
//
// Invariants, checked by Audit:
//   1 Every choice of every request gets exactly one event with a finish reason.
//   2 A page or a slot goes back only when no submitted batch and no prepared page copy refers to it.
//   3 The token at a position does not depend on batching, chunking, retraction or the number of steps
//   planned ahead. 4 The oldest sequence (of the highest priority) always makes progress: retraction takes
//   the newest.
//
// One thread. Check() alone may be called from any thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "batch/forward_batch.h"
#include "cache/kv_cache.h"
#include "request/request.h"
#include "schedule/draft_control.h"
#include "schedule/remote_rooms.h"
#include "schedule/sequence.h"

namespace sluice {

enum class SchedulePolicy : uint8_t { kFcfs, kLongestPrefix };

struct SchedulerOptions {
  int64_t max_running = 64;     // choices that hold a slot
  int64_t chunk_tokens = 2048;  // prefill rows of a step; <= 0: prompts are never cut
  int64_t max_prefill_tokens =
      16384;  // prefill rows of a step, when prompts are not cut: of all but the first
  int64_t context_length = 0;
  SchedulePolicy policy = SchedulePolicy::kFcfs;
  bool use_priority = false;      // higher first
  bool jump_ahead = true;         // tokens that a constraint forces are not sampled one by one
  double conservativeness = 1.0;  // scales the share of future tokens that admission keeps room for
  std::vector<int32_t> eos_token_ids;
  bool label_kv = false;           // tell the cache the request's name, for its records
  int64_t draft_state_floats = 0;  // of a state that the draft layer starts from; 0: no speculation
  int32_t draft_tokens = 0;        // drafted tokens of a sequence and step at most; 0: no speculation
  bool adaptive_drafts = false;    // load and acceptance decide; else always draft_tokens
  DraftCost draft_cost;            // until steps have been measured
  RemoteRole remote = RemoteRole::kNone;
  int64_t reserved_decode_tokens =
      0;  // decode: room for the answer that admission of a room asks for, at least
};

struct SchedulerCounters {
  int64_t prompt_tokens = 0, generation_tokens = 0, cached_tokens = 0, retractions = 0;
  int64_t finished = 0, aborted = 0, failed = 0;
  int64_t steps = 0, prefill_rows = 0, decode_rows = 0, dropped_tokens = 0;
  int64_t forced_tokens = 0;  // kept without a step of their own
  DraftCounters drafts;
};

// Rows of the largest step, and slots that the executor must have: sequences that end hold theirs until the
// steps in flight have passed.
int64_t MaxStepRows(const SchedulerOptions& options);
inline int32_t NumSlots(const SchedulerOptions& options) { return int32_t(2 * options.max_running); }

class Scheduler {
 public:
  Scheduler(const SchedulerOptions& options, KvCache* cache);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  int32_t num_slots() const { return NumSlots(options_); }

  // Why a request can never run; Ok otherwise.
  Status Check(const Request& request) const;
  // REQUIRES Check(request).ok(). Starts looking in storage for the prompt's pages.
  void Enqueue(Request request, Nanos now);
  // True when a request of that name was queued or running. Its choices end now.
  bool Abort(std::string_view rid, const Status& reason);
  int64_t AbortAll(const Status& reason);
  // A stop string ended one choice on the text side: it ends now, with kStop. False: no such choice is alive.
  bool Finish(std::string_view rid, int32_t choice);

  // Fills *batch; false when there is nothing to submit.
  bool Plan(Nanos now, ForwardBatch* batch);
  void Commit(const StepResult& result);
  // The cache reported storage progress: sequences that wait for it are tried again.
  void OnCacheProgress() { storage_progress_ = true; }

  // Roles with a peer: before the first request.
  void SetRemote(RemoteRooms* remote);
  bool RoomInUse(uint64_t room) const { return rooms_.contains(room); }
  void RoomReady(uint64_t room);  // prefill: its sequence may be computed
  void RoomFilled(uint64_t room,
                  const RemoteResult& result);           // decode: no writer is left, the pages are final
  void RoomFailed(uint64_t room, const Status& status);  // the request ends with this error
  void ForgetRooms();                                    // the transfer is gone: as RoomEnded for all
  void RoomEnded(uint64_t room);                         // its pages have no reader and no writer elsewhere

  bool idle() const { return groups_.empty() && steps_.empty() && fork_copies_.empty(); }
  int64_t running() const { return int64_t(running_.size()); }
  int64_t waiting() const { return int64_t(waiting_.size()); }
  // Of these, the ones that have not been admitted yet (a retracted sequence is not the queue's fault).
  int64_t waiting_new() const { return waiting_new_; }
  int64_t steps_in_flight() const { return int64_t(steps_.size()); }
  Nanos next_deadline() const { return next_deadline_; }
  const SchedulerCounters& counters() const { return counters_; }
  // Running ones first, then waiting ones, each in their order.
  template <typename F>
  void ForEachSequence(F f) const {
    for (const Sequence* s : running_) f(*s);
    for (const Sequence* s : waiting_) f(*s);
  }
  std::vector<std::string> Audit() const;

 private:
  // What a submitted step does for a sequence.
  struct Part {
    Sequence* seq;
    int32_t start = 0, rows = 0;
    int32_t sample = -1;                       // index of the sample that is its next token
    int32_t samples = 0;                       // of the run that starts there: one, and one a drafted row
    int32_t score_begin = 0, score_count = 0;  // samples that score prompt tokens
    int32_t forks = 0;                         // the next `forks` parts are choices that fork off this one
  };
  struct Step {
    int64_t id = 0;
    std::vector<Part> parts;
    std::vector<Sequence*> pins;  // sources and targets of page copies
    std::vector<int64_t> loads;   // copy plans whose pages the step reads
  };
  struct ForkCopy {
    Sequence* from;
    Sequence* to;
    PageCopy copy;
  };

  // scheduler_plan.cc
  void ExpireDeadlines(Nanos now);
  void PlanDecodes(ForwardBatch* batch, Step* step);
  void PlanJumps(ForwardBatch* batch, Step* step, int64_t* budget);
  void PlanPrefills(ForwardBatch* batch, Step* step, int64_t* budget);
  void PrefetchAhead(Nanos now);
  void Admit(Nanos now, ForwardBatch* batch, Step* step, int64_t* budget);
  enum class Admission : uint8_t { kAdmitted, kTryNext, kBlocked };
  Admission TryAdmit(Sequence* s, Nanos now);
  void OrderByPrefix();
  int64_t PagesFor(const Sequence& s, int64_t future_tokens) const;
  int64_t FutureTokens(const Sequence& s) const;
  int64_t RowsThisStep(const Sequence& s, int64_t budget, bool first) const;
  // Rows of a decode: one, and one for each of `verify` drafted tokens.
  void AppendRows(Sequence* s, int32_t rows, int32_t verify, int32_t draft_next, ForwardBatch* batch,
                  Step* step);
  void AppendPrefill(Sequence* s, int32_t rows, ForwardBatch* batch, Step* step);
  bool speculates() const { return options_.draft_tokens > 0; }
  // Tokens worth drafting once a step with `verify` drafted rows has sampled.
  int32_t DraftNext(const Sequence& s, int32_t verify) const;
  void AppendForks(Sequence* s, const SampleRow& row, ForwardBatch* batch, Step* step);
  SampleRow MakeSampleRow(const Sequence& s, int32_t row, int32_t position) const;
  void InitSlot(Sequence* s, ForwardBatch* batch);
  bool GrowForDecode(Sequence* s);
  void Retract(Sequence* s);

  // scheduler_commit.cc
  void CommitPart(const Part& part, const StepResult& result);
  void CommitFork(Sequence* parent, const Part& part, const StepResult& result);
  bool AttachPages(Sequence* parent, Sequence* fork);
  // True: the token that it samples is kept already.
  bool Withdraw(const Part& part);
  // Keeps the tokens that must follow the sampled one.
  void Jump(Sequence* s, const SampledToken& sampled);
  void KeepScores(const Part& part, const StepResult& result);
  // Appends the token, sends it, ends the sequence when it is the last.
  void KeepToken(Sequence* s, const SampledToken& sampled);
  void KeepRun(Sequence* s, const Part& part, const StepResult& result);
  void TellCache(Sequence* s);
  void StepFailed(const Step& step, const Status& status);
  // Pages did not arrive: nothing the step computed counts, its sequences start again.
  void LoadFailed(const Step& step);
  // Sequences that hit pages of a failed load after its step was planned start again, too.
  void RetractLost();

  // scheduler_remote.cc
  RequestGroup* FindRoom(uint64_t room) const;
  bool AwaitsPages(const Sequence& s) const;
  void Hold(Sequence* s);
  void Receive(Sequence* s);
  void TellChunks(const Step& step);

  // scheduler.cc
  Sequence* NewSequence(RequestGroup* group, int32_t choice);
  void Insert(std::vector<Sequence*>* list, Sequence* s);
  void Remove(std::vector<Sequence*>* list, Sequence* s);
  bool Before(const Sequence& a, const Sequence& b) const;
  void SendFinal(RequestGroup* group, int32_t choice, Sequence* s, OutputEvent event);
  void FillFirst(RequestGroup* group, OutputEvent* event) const;
  // Ends a choice that has a sequence: final event now, pages and slot as soon as nothing refers to them.
  void End(Sequence* s, OutputEvent event);
  void EndGroup(RequestGroup* group, FinishReason reason, const Status& status);
  // Gives back what a leaving or retracting sequence holds once in_flight is 0.
  void LetGo(Sequence* s);
  void DropGroupIfDone(RequestGroup* group);
  SlotId TakeSlot();  // the lowest free one
  void GiveSlot(SlotId slot);
  void Unref(Sequence* s);
  void Settle(Sequence* s);

  const SchedulerOptions options_;
  KvCache* const cache_;
  const int64_t token_limit_;  // of one sequence: context and pool

  std::unordered_map<int64_t, std::unique_ptr<RequestGroup>> groups_;  // by arrival
  std::unordered_multimap<std::string, RequestGroup*> by_rid_;
  RemoteRooms* remote_ = nullptr;
  std::unordered_map<uint64_t, RequestGroup*> rooms_;  // of requests with a room
  std::unordered_map<Sequence*, std::unique_ptr<Sequence>> sequences_;
  std::vector<Sequence*> waiting_;     // in order of Before
  std::vector<Sequence*> running_;     // in order of Before: running and forking
  std::vector<Sequence*> leaving_;     // leaving and retracting
  std::vector<SlotId> free_slots_;     // a heap, lowest first
  std::vector<ForkCopy> fork_copies_;  // ride on the next batch
  std::deque<Step> steps_;             // planned, not committed
  std::vector<Step> spare_steps_;
  int64_t next_arrival_ = 0, next_step_ = 1;
  int64_t waiting_new_ = 0;
  Nanos next_deadline_ = 0;  // 0: none
  bool storage_progress_ = false;
  // Admission gave up for lack of pages at this state; tried again when it has changed.
  bool blocked_ = false;
  int64_t blocked_available_ = 0;
  int64_t blocked_step_ = 0;
  double reserve_ratio_;
  SchedulerCounters counters_;
  DraftControl draft_control_;
  std::vector<std::pair<int32_t, Sequence*>> prefix_order_;  // scratch of OrderByPrefix
};

}  // namespace sluice
